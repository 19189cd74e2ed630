"""One frozen log to one result. Nothing a producer sent makes this raise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import orjson
import xxhash

from freezepoint.core.builder import BUILDERS, MAIN, BuildOutput, TracePath
from freezepoint.core.choices import (
    ALL_TRACES,
    DELIVERIES,
    DELIVERY_NAMES,
    PER_REQUEST,
    PREFIX_MERGING,
    SINGLE_RESPONSE,
)
from freezepoint.core.diagnostics import diagnostics
from freezepoint.core.frozen import FrozenLog
from freezepoint.core.judging import Choice, Leniency, closing_reasons, judge
from freezepoint.core.projection import project
from freezepoint.core.snapshot import Snapshot, take_snapshot
from freezepoint_schemas.events import RolloutComplete
from freezepoint_schemas.reasons import Reason, ordered
from freezepoint_schemas.results import Result, SnapshotInfo

__all__ = [
    "ALL_TRACES",
    "DELIVERIES",
    "PER_REQUEST",
    "SINGLE_RESPONSE",
    "Leniency",
    "build_result",
    "result_tokens_max",
]

TRACE_TOKENS_MAX = 1 << 27
_TOKENS_PER_CALL = 100  # a span and an item take about this many tokens' memory
_ERROR_LENGTH_MAX = 300
_STRICT = Leniency()
_LOST_RECORDS = frozenset(
    {
        Reason.CAPTURE_INCOMPLETE,
        Reason.DANGLING_INTENT,
        Reason.UNSUPPORTED_SCHEMA,
        Reason.UNDECODABLE_RECORD,
        Reason.FOREIGN_RECORD,
        Reason.INVALID_ENTRY,
        Reason.ROLLOUT_TOO_LARGE,
        Reason.INPUT_EXPIRED,
    }
)
"""Faults that mean that something of the rollout was never seen."""


class _UnknownChoiceError(ValueError):
    """The rollout asks for a builder or a delivery that does not exist here."""


def build_result(
    log: FrozenLog,
    *,
    builder: str = PREFIX_MERGING,
    delivery: str = SINGLE_RESPONSE,
    trace_tokens_max: int = TRACE_TOKENS_MAX,
    leniency: Leniency = _STRICT,
) -> Result:
    """The result of a frozen log; equal logs, whatever their order and encoding, give equal results.

    :param builder: used unless the closing event names one; likewise ``delivery``, which may be ``per_request``: that
        builder, delivered as all traces.
    :param trace_tokens_max: above it a result keeps its main trace at most, masked ``rollout_too_large``
        (traces that share a stem written by reference can hold far more tokens than were received).
    :param leniency: what masks by choice.
    :raises MemoryError: and nothing else; any other failure becomes a result masked ``builder_failed``.
    """
    choice = _choice(log, builder, delivery)
    snapshot: Snapshot | None = None
    try:
        snapshot = take_snapshot(log)
        _check(choice)
        output = BUILDERS[choice.builder](snapshot.calls, snapshot.terminal)
        return _result(log, snapshot, _bounded(output, trace_tokens_max), choice, leniency)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - one rollout must not take its partition with it
        return _failed(log, snapshot, error, choice)
    finally:
        if snapshot is not None:
            snapshot.tree.take_apart()


def result_tokens_max(
    log: FrozenLog, *, builder: str = PREFIX_MERGING, delivery: str = SINGLE_RESPONSE
) -> int:
    """More tokens than this the traces of a log's result do not hold, counting its entries in memory. A trace ends with a call
    that none goes on from, and those that share a stem written by reference hold it several times."""
    ends: dict[tuple[str, int], int] = {}
    continued: set[tuple[str, int]] = set()
    for entry in (*log.entries, *log.alternatives):
        prefix = entry.prompt_prefix
        length = entry.prompt_token_ids.size + entry.generation_token_ids.size
        if prefix is not None:
            length += prefix.length
            continued.add((prefix.call_id, prefix.length))
        end = entry.model_call_id, length
        ends[end] = ends.get(end, 0) + length
    if log.alternatives or _choice(log, builder, delivery).builder == PER_REQUEST:
        continued = set()  # which of a call's forms is gone on from shows when they are resolved
    return sum(length for end, length in ends.items() if end not in continued)


def _choice(log: FrozenLog, builder: str, delivery: str) -> Choice:
    """What the closing event names goes before what the worker was told. A delivery that names a pair brings its builder
    with it, unless the event named one and not the delivery."""
    named = (
        log.closing
        if isinstance(log.closing, RolloutComplete)
        else RolloutComplete(rollout_id=log.rollout_id)
    )
    chosen = delivery if named.delivery is None else named.delivery
    if chosen != PER_REQUEST:
        return Choice(builder if named.builder is None else named.builder, chosen)
    own = named.builder if named.delivery is None else None
    return Choice(PER_REQUEST if own is None else own, ALL_TRACES)


def _check(choice: Choice) -> None:
    builder, delivery = choice
    if builder not in BUILDERS:
        raise _UnknownChoiceError(
            f"Unknown builder {builder[:80]!r}: this worker knows {', '.join(BUILDERS)}."
        )
    if delivery not in DELIVERIES:
        raise _UnknownChoiceError(
            f"Unknown delivery {delivery[:80]!r}: this worker knows {', '.join(DELIVERY_NAMES)}."
        )


def _bounded(output: BuildOutput, tokens_max: int) -> BuildOutput:
    """The output without its side traces, if need be without the main one, where all would be too large."""
    kept = output.traces
    if _size(kept) > tokens_max:
        kept = tuple(path for path in kept if path.role == MAIN)
    if _size(kept) > tokens_max:
        kept = ()
    return replace(output, traces=kept, left_out=len(output.traces) - len(kept))


def _size(paths: Iterable[TracePath]) -> int:
    return sum(path.end.cumulative_length + _TOKENS_PER_CALL * path.length for path in paths)


def _result(
    log: FrozenLog, snapshot: Snapshot, output: BuildOutput, choice: Choice, leniency: Leniency
) -> Result:
    judged = {
        delivery: judge(log, snapshot, output, Choice(choice.builder, delivery), leniency)
        for delivery in DELIVERIES
    }
    own = judged[choice.delivery]
    traces = project(output.traces, snapshot.tree, snapshot.id)
    metrics = _metrics(snapshot, output) if own.error is None else _failed_metrics(snapshot.recorded)
    return Result(
        rollout_id=log.rollout_id,
        mask_sample=bool(own.reasons),
        reasons=own.reasons,
        error=own.error,
        builder=choice.builder,
        delivery=choice.delivery,
        model=_model(log, output),
        snapshot=_info(log, snapshot.id, snapshot.version),
        traces=traces,
        metrics=metrics | _incomplete(snapshot.faults),
        unresolved_retries=list(output.unresolved_retries),
        diagnostics=diagnostics(snapshot, output, traces, choice, judged),
        **_handed_through(log),
    )


def _model(log: FrozenLog, output: BuildOutput) -> str:
    if isinstance(log.closing, RolloutComplete) and log.closing.model is not None:
        return log.closing.model
    main = (call for path in output.traces if path.role == MAIN for call in path.calls)
    return next((call.entry.model for call in main if call.entry.model), "")


def _info(log: FrozenLog, snapshot_id: str, version: int) -> SnapshotInfo:
    return SnapshotInfo(
        id=snapshot_id,
        version=version,
        partition=log.partition,
        first_offset=log.first_offset,
        freeze_offset=log.freeze_offset,
    )


def _metrics(snapshot: Snapshot, output: BuildOutput) -> dict[str, Any]:
    """The reference's metrics, key for key. They speak of the main chain whatever the delivery is."""
    captured = output.captured + sum(entry.generation_token_ids.size for entry, _ in snapshot.set_aside)
    return {
        "n_calls": snapshot.recorded,
        "chains": len(output.chains),
        "roots": output.roots,
        "quarantined_calls": len(output.quarantined),
        "quarantined_fraction": _fraction(len(output.quarantined), snapshot.recorded),
        "delivered_fraction": _fraction(output.delivered, captured),
        "generated_tokens_captured": captured,
        "generated_tokens_delivered": output.delivered,
        "empty_generation_calls": len(output.empty_generations),
    }


