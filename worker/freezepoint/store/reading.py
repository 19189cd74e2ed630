"""A rollout's files as a frozen log. Nothing here writes or locks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from freezepoint.calls import sorted_out
from freezepoint.core.frozen import FrozenLog
from freezepoint.core.snapshot import take_snapshot
from freezepoint.errors import DamagedCaptureError
from freezepoint.store.files import ENTRIES, RolloutFiles
from freezepoint.store.intents import announced_calls
from freezepoint.store.log import LineReader
from freezepoint.store.state import CaptureState, marked_calls
from freezepoint_schemas.events import RolloutComplete, TokenEntry
from freezepoint_schemas.reasons import Reason


@dataclass(frozen=True, slots=True)
class ReadLog:
    """What the files say. ``size``: bytes of whole lines; ``fresh``: calls that ``state.version`` does not count yet."""

    log: FrozenLog
    size: int
    fresh: int
    contradictory: bool

    @property
    def lost(self) -> bool:
        """Whether something of the rollout is missing or contradicts itself."""
        log = self.log
        if log.marks or log.faults or log.intents - {entry.model_call_id for entry in log.entries}:
            return True
        if all(entry.prompt_prefix is None for entry in (*log.entries, *log.alternatives)):
            return False
        return bool(take_snapshot(log).faults - {Reason.NO_RECORDS})


def read_log(files: RolloutFiles, state: CaptureState) -> ReadLog:
    """Everything that is recorded of the rollout.

    :raises DamagedCaptureError: a line but the last one is malformed, or lines that were counted are gone.
    """
    starts: dict[str, int] = {}
    size = 0

    def lines(handle: BinaryIO) -> Iterator[TokenEntry]:
        nonlocal size
        reader = LineReader(files, handle)
        for start, entry in reader:
            starts.setdefault(entry.model_call_id, start)
            yield entry
        size = reader.end

    try:
        with files.path(ENTRIES).open("rb") as handle:
            found = sorted_out(lines(handle))
    except FileNotFoundError:
        found = sorted_out(())
    if size < state.indexed_size:
        raise DamagedCaptureError(
            f"{files.path(ENTRIES)}: {size} bytes of whole lines, but {state.indexed_size} were recorded"
        )
    marks = marked_calls(files)
    log = FrozenLog(
        rollout_id=files.rollout_id,
        partition=0,
        first_offset=0,
        freeze_offset=size,
        closing=RolloutComplete(rollout_id=files.rollout_id),
        entries=found.entries,
        alternatives=found.alternatives,
        intents=announced_calls(files),
        marks=marks or (frozenset({("", "")}) if state.incomplete or found.contradictory else frozenset()),
    )
    fresh = sum(start >= state.indexed_size for start in starts.values())
    return ReadLog(log, size, fresh, found.contradictory)
