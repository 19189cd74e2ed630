"""One frozen log to one result. Nothing a producer sent makes this raise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import orjson
import xxhash

from freezepoint.core.builder import BUILDERS, MAIN, BuildOutput, TracePath
from freezepoint.core.frozen import FrozenLog, TimedOut
from freezepoint.core.projection import project
from freezepoint.core.routes import is_mismatch
from freezepoint.core.snapshot import Snapshot, take_snapshot
from freezepoint_schemas.events import RolloutCancelled, RolloutComplete
from freezepoint_schemas.reasons import NotDelivered, Reason, ordered
from freezepoint_schemas.results import Result, SnapshotInfo, Trace

SINGLE_RESPONSE = "single_response"
ALL_TRACES = "all_traces"
DELIVERIES = (SINGLE_RESPONSE, ALL_TRACES)

TRACE_TOKENS_MAX = 1 << 27
_TOKENS_PER_CALL = 100  # a span and an item take about this many tokens' memory
_ERROR_LENGTH_MAX = 300
_NOTHING_RECORDED = "No call of this rollout was recorded."
_EVERYTHING_LOST = "Nothing to build: the calls of this rollout were lost or dropped."
_FAILURES = {
    Reason.NO_SAFE_CHAIN: "No safe chain: every path from a root to a leaf crosses a quarantined call.",
    Reason.NO_TRAINABLE_TOKENS: "No trainable tokens: every recorded generation is empty.",
    Reason.BUILDER_NOT_DELIVERABLE: "per_request can return several trajectories, single_response takes one.",
}
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


class _Choice(NamedTuple):
    """What this rollout is built with, for whom."""

    builder: str
    delivery: str

    @property
    def is_single(self) -> bool:
        return self.delivery == SINGLE_RESPONSE


class _UnknownChoiceError(ValueError):
    """The rollout asks for a builder or a delivery that does not exist here."""


def build_result(
    log: FrozenLog,
    *,
    builder: str = "prefix_merging",
    delivery: str = SINGLE_RESPONSE,
    trace_tokens_max: int = TRACE_TOKENS_MAX,
) -> Result:
    """The result of a frozen log; equal logs, whatever their order and encoding, give equal results.

    :param builder: used unless the closing event names one; likewise ``delivery``.
    :param trace_tokens_max: above it a result keeps its main trace at most, masked ``rollout_too_large``
        (traces that share a stem written by reference can hold far more tokens than were received).
    :raises MemoryError: and nothing else; any other failure becomes a result masked ``builder_failed``.
    """
    choice = _choice(log, builder, delivery)
    snapshot: Snapshot | None = None
    try:
        snapshot = take_snapshot(log)
        _check(choice)
        output = BUILDERS[choice.builder](snapshot.calls)
        return _result(log, snapshot, _bounded(output, trace_tokens_max), choice)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - one rollout must not take its partition with it
        return _failed(log, snapshot, error, choice)


def _choice(log: FrozenLog, builder: str, delivery: str) -> _Choice:
    if isinstance(log.closing, RolloutComplete):
        builder = builder if log.closing.builder is None else log.closing.builder
        delivery = delivery if log.closing.delivery is None else log.closing.delivery
    return _Choice(builder, delivery)


def _check(choice: _Choice) -> None:
    builder, delivery = choice
    if builder not in BUILDERS:
        raise _UnknownChoiceError(
            f"Unknown builder {builder[:80]!r}: this worker knows {', '.join(BUILDERS)}."
        )
    if delivery not in DELIVERIES:
        raise _UnknownChoiceError(
            f"Unknown delivery {delivery[:80]!r}: this worker knows {', '.join(DELIVERIES)}."
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


def _result(log: FrozenLog, snapshot: Snapshot, output: BuildOutput, choice: _Choice) -> Result:
    failures = _failures(snapshot, output, choice)
    error = _error(snapshot, failures)
    shape = _shape_reasons(output, judged=choice.is_single and error is None)
    reasons = snapshot.faults | failures | shape | _closing_reasons(log)
    if output.left_out:
        reasons |= {Reason.ROLLOUT_TOO_LARGE}
    traces = project(output.traces, snapshot.tree, snapshot.id)
    return Result(
        rollout_id=log.rollout_id,
        mask_sample=bool(reasons),
        reasons=ordered(reasons),
        error=error,
        builder=choice.builder,
        delivery=choice.delivery,
        model=_model(log, output),
        snapshot=_info(log, snapshot.id, snapshot.version),
        traces=traces,
        metrics=(_metrics(snapshot, output) if error is None else _failed_metrics(snapshot.recorded))
        | _incomplete(snapshot.faults),
        unresolved_retries=list(output.unresolved_retries),
        diagnostics=_diagnostics(snapshot, output, traces),
        **_handed_through(log),
    )


def _failures(snapshot: Snapshot, output: BuildOutput, choice: _Choice) -> set[Reason]:
    """Why there is nothing to deliver."""
    failures: set[Reason] = set()
    undeliverable = choice.is_single and choice.builder == "per_request"
    if undeliverable:
        failures.add(Reason.BUILDER_NOT_DELIVERABLE)
    if not snapshot.recorded:
        return failures
    if not output.captured and not any(entry.generation_token_ids.size for entry, _ in snapshot.set_aside):
        failures.add(Reason.NO_TRAINABLE_TOKENS)
    elif not output.captured or (choice.is_single and not undeliverable and output.main is None):
        failures.add(Reason.NO_SAFE_CHAIN)
    return failures


def _error(snapshot: Snapshot, failures: set[Reason]) -> str | None:
    if not snapshot.recorded:
        return _NOTHING_RECORDED if Reason.NO_RECORDS in snapshot.faults else _EVERYTHING_LOST
    return next((_FAILURES[reason] for reason in ordered(failures)), None)


def _shape_reasons(output: BuildOutput, *, judged: bool) -> set[Reason]:
    """What about the built forest keeps it from being trained on; ``judged`` where one chain must be all of
    it."""
    reasons: set[Reason] = set()
    if output.unresolved_retries:
        reasons.add(Reason.UNRESOLVED_RETRY)
    if judged and output.roots != 1:
        reasons.add(Reason.MULTIPLE_ROOTS)
    if judged and len(output.chains) != 1:
        reasons.add(Reason.MULTIPLE_CHAINS)
    return reasons


def _closing_reasons(log: FrozenLog) -> set[Reason]:
    match log.closing:
        case RolloutCancelled():
            return {Reason.ROLLOUT_CANCELLED}
        case TimedOut():
            return {Reason.ROLLOUT_TIMEOUT}
        case _:
            return set()


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


def _diagnostics(snapshot: Snapshot, output: BuildOutput, traces: list[Trace]) -> dict[str, Any]:
    """What the metrics do not say; empty parts are left out."""
    delivered = [call for call in snapshot.calls if call.call_id not in output.not_delivered]
    unresolved = [entry.model_call_id for entry, _ in snapshot.set_aside]
    quarantined = {call_id: reason.value for call_id, reason in sorted(output.quarantined.items())}
    parts = {
        "not_delivered": _not_delivered(snapshot, output),
        "quarantined": quarantined,
        "dangling_intents": list(snapshot.dangling),
        "unresolved_prefixes": unresolved,
        "traces_left_out": output.left_out,
        "routes_mismatch": sum(map(is_mismatch, delivered)),
    }
    tokens = sum(trace.log_probs.size for trace in traces)
    return {"generated_tokens_in_traces": tokens} | {name: part for name, part in parts.items() if part}


def _not_delivered(snapshot: Snapshot, output: BuildOutput) -> dict[str, dict[str, int]]:
    """Calls and generated tokens that are in no trace, by why."""
    counts: defaultdict[NotDelivered, dict[str, int]] = defaultdict(lambda: {"calls": 0, "tokens": 0})
    lost = [(call.entry, output.not_delivered.get(call.call_id)) for call in snapshot.calls]
    for entry, reason in (*lost, *snapshot.set_aside):
        if reason is not None:
            counts[reason]["calls"] += 1
            counts[reason]["tokens"] += entry.generation_token_ids.size
    return {reason.value: counts[reason] for reason in NotDelivered if reason in counts}


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


def _failed(log: FrozenLog, snapshot: Snapshot | None, error: Exception, choice: _Choice) -> Result:
    """The masked result of a build that raised."""
    calls = sorted({entry.model_call_id for entry in log.entries})
    faults = log.faults if snapshot is None else snapshot.faults
    reasons = faults | {Reason.BUILDER_FAILED} | _closing_reasons(log)
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