def _fraction(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _failed_metrics(recorded: int) -> dict[str, Any]:
    return {"n_calls": recorded}


def _incomplete(faults: Iterable[Reason]) -> dict[str, Any]:
    return {} if _LOST_RECORDS.isdisjoint(faults) else {"capture_incomplete": True}


def _handed_through(log: FrozenLog) -> dict[str, Any]:
    """What the collector said about the rollout; its dispatch speaks where its end does not."""
    closing, dispatch = log.closing, log.dispatch
    complete = closing if isinstance(closing, RolloutComplete) else None
    fields: dict[str, Any] = {
        "reward": complete.reward if complete else None,
        "metadata": complete.metadata if complete else None,
        "group_id": closing.group_id,
        "group_size": closing.group_size,
    }
    if dispatch is not None:
        for name in ("metadata", "group_id", "group_size"):
            if fields[name] is None:
                fields[name] = getattr(dispatch, name)
    return fields


def _failed(log: FrozenLog, snapshot: Snapshot | None, error: Exception, choice: Choice) -> Result:
    """The masked result of a build that raised."""
    calls = sorted({entry.model_call_id for entry in log.entries})
    faults = log.faults if snapshot is None else snapshot.faults
    reasons = faults | {Reason.BUILDER_FAILED} | closing_reasons(log)
    unread = xxhash.xxh3_128_hexdigest(orjson.dumps([log.rollout_id, calls]))
    return Result(
        rollout_id=log.rollout_id,
        mask_sample=True,
        reasons=ordered(reasons),
        error=_sentence(error),
        builder=choice.builder,
        delivery=choice.delivery,
        model=_model(log, BuildOutput()),
        snapshot=_info(log, snapshot.id if snapshot else unread, snapshot.version if snapshot else 1),
        metrics=_failed_metrics(len(calls)) | _incomplete(faults),
        **_handed_through(log),
    )


def _sentence(error: Exception) -> str:
    if isinstance(error, _UnknownChoiceError):
        return str(error)
    first_line = str(error).partition("\n")[0]
    return f"The build failed: {type(error).__name__}: {first_line}"[:_ERROR_LENGTH_MAX]
