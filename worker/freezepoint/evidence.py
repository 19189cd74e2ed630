"""Keeps the frozen logs of masked rollouts as files that ``freezepoint build`` and ``inspect`` read.

The tokens topic keeps them anyway until its retention ends; a folder keeps them for longer. It is a convenience, so nothing
about it may slow or fail the publication of a result: files are written by a thread of their own, what it cannot keep up
with is dropped, and every error is a line in the log.
"""

from __future__ import annotations

import errno
import os
import queue
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import structlog

from freezepoint.core.frozen import FrozenLog, TimedOut
from freezepoint.core.rollout import memory_of
from freezepoint.errors import ConfigurationError
from freezepoint.settings import WorkerSettings
from freezepoint_schemas import codec
from freezepoint_schemas.events import (
    CallCancelled,
    CallIntent,
    CaptureIncomplete,
    InputEvent,
    RolloutCancelled,
)
from freezepoint_schemas.reasons import ordered
from freezepoint_schemas.topics import is_rollout_id

log = structlog.get_logger()

WAITING_BYTES_MAX = 256 * 1024 * 1024
"""What may wait to be written, as it is in memory; more is dropped."""
ENTRIES = ".tokens.jsonl"
"""The local store's suffix."""
MARKER = ".freezepoint-evidence"
"""A file in the folder, by which it is known to hold evidence and nothing else: without it nothing is ever deleted."""
TRIM_INTERVAL_S = 60.0
"""How often the folder is looked through while nothing new comes."""
STALE_S = 3600.0
"""A file that was begun so long ago and not finished is what a crash has left."""
_NAME_BYTES_MAX = 255  # what file systems take
_PARTIAL = re.compile(r"\.freezepoint-[0-9a-f]{16}\.part")
_TOLERATED = (MARKER, "lost+found")  # the latter is in the root of a fresh ext4 volume
_MARKER_TEXT = (
    f"freezepoint keeps logs of masked rollouts in this folder, and deletes its *{ENTRIES} by age and size.\n"
)


def log_events(frozen: FrozenLog) -> Iterator[InputEvent]:
    """A frozen log as the events that make it again, its end included.

    Two things have no event of their own: lost or conflicting records become an incomplete mark that names them, and a
    time-out becomes a cancellation that says so. Both stay masked.
    """
    rollout_id = frozen.rollout_id
    if frozen.dispatch is not None:
        yield frozen.dispatch
    yield from (*frozen.entries, *frozen.alternatives)
    for call_id in sorted(frozen.intents):
        yield CallIntent(rollout_id=rollout_id, model_call_id=call_id)
    for call_id in sorted(frozen.cancelled):
        yield CallCancelled(rollout_id=rollout_id, model_call_id=call_id)
    for call_id, reason in sorted(frozen.marks):
        yield CaptureIncomplete(rollout_id=rollout_id, model_call_id=call_id, reason=reason)
    if frozen.faults:
        faults = ", ".join(reason.value for reason in ordered(frozen.faults))
        yield CaptureIncomplete(rollout_id=rollout_id, reason=f"the worker saw: {faults}")
    if isinstance(frozen.closing, TimedOut):
        yield RolloutCancelled(rollout_id=rollout_id, reason="timed out")
    else:
        yield frozen.closing


_MISCONFIGURED = {errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS}
"""What waiting does not mend, unlike a full disk or a server that is away."""


class NotKeptError(Exception):
    """A log is not kept, and nothing has failed: the message says why."""


