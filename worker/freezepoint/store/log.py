"""One rollout's file of entries: reading it, and knowing in memory which calls it holds.

Only the last line can be torn: every append is synced before the next one begins. A torn line was never acknowledged,
so it is dropped; anything wrong before it is damage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import orjson

from freezepoint.calls import CallIndex, Said
from freezepoint.captured import token_entry
from freezepoint.errors import DamagedCaptureError, DecodeError
from freezepoint.store.files import ENTRIES, RolloutFiles, write_durably
from freezepoint_schemas.events import TokenEntry

_FIELDS = tuple(name for name in TokenEntry.model_fields if name != "event")
_PROMPT = "prompt_token_ids"
_BEFORE, _BEHIND = _FIELDS[: _FIELDS.index(_PROMPT)], _FIELDS[_FIELDS.index(_PROMPT) + 1 :]


def line_of(
    entry: TokenEntry, fields: Mapping[str, Any], prompt: tuple[bytes, ...] | None = None
) -> list[bytes]:
    """The entry as one line, in pieces, in the form of NeMo Gym's captures; fields it does not know are kept.

    :param prompt: its prompt as a JSON array, where that is at hand already.
    :raises TypeError: a field that is not known is nothing that JSON can hold.
    """
    known = entry.__dict__
    before = {name: value for name in _BEFORE if (value := known.get(name)) is not None}
    behind = {name: value for name in _BEHIND if (value := known.get(name)) is not None}
    if entry.prompt_prefix is not None:
        behind["prompt_prefix"] = entry.prompt_prefix.model_dump()
    behind |= {name: value for name, value in fields.items() if name not in TokenEntry.model_fields}
    opened = _dumped(before)[:-1] + b',"prompt_token_ids":'
    return [opened, *(prompt or (_dumped(entry.prompt_token_ids),)), b",", _dumped(behind)[1:] + b"\n"]


def _dumped(value: Any) -> bytes:
    return orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)


def _plain(value: Any) -> Any:
    """Arrays that orjson does not take itself: not contiguous, or of an unusual dtype."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


@dataclass(slots=True)
class LineReader:
    """The entries from ``end`` on; ``end`` moves behind each whole line, ``terminated`` says whether by its line break.

    What is left behind ``end`` at the end of the iteration is a torn line.
    """

    files: RolloutFiles
    handle: BinaryIO
    end: int = 0
    terminated: bool = True

    def __iter__(self) -> Iterator[tuple[int, TokenEntry]]:
        """(offset of its line, entry). :raises DamagedCaptureError: a line but the last one is malformed."""
        self.handle.seek(self.end)
        position, torn_at = self.end, None
        for line in self.handle:
            start, position = position, position + len(line)
            if not line.strip():
                continue
            if torn_at is not None:
                raise self._damage(torn_at, "no JSON")
            try:
                body = orjson.loads(line)
            except orjson.JSONDecodeError:
                torn_at = start
                continue
            yield start, self._entry(start, body)
            self.end, self.terminated = position, line.endswith(b"\n")
        if torn_at is None:
            self.end = position

    def _entry(self, start: int, body: Any) -> TokenEntry:
        try:
            return token_entry(self.files.rollout_id, body if isinstance(body, dict) else {})
        except DecodeError as error:
            raise self._damage(start, str(error)) from None

    def _damage(self, start: int, message: str) -> DamagedCaptureError:
        return DamagedCaptureError(f"{self.files.path(ENTRIES)}, byte {start}: {message}")


@dataclass(slots=True)
class LogIndex:
    """What one process knows of one life's log up to the byte ``end``; only what others appended is read.

    ``durable``: all of that is known to be on disk, its name included. Used by who holds the rollout's lock.
    """

    life: bytes
    inode: int = -1
    end: int = 0
    terminated: bool = True
    durable: bool = False
    named: bool = False
    calls: CallIndex = field(default_factory=CallIndex)

    def catch_up(self, files: RolloutFiles, descriptor: int) -> None:
        """Take in what is new, and cut a torn line off.

        :raises DamagedCaptureError: see ``LineReader``.
        """
        stat = os.fstat(descriptor)
        size, inode = stat.st_size, stat.st_ino
        if (
            size < self.end or inode != self.inode
        ):  # replaced, or cut by hand: nothing of what we know is certain
            self.end, self.terminated, self.calls = 0, True, CallIndex()
            self.inode, self.named = inode, False
        if size == self.end:
            return
        self.durable = False
        with open(descriptor, "rb", closefd=False) as handle:
            reader = LineReader(files, handle, self.end, self.terminated)
            for _, entry in reader:
                self.calls.take(Said.by(entry))
        self.end, self.terminated = reader.end, reader.terminated
        if self.end < size:
            os.ftruncate(descriptor, self.end)

    def append(self, files: RolloutFiles, descriptor: int, said: Said, line: Sequence[bytes]) -> None:
        """Durable when it returns."""
        content = line if self.terminated else [b"\n", *line]
        self.end += write_durably(descriptor, content)
        self.terminated = True
        self.durable = True
        self._sync_name(files)
        self.calls.take(said)

    def ensure_durable(self, files: RolloutFiles, descriptor: int) -> None:
        """What another process wrote before it died need not be on disk yet."""
        if not self.durable:
            os.fsync(descriptor)
            self.durable = True
        self._sync_name(files)

    def _sync_name(self, files: RolloutFiles) -> None:
        if not self.named:
            files.sync_directory()
            self.named = True
