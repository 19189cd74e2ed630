"""A token store's directory as input of a build: read as it is, without a lock, and nothing is frozen by it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import orjson

from freezepoint.errors import DamagedCaptureError, InputError
from freezepoint.lines import Line
from freezepoint.store.files import ENTRIES, INCOMPLETE, INTENTS, ROLLOUT_ID_LENGTH_MAX, STATE, RolloutFiles
from freezepoint.store.intents import announced_calls
from freezepoint.store.state import CaptureState, marked_calls
from freezepoint_schemas.events import CallIntent, CaptureIncomplete, InputEvent
from freezepoint_schemas.topics import is_rollout_id

_KINDS = (ENTRIES, f"{ENTRIES}.gz", STATE, INTENTS, INCOMPLETE)
"""Of a rollout that has no entries, the first of the others stands for it."""
_NAME = re.compile(rf"(.+?)({'|'.join(map(re.escape, sorted(_KINDS, key=len, reverse=True)))})")


def capture_files(directory: Path) -> list[str]:
    """One file for each rollout in the directory that was not dropped, by name.

    :raises InputError: there is none.
    """
    found: dict[str, list[int]] = {}
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and is_rollout_id(match[1]):
            found.setdefault(match[1], []).append(_KINDS.index(match[2]))
    if not found:
        raise InputError(f"{directory}: no *{ENTRIES} in this directory")
    names = []
    for rollout_id, kinds in sorted(found.items()):
        if not _is_retired(RolloutFiles(directory, rollout_id)):
            entries = [_KINDS[kind] for kind in sorted(kinds) if kind <= 1]
            names += [str(directory / f"{rollout_id}{kind}") for kind in entries or [_KINDS[min(kinds)]]]
    return names


def captured_rollout(file_name: str) -> str | None:
    """The rollout id in the name of a store's file, or None."""
    match = _NAME.fullmatch(Path(file_name).name)
    return match[1] if match and is_rollout_id(match[1]) else None


def holds_entries(file_name: str) -> bool:
    """Whether the file has entries in it, and not only what is known beside them."""
    match = _NAME.fullmatch(Path(file_name).name)
    return match is None or match[2].startswith(ENTRIES)


def untorn(lines: Iterable[Line], torn: list[Line]) -> Iterator[Line]:
    """The lines, the last one into ``torn`` if it is no JSON: a crash in the middle of an append leaves such."""
    last: Line | None = None
    for line in lines:
        if last is not None:
            yield last
        last = line
    if last is None:
        return
    try:
        orjson.loads(last.raw)
    except orjson.JSONDecodeError:
        torn.append(last)
    else:
        yield last


def known_beside(file_name: str, rollout_id: str) -> list[InputEvent]:
    """What the files beside the entries say of a rollout: announced calls, incomplete marks, lost lines."""
    if len(rollout_id) > ROLLOUT_ID_LENGTH_MAX:
        return []  # evidence of a worker: the names of such files would be too long
    path = Path(file_name)
    files = RolloutFiles(path.parent, rollout_id)
    events: list[InputEvent] = [
        CallIntent(rollout_id=rollout_id, model_call_id=call) for call in sorted(announced_calls(files))
    ]
    try:
        state = CaptureState.read(files)
    except DamagedCaptureError as error:
        return [*events, _mark(rollout_id, reason=str(error))]
    events += [_mark(rollout_id, call) for call, _ in sorted(marked_calls(files))]
    if state.incomplete and not any(isinstance(event, CaptureIncomplete) for event in events):
        events.append(_mark(rollout_id))
    if path.name.endswith(ENTRIES) and path.stat().st_size < state.indexed_size:
        events.append(
            _mark(rollout_id, reason=f"less than the {state.indexed_size} bytes that were recorded")
        )
    return events


def _mark(rollout_id: str, model_call_id: str = "", reason: str = "") -> CaptureIncomplete:
    return CaptureIncomplete(rollout_id=rollout_id, model_call_id=model_call_id[:1024], reason=reason)


def _is_retired(files: RolloutFiles) -> bool:
    if len(files.rollout_id) > ROLLOUT_ID_LENGTH_MAX:
        return False
    try:
        return CaptureState.read(files).retired
    except DamagedCaptureError:
        return False