@dataclass(slots=True)
class EvidenceFolder:
    """``<rollout_id>.tokens.jsonl`` files, the oldest removed beyond ``bytes_max`` or ``age_s_max``. Several workers may
    share a folder."""

    folder: Path
    bytes_max: int
    age_s_max: float

    def claim(self) -> None:
        """Mark a new or empty folder as one for evidence. Its parent has to be there: what is missing above it is most likely a
        typo.

        :raises ConfigurationError: other files are in it, which would be taken for evidence and deleted in time.
        :raises OSError: it cannot be made, or written.
        """
        self.folder.mkdir(exist_ok=True)
        marker = self.folder / MARKER
        if marker.exists():
            return
        names = (path.name for path in self.folder.iterdir())
        foreign = next((name for name in names if name not in _TOLERATED), None)
        if (
            foreign is not None and not marker.exists()
        ):  # else another worker was first, and has begun to write
            raise ConfigurationError(
                f"worker.evidence_dir {self.folder} has other files in it ({foreign}) and no {MARKER}: name a folder that is "
                f"new or empty. Or make that file, if every *{ENTRIES} in the folder may be deleted by age and size"
            )
        marker.write_text(_MARKER_TEXT)

    def keep(self, frozen: FrozenLog) -> Path:
        """Write the log, in place of an earlier one of that id.

        :raises NotKeptError: it is above a limit.
        :raises ConfigurationError: the folder is not for evidence.
        :raises OSError: it cannot be written.
        """
        name = f"{frozen.rollout_id}{ENTRIES}"
        if len(name) > _NAME_BYTES_MAX:
            raise NotKeptError(f"the name of its file would be longer than {_NAME_BYTES_MAX} bytes")
        self.claim()
        partial = self.folder / f".freezepoint-{secrets.token_hex(8)}.part"
        size = 0
        try:
            with partial.open("xb") as file:
                for event in log_events(frozen):
                    size += file.write(codec.encode_event(event) + b"\n")
                    if size > self.bytes_max:
                        raise NotKeptError("it is above worker.evidence_bytes_max")
            partial.replace(self.folder / name)
        finally:
            partial.unlink(missing_ok=True)
        return self.folder / name

    def trim(self) -> None:
        """Remove what is too old, then the oldest until the rest fits; only what :meth:`keep` has written, and only in a
        folder that is marked.

        :raises OSError: something cannot be read or removed.
        """
        if not (self.folder / MARKER).exists():
            return
        now = time.time()
        found: list[tuple[float, int, str]] = []
        with os.scandir(self.folder) as items:
            for item in items:
                with suppress(FileNotFoundError):  # another worker trims too
                    status = item.stat(follow_symlinks=False)
                    if _is_kept(item):
                        found.append((status.st_mtime, status.st_size, item.path))
                    elif _PARTIAL.fullmatch(item.name) and status.st_mtime < now - STALE_S:
                        Path(item.path).unlink(missing_ok=True)
        found.sort()
        size = sum(item_size for _, item_size, _ in found)
        for modified, item_size, path in found:
            if modified >= now - self.age_s_max and size <= self.bytes_max:
                break
            Path(path).unlink(missing_ok=True)
            size -= item_size


def _is_kept(item: os.DirEntry[str]) -> bool:
    is_named = item.name.endswith(ENTRIES) and is_rollout_id(item.name.removesuffix(ENTRIES))
    return is_named and item.is_file(follow_symlinks=False)


@dataclass(slots=True)
class EvidenceKeeper:
    """Takes logs from the threads that build, and writes them in one of its own, which also looks after the folder."""

    folder: EvidenceFolder
    kept: int = 0
    dropped: int = 0
    _waiting: queue.SimpleQueue[tuple[FrozenLog, int] | None] = field(default_factory=queue.SimpleQueue)
    _waiting_bytes: int = 0
    _closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._work, name="evidence", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, settings: WorkerSettings) -> Self | None:
        """None where no folder is set.

        :raises ConfigurationError: the folder has other files in it, or can never be written as things are.
        """
        if settings.evidence_dir is None:
            return None
        folder = EvidenceFolder(
            settings.evidence_dir, settings.evidence_bytes_max, settings.evidence_age_s_max
        )
        try:
            folder.claim()
            with tempfile.TemporaryFile(
                dir=folder.folder
            ):  # it may have been claimed when it was writable still
                pass
        except OSError as error:
            if error.errno in _MISCONFIGURED:
                raise ConfigurationError(
                    f"cannot keep evidence in {folder.folder}: {error.strerror}; set worker.evidence_dir"
                ) from None
            # It may come back: each log tries again.
            log.warning("evidence_folder_unusable", folder=str(folder.folder), error=str(error))
        return cls(folder)

    def offer(self, frozen: FrozenLog) -> None:
        """Keep this log, when there is time. Never blocks, never raises."""
        size = sum(memory_of(entry) for entry in (*frozen.entries, *frozen.alternatives))
        with self._lock:
            full = self._waiting_bytes > 0 and self._waiting_bytes + size > WAITING_BYTES_MAX
            if not full and not self._closed:
                self._waiting_bytes += size
                self._waiting.put((frozen, size))
                return
        self._drop(frozen, "the worker stops" if self._closed else "too much waits to be written")

    def close(self) -> None:
        """Write what waits, and end."""
        with self._lock:
            self._closed = True
            self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        self._trim()
        while True:
            try:
                item = self._waiting.get(timeout=TRIM_INTERVAL_S)
            except queue.Empty:
                self._trim()
                continue
            if item is None:
                return
            self._keep(*item)
            del item  # a log is large, and the next one may not come for hours
            self._trim()

    def _keep(self, frozen: FrozenLog, size: int) -> None:
        try:
            self.folder.keep(frozen)
        except NotKeptError as refusal:
            self._drop(frozen, str(refusal))
        except Exception as error:  # noqa: BLE001 - evidence is a convenience: whatever fails, results go on
            self._drop(frozen, f"{type(error).__name__}: {error}")
        else:
            self.kept += 1
        finally:
            with self._lock:
                self._waiting_bytes -= size

    def _trim(self) -> None:
        try:
            self.folder.trim()
        except OSError as error:
            log.warning("evidence_not_trimmed", folder=str(self.folder.folder), error=str(error))

    def _drop(self, frozen: FrozenLog, why: str) -> None:
        self.dropped += 1
        log.warning("evidence_not_kept", rollout_id=frozen.rollout_id, why=why)
