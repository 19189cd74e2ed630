"""Keeps the frozen logs of masked rollouts as files that ``freezepoint build`` and ``inspect`` read.

The tokens topic keeps them anyway until its retention ends; a folder keeps them for longer. It is a convenience, so nothing
about it may slow or fail the publication of a result: files are written by a thread of their own, what it cannot keep up
with is dropped, and every error is a line in the log.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import structlog

from freezepoint.core.frozen import FrozenLog, TimedOut
from freezepoint.core.rollout import memory_of
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

log = structlog.get_logger()

WAITING_BYTES_MAX = 256 * 1024 * 1024
"""What may wait to be written, as it is in memory; more is dropped."""
ENTRIES = ".tokens.jsonl"
"""The local store's suffix."""
_PARTIAL = ".part"


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


@dataclass(slots=True)
class EvidenceFolder:
    """``<rollout_id>.tokens.jsonl`` files, the oldest removed beyond ``bytes_max`` or ``age_s_max``. Several workers may
    share a folder."""

    folder: Path
    bytes_max: int
    age_s_max: float

    def keep(self, frozen: FrozenLog) -> Path | None:
        """Write the log, in place of an earlier one of that id; None where it alone is above the limit.

        :raises OSError: it cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{frozen.rollout_id}{ENTRIES}"
        partial = path.with_name(f"{path.name}.{os.getpid()}{_PARTIAL}")
        size = 0
        try:
            with partial.open("wb") as file:
                for event in log_events(frozen):
                    size += file.write(codec.encode_event(event) + b"\n")
                    if size > self.bytes_max:
                        return None
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        self.trim()
        return path

    def trim(self) -> None:
        """Remove what is too old, then the oldest until the rest fits. Files of other names are not touched."""
        found = []
        for item in os.scandir(self.folder):
            if item.name.endswith((ENTRIES, _PARTIAL)):
                status = item.stat()
                found.append((status.st_mtime, status.st_size, item.path))
        found.sort()
        size = sum(item_size for _, item_size, _ in found)
        oldest = time.time() - self.age_s_max
        for modified, item_size, path in found:
            if modified >= oldest and size <= self.bytes_max:
                break
            Path(path).unlink(missing_ok=True)
            size -= item_size


@dataclass(slots=True)
class EvidenceKeeper:
    """Takes logs from the threads that build, and writes them in one of its own."""

    folder: EvidenceFolder
    kept: int = 0
    dropped: int = 0
    _waiting_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="evidence")
    )

    @classmethod
    def of(cls, settings: WorkerSettings) -> Self | None:
        """None where no folder is set."""
        if settings.evidence_dir is None:
            return None
        folder = EvidenceFolder(
            settings.evidence_dir, settings.evidence_bytes_max, settings.evidence_age_s_max
        )
        return cls(folder)

    def offer(self, frozen: FrozenLog) -> None:
        """Keep this log, when there is time. Never blocks, never raises."""
        size = sum(memory_of(entry) for entry in (*frozen.entries, *frozen.alternatives))
        with self._lock:
            full = self._waiting_bytes > 0 and self._waiting_bytes + size > WAITING_BYTES_MAX
            if not full:
                self._waiting_bytes += size
        if full:
            self._drop(frozen, "too much waits to be written")
            return
        try:
            self._thread.submit(self._keep, frozen, size)
        except RuntimeError:  # closed
            self._drop(frozen, "the worker stops")

    def close(self) -> None:
        """Write what waits, and end."""
        self._thread.shutdown(wait=True)

    def _keep(self, frozen: FrozenLog, size: int) -> None:
        try:
            path = self.folder.keep(frozen)
        except Exception as error:  # noqa: BLE001 - evidence is a convenience: whatever fails, results go on
            self._drop(frozen, f"{type(error).__name__}: {error}")
        else:
            if path is None:
                self._drop(frozen, "it is above worker.evidence_bytes_max")
            else:
                self.kept += 1
        finally:
            with self._lock:
                self._waiting_bytes -= size

    def _drop(self, frozen: FrozenLog, why: str) -> None:
        self.dropped += 1
        log.warning("evidence_not_kept", rollout_id=frozen.rollout_id, why=why)
