"""NeMo Gym's token-capture consumer by its names: a frozen rollout in, its trajectories as the reference's dictionary out.

The local, file-based path needs no broker. A rollout that cannot be read or built is masked, never raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import structlog

from freezepoint.calls import sorted_out
from freezepoint.captured import CaptureSnapshot, entry_fields, token_entry
from freezepoint.core.build import build_result
from freezepoint.core.frozen import FrozenLog
from freezepoint.core.projection import response_form
from freezepoint.errors import ConfigurationError, FreezepointError
from freezepoint.store import TokenStore
from freezepoint_schemas.events import RolloutComplete
from freezepoint_schemas.reasons import Reason

__all__ = [
    "FrozenCapture",
    "TokenSourceLike",
    "clear_token_captures_for_rollouts",
    "rollout_id_of",
    "token_id_capture_dirs_from_config",
    "trajectories_for_rollout",
    "trajectories_from_source",
]

_CAPTURE_BLOCK = "token_id_capture"
_FALLBACK_DIRECTORY = "model_call_capture_dir"
_ERROR_LENGTH_MAX = 300

log = structlog.get_logger()


class FrozenCapture(Protocol):
    """What a source's ``freeze`` returns. Entries are any objects with a token entry's attributes, or mappings."""

    @property
    def entries(self) -> Iterable[Any]: ...
    @property
    def incomplete(self) -> bool: ...
    @property
    def snapshot_id(self) -> str: ...
    @property
    def version(self) -> int: ...


class TokenSourceLike(Protocol):
    """Where a rollout is frozen, read and dropped: ``TokenStore``, ``TokenSource``, or anybody's own."""

    async def freeze(self, rollout_id: str) -> FrozenCapture: ...
    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool: ...
    async def close(self) -> None: ...


def trajectories_for_rollout(
    rollout_id: str,
    token_capture_dirs: Sequence[str | Path],
    *,
    builder: str = "prefix_merging",
    model: str = "",
) -> dict[str, Any] | None:
    """Freeze a rollout in the first of the directories and build it.

    The dictionary has ``rollout_id``, ``builder``, ``rebuilt_response`` (None beside an ``error``), ``mask_sample``,
    ``metrics``, ``unresolved_retries`` and ``_capture_snapshot`` with the ``snapshot_id`` and ``version`` that
    ``TokenStore.drop`` takes after the handoff. Without records, or with a capture that is incomplete or cannot be
    frozen, it is masked.

    :returns: None only without a directory.
    """
    for directory in token_capture_dirs:
        try:
            snapshot = TokenStore(directory).freeze_now(rollout_id)
        except Exception as error:  # noqa: BLE001 - one rollout must not fail its caller's batch
            return _unreadable(rollout_id, builder, error)
        return _built(rollout_id, snapshot, builder, model)
    return None


async def trajectories_from_source(
    rollout_id: str, source: TokenSourceLike, *, builder: str = "prefix_merging", model: str = ""
) -> dict[str, Any]:
    """Freeze a rollout at any source and build it, on a thread; see :func:`trajectories_for_rollout`."""
    try:
        snapshot = await source.freeze(rollout_id)
    except Exception as error:  # noqa: BLE001 - as above
        return _unreadable(rollout_id, builder, error)
    return await asyncio.to_thread(_built, rollout_id, snapshot, builder, model)


def _built(rollout_id: str, snapshot: FrozenCapture, builder: str, model: str) -> dict[str, Any]:
    try:
        frozen = _log_of(rollout_id, snapshot, {"builder": builder, "model": model})
    except Exception as error:  # noqa: BLE001 - as above
        form = _unreadable(rollout_id, builder, error)
    else:
        form = response_form(build_result(frozen, builder=builder))
    return form | {"_capture_snapshot": {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}}


