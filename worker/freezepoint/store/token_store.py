"""The store: every method takes one rollout's lock, looks at its files, and is durable when it returns."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from collections import OrderedDict
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from freezepoint.calls import Said, Standing
from freezepoint.captured import CaptureSnapshot, entry_fields, token_entry
from freezepoint.errors import ConflictingEntryError, DamagedCaptureError, DecodeError, InvalidRolloutIdError
from freezepoint.store.files import (
    INCOMPLETE,
    INTENTS,
    LOCK,
    STATE,
    RolloutFiles,
    make_directory,
    storable_id,
)
from freezepoint.store.intents import intent_line
from freezepoint.store.log import LogIndex, line_of
from freezepoint.store.reading import read_log
from freezepoint.store.state import CaptureState
from freezepoint.store.texts import PromptTexts
from freezepoint_schemas.events import CallIntent, CaptureIncomplete, TokenEntry
from freezepoint_schemas.reasons import Reason

ROLLOUTS_INDEXED_MAX = 1024


class TokenStore:
    """A directory with one ``<rollout_id>.tokens.jsonl`` per rollout, shared by any number of processes of one machine.

    It is a sink and a source as NeMo Gym defines them: ``put``, ``mark_incomplete``, ``begin_call``, ``cancel_call`` for
    who serves calls, ``freeze`` and ``drop`` for who trains. These work on a thread; each has a blocking form ``…_now``.

    Every method raises ``InvalidRolloutIdError`` for what is no rollout id (or one longer than 237 characters),
    ``DamagedCaptureError`` where files do not hold what was acknowledged, and ``OSError`` where the disk fails; nothing
    was recorded then.

    :param directory: made where it is missing; on a local disk, or any that locks files across those who use it.
    :param rollouts_indexed_max: of so many rollouts, those used last, the calls are known in memory (some 200 bytes a
        call); a put to another one reads its file once. The JSON of their last prompts takes up to 64 MiB more.
    """

    def __init__(self, directory: str | Path, *, rollouts_indexed_max: int = ROLLOUTS_INDEXED_MAX) -> None:
        self.directory = Path(directory)
        make_directory(self.directory)
        self._indexed_max = rollouts_indexed_max
        self._indexes: OrderedDict[str, LogIndex] = OrderedDict()
        self._indexes_lock = threading.Lock()
        self._texts = PromptTexts()

    # ---------------------------------------------------------------------------------------------------- recording

    async def put(self, entry: object) -> None:
        """See :meth:`put_now`."""
        await asyncio.to_thread(self.put_now, entry)

    def put_now(self, entry: object) -> None:
        """Record one call; the same call again is no error and changes nothing.

        :param entry: a ``TokenEntry``, any object with its attributes (NeMo Gym's model is one), or a mapping.
        :raises DecodeError: it is no token entry.
        :raises ConflictingEntryError: the call id stands for another payload, which is kept; the rollout is incomplete.
        :raises FrozenRolloutError: the rollout is frozen or retired.
        """
        rollout_id, said, line = self._checked(entry)
        files = self._files(rollout_id)
        with files.locked() as life:
            state = CaptureState.read(files)
            state.require_open(rollout_id)
            index, log = self._taken(files, life), files.open_entries()
            try:
                index.catch_up(files, log)
                standing = index.calls.standing(said)
                if standing is Standing.NEW:
                    index.append(files, log, said, line)
                else:
                    index.ensure_durable(files, log)
            finally:
                os.close(log)
            self._keep(rollout_id, index)
            if standing is Standing.CONFLICT:
                state.mark_incomplete()
                state.write(files)
                raise ConflictingEntryError(
                    f"call {said.call_id[:80]!r} of rollout {rollout_id} was recorded with another payload before"
                )

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """See :meth:`begin_call_now`."""
        await asyncio.to_thread(self.begin_call_now, rollout_id, model_call_id)

    def begin_call_now(self, rollout_id: str, model_call_id: str) -> None:
        """Announce a call before it is made: if it is never recorded, the rollout is incomplete.

        :raises FrozenRolloutError: the rollout is frozen or retired.
        """
        self._announce(rollout_id, model_call_id, withdrawn=False)

    async def cancel_call(self, rollout_id: str, model_call_id: str) -> None:
        """See :meth:`cancel_call_now`."""
        await asyncio.to_thread(self.cancel_call_now, rollout_id, model_call_id)

    def cancel_call_now(self, rollout_id: str, model_call_id: str) -> None:
        """Withdraw the announcement of a call that generated nothing.

        :raises FrozenRolloutError: the rollout is frozen or retired.
        """
        self._announce(rollout_id, model_call_id, withdrawn=True)

    def _announce(self, rollout_id: str, model_call_id: str, *, withdrawn: bool) -> None:
        files = self._files(rollout_id)
        _check_call(CallIntent, rollout_id, model_call_id)
        with files.locked():
            CaptureState.read(files).require_open(rollout_id)
            files.append_line(INTENTS, intent_line(model_call_id, withdrawn=withdrawn))

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """See :meth:`mark_incomplete_now`."""
        await asyncio.to_thread(self.mark_incomplete_now, rollout_id, model_call_id)

    def mark_incomplete_now(self, rollout_id: str, model_call_id: str = "") -> None:
        """A call could not be captured. After the freeze too: the snapshot's version grows, so that it is not dropped.

        :raises FrozenRolloutError: the rollout is retired.
        """
        files = self._files(rollout_id)
        _check_call(CaptureIncomplete, rollout_id, model_call_id)
        with files.locked():
            state = CaptureState.read(files)
            state.require_kept(rollout_id)
            state.mark_incomplete()
            state.write(files)
            files.append_line(INCOMPLETE, " ".join(model_call_id.split()).encode())

    # ---------------------------------------------------------------------------------------------------- consuming

    async def freeze(self, rollout_id: str) -> CaptureSnapshot:
        """See :meth:`freeze_now`."""
        return await asyncio.to_thread(self.freeze_now, rollout_id)

    def freeze_now(self, rollout_id: str) -> CaptureSnapshot:
        """Let nothing more be recorded, and read what was. Freezing again gives the same snapshot, in a higher version
        where something was marked since. A rollout without any record gives an empty one.

        :raises FrozenRolloutError: the rollout is retired.
        :raises DamagedCaptureError: a line but the last one is malformed; the rollout stays open.
        """
        files = self._files(rollout_id)
        with files.locked():
            state = CaptureState.read(files)
            state.require_kept(rollout_id)
            files.sync_entries()
            found = read_log(files, state)
            version = state.version + found.fresh + (not state.frozen)
            contradictory = found.contradictory and not state.incomplete
            if version != state.version or contradictory:
                state.version, state.indexed_size = version, found.size
                if contradictory:
                    state.mark_incomplete()
                if not state.frozen:
                    state.frozen, state.snapshot_id = True, uuid.uuid4().hex
                state.write(files)
            self._forget(rollout_id)
        return CaptureSnapshot(rollout_id, state.snapshot_id, state.version, found.lost, found.log)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """See :meth:`drop_now`."""
        return await asyncio.to_thread(self.drop_now, rollout_id, snapshot_id=snapshot_id, version=version)

    def drop_now(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Delete the records of a snapshot that was consumed, and keep a tombstone that refuses late writers.

        False where the rollout has changed since that snapshot: it keeps its records.
        """
        files = self._files(rollout_id)
        with files.locked():
            state = CaptureState.read(files)
            if not state.frozen or (state.snapshot_id, state.version) != (snapshot_id, version):
                return False
            if not state.retired:  # first, so that a crash leaves payload behind and never a shorter rollout
                state.retired, state.indexed_size, state.other = True, 0, {"entry_digests": {}}
                state.write(files)
            files.remove_payload()
            files.sync_directory()
            self._forget(rollout_id)
            return True

    # ----------------------------------------------------------------------------------------------------- clearing

    def delete(self, rollout_id: str) -> None:
        """Forget the rollout, whatever its state: it is about to be dispatched (again)."""
        files = self._files(rollout_id)
        if not files.exists:
            return
        with files.locked():
            files.remove_payload()
            files.remove(STATE)  # last: a crash leaves what refuses to be mixed with another attempt
            files.begin_life()
            files.sync_directory()
            self._forget(rollout_id)

    def sweep_retired(self, older_than_seconds: float) -> int:
        """Remove the tombstones of rollouts dropped longer ago than that; how many those were.

        Long enough is longer than any late writer of a dropped rollout may live.
        """
        before = time.time() - older_than_seconds
        swept = 0
        for path in self.directory.glob(f"*{STATE}"):
            try:
                files = RolloutFiles.of(self.directory, path.name.removesuffix(STATE))
            except InvalidRolloutIdError:
                continue
            if _older(path, before):
                with files.locked():
                    if _older(path, before) and _is_retired(files):
                        files.remove_payload()
                        files.remove(STATE, LOCK)
                        swept += 1
        if swept:
            RolloutFiles(self.directory, "").sync_directory()
        return swept

    async def close(self) -> None:
        """Forget what is known in memory. Everything is on disk already; a later call reads it anew."""
        with self._indexes_lock:
            self._indexes.clear()
        self._texts.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # -------------------------------------------------------------------------------------------------------- parts

    def _checked(self, entry: object) -> tuple[str, Said, list[bytes]]:
        """Whose entry it is, what it says, and its line in pieces.

        :raises InvalidRolloutIdError: it names no rollout that has a file.
        :raises DecodeError: it is no token entry.
        """
        fields: dict[str, Any] = {}
        if isinstance(entry, TokenEntry):
            checked = entry
        else:
            fields = entry_fields(entry)
            checked = token_entry(storable_id(fields.get("rollout_id")), fields)
        prompt = self._texts.of(checked)
        return checked.rollout_id, Said.by(checked, prompt.form), line_of(checked, fields, prompt.array)

    def _files(self, rollout_id: str) -> RolloutFiles:
        return RolloutFiles.of(self.directory, rollout_id)

    def _taken(self, files: RolloutFiles, life: bytes) -> LogIndex:
        """What is known of this life, until it is kept again: after a failure nothing is. The rollout's lock keeps it from
        every other thread."""
        with self._indexes_lock:
            index = self._indexes.pop(files.rollout_id, None)
        return LogIndex(life) if index is None or index.life != life else index

    def _keep(self, rollout_id: str, index: LogIndex) -> None:
        with self._indexes_lock:
            self._indexes[rollout_id] = index
            while len(self._indexes) > self._indexed_max:
                self._indexes.popitem(last=False)

    def _forget(self, rollout_id: str) -> None:
        with self._indexes_lock:
            self._indexes.pop(rollout_id, None)
        self._texts.forget(rollout_id)


def _older(path: Path, before: float) -> bool:
    try:
        return path.stat().st_mtime <= before
    except FileNotFoundError:
        return False


def _is_retired(files: RolloutFiles) -> bool:
    try:
        return CaptureState.read(files).retired
    except DamagedCaptureError:
        return False  # whoever freezes it hears of the damage


def _check_call(event: type[CallIntent | CaptureIncomplete], rollout_id: str, model_call_id: str) -> None:
    """:raises DecodeError: no call id."""
    try:
        event(rollout_id=rollout_id, model_call_id=model_call_id)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise DecodeError(Reason.INVALID_ENTRY, f"model_call_id: {message}") from None