def _log_of(rollout_id: str, snapshot: FrozenCapture, choices: Mapping[str, Any]) -> FrozenLog:
    """:raises InputError: an entry is none."""
    if isinstance(snapshot, CaptureSnapshot):
        closing = snapshot.log.closing
        if isinstance(closing, RolloutComplete):
            closing = closing.model_copy(update=choices)
        return replace(snapshot.log, rollout_id=rollout_id, closing=closing)
    found = sorted_out(
        token_entry(rollout_id, entry_fields(item) | {"rollout_id": rollout_id}) for item in snapshot.entries
    )
    return FrozenLog(
        rollout_id=rollout_id,
        partition=0,
        first_offset=0,
        freeze_offset=len(found.entries),
        closing=RolloutComplete(rollout_id=rollout_id, **choices),
        entries=found.entries,
        alternatives=found.alternatives,
        marks=frozenset({("", "")}) if snapshot.incomplete else frozenset(),
        faults=frozenset({Reason.CONFLICTING_ENTRY}) if found.contradictory else frozenset(),
    )


def _unreadable(rollout_id: str, builder: str, error: Exception) -> dict[str, Any]:
    """The masked form of a rollout that could not be frozen or read."""
    sentence = f"{type(error).__name__}: {error}".partition("\n")[0]
    bug = None if isinstance(error, (FreezepointError, OSError)) else error
    log.warning("capture_unreadable", rollout_id=rollout_id, error=sentence[:_ERROR_LENGTH_MAX], exc_info=bug)
    return {
        "rollout_id": rollout_id,
        "builder": builder,
        "rebuilt_response": None,
        "mask_sample": True,
        "error": sentence,
        "metrics": {"n_calls": 0},
    }


def clear_token_captures_for_rollouts(
    records: Iterable[object], token_capture_dirs: Sequence[str | Path]
) -> None:
    """Forget what is recorded under the ids of rollouts that are about to be dispatched: ids recur.

    :param records: rows ready for dispatch, see :func:`rollout_id_of`; those without an id are passed over.
    :raises InvalidRolloutIdError: an id is none; what came before it is forgotten.
    """
    rollout_ids = [rollout_id for record in records if (rollout_id := rollout_id_of(record)) is not None]
    for directory in token_capture_dirs:
        store = TokenStore(directory)
        for rollout_id in rollout_ids:
            store.delete(rollout_id)


def rollout_id_of(record: object) -> str | None:
    """The rollout id in a row of rollout collection: ``_ng_rollout_id``, else ``{task}-{rollout}`` from
    ``_ng_task_index`` and ``_ng_rollout_index``, with ``-a{n}`` behind it where ``_ng_attempt_index`` is n > 0.

    :param record: a mapping, or an object with these as attributes.
    """

    def value(name: str) -> Any:
        return record.get(name) if isinstance(record, Mapping) else getattr(record, name, None)

    if (given := value("_ng_rollout_id")) is not None:
        return str(given)
    task, rollout = value("_ng_task_index"), value("_ng_rollout_index")
    if task is None or rollout is None:
        return None
    attempt = int(value("_ng_attempt_index") or 0)
    return f"{task}-{rollout}" + (f"-a{attempt}" if attempt > 0 else "")


def token_id_capture_dirs_from_config(config: Mapping[str, Any] | None) -> list[Path]:
    """The directory that NeMo Gym's configuration names for token captures: ``token_id_capture.dir``, else
    ``model_call_capture_dir``. None of them where capture is off or a sink takes the records.

    :raises ConfigurationError: capture is on without any place for its records, or the directory is not absolute.
    """
    config = config or {}
    block = config.get(_CAPTURE_BLOCK) or {}
    if not block.get("enabled", False) or block.get("sink") is not None:
        return []
    directory = block.get("dir") or config.get(_FALLBACK_DIRECTORY)
    if directory is None:
        if not block.get("rebuild_response", True):
            return []
        raise ConfigurationError(
            f"{_CAPTURE_BLOCK} is enabled without a directory or a sink: set {_CAPTURE_BLOCK}.dir"
        )
    if not Path(directory).is_absolute():
        raise ConfigurationError(f"{_CAPTURE_BLOCK}.dir must be an absolute path, not {str(directory)!r}")
    return [Path(directory)]
