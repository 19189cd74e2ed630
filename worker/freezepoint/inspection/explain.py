"""One rollout explained, as plain data that JSON can hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from freezepoint.building import result_of
from freezepoint.core.builder import BUILDERS, BuildOutput
from freezepoint.core.choices import ALL_TRACES, SINGLE_RESPONSE
from freezepoint.core.frozen import FrozenLog
from freezepoint.core.snapshot import ResolvedCall, Snapshot, take_snapshot
from freezepoint.core.views import view
from freezepoint.inspection.advice import ASIDE, MEANINGS
from freezepoint.inspection.finding import Found
from freezepoint.inspection.following import Beginning, LifeState
from freezepoint.inspection.retries import Retries
from freezepoint.inspection.standing import publication, remarks, verdict
from freezepoint.settings import WorkerSettings
from freezepoint_schemas.events import RolloutCancelled, RolloutComplete
from freezepoint_schemas.reasons import NotDelivered, Reason
from freezepoint_schemas.results import Result, Trace

TRIED_MAX = 8
"""How many calls are tried as the one that the rollout ended with: each is a build."""
_CUT = (Beginning.REMOVED, Beginning.DOUBTED)


@dataclass(frozen=True, slots=True)
class Explanation:
    """``result``: what a worker with these settings makes of the log. ``facts``: everything there is to say about it."""

    result: Result
    facts: dict[str, Any]


def explain(found: Found, settings: WorkerSettings) -> Explanation:
    """Build the log again and tell what came of it, and why. Without its beginning it is masked ``input_expired``."""
    log = found.log
    if found.life.beginning in _CUT:
        log = replace(log, faults=log.faults | {Reason.INPUT_EXPIRED})
    result = result_of(log, settings)
    snapshot = take_snapshot(log)
    builder = BUILDERS.get(result.builder, BUILDERS["prefix_merging"])
    output = builder(snapshot.calls, snapshot.terminal)
    facts: dict[str, Any] = {
        "rollout_id": log.rollout_id,
        "life": found.number,
        "lives": found.count,
        "state": found.life.state.value,
        "beginning": found.life.beginning.value,
        "published": publication(found, result),
        **_kept(found),
        "snapshot": result.snapshot.model_dump(),
        "closing": _closing(found),
        "builder": result.builder,
        "delivery": result.delivery,
        "model": result.model,
        "mask_sample": result.mask_sample,
        "reasons": [
            {"code": reason.value, "meaning": MEANINGS.get(reason, "a newer release's reason")}
            for reason in result.reasons
        ],
        "error": result.error,
        "metrics": result.metrics,
        "diagnostics": result.diagnostics,
        "unresolved_retries": result.unresolved_retries,
        "calls": sorted(
            _calls(snapshot, output, result), key=lambda call: (call["created_at"], call["call_id"])
        ),
        "traces": [_trace(trace, weight) for trace, weight in _weighed(result)],
        "set_aside_records": list(found.life.notes),
        "unmasked_by": _unmasked_by(log, result, snapshot, output, settings),
    }
    facts["verdict"] = verdict(facts)
    facts["remarks"] = remarks(found, facts)
    return Explanation(result, facts)


def _kept(found: Found) -> dict[str, Any]:
    """Of a life whose first records are gone there is nothing to promise."""
    whole = found.life.beginning in (Beginning.KEPT, Beginning.UNKNOWN)
    return {
        "kept_until_ms": found.kept_until_ms if whole else None,
        "kept_up_to_bytes": found.retention.partition_bytes if whole and found.retention else None,
    }


def _closing(found: Found) -> dict[str, Any]:
    closing = found.log.closing
    if not isinstance(closing, RolloutComplete | RolloutCancelled):
        return {"event": "timed out"}
    match found.life.state:
        case LifeState.GONE:
            return {"event": "not in the log any more"}
        case LifeState.OPEN:
            return {"event": "none yet"}
        case LifeState.CLEARED:
            return {"event": "cleared"}
        case LifeState.FROZEN:
            said: dict[str, Any] = closing.model_dump(
                exclude_none=True, exclude={"rollout_id", "schema_version"}
            )
            return said


def _calls(snapshot: Snapshot, output: BuildOutput, result: Result) -> Iterator[dict[str, Any]]:
    owners = {span.call_id: trace.role for trace in result.traces for span in trace.spans}
    retries = Retries.of(snapshot, output)
    for call in snapshot.calls:
        link = output.links.get(call.call_id)
        reason = output.not_delivered.get(call.call_id)
        yield _call(call) | {
            "parent": link.call_id if link else None,
            "link": link.how.name.lower() + ("_recovered" if link.recovered else "") if link else None,
            "trace": owners.get(call.call_id),
            "set_aside": reason.value if reason else None,
            "why": _why(call, reason, retries),
        }
    for entry, reason in snapshot.set_aside:
        yield {
            "call_id": entry.model_call_id,
            "created_at": entry.created_at,
            "prompt_tokens": None,
            "generated_tokens": int(entry.generation_token_ids.size),
            "set_aside": reason.value,
            "why": ASIDE[reason],
        }


def _why(call: ResolvedCall, reason: NotDelivered | None, retries: Retries) -> str | None:
    if reason is NotDelivered.SUPERSEDED_RETRY:
        return retries.why(call)
    return ASIDE[reason] if reason else None


def _call(call: ResolvedCall) -> dict[str, Any]:
    return {
        "call_id": call.call_id,
        "created_at": call.entry.created_at,
        "prompt_tokens": call.prompt_length,
        "generated_tokens": call.generated,
        "parent_call_id": call.entry.parent_call_id,
        "policy_version": call.entry.policy_version,
        "finish_reason": call.entry.finish_reason,
    }


def _weighed(result: Result) -> Iterator[tuple[Trace, float]]:
    every = view(result, ALL_TRACES)
    return zip(every.traces, every.trace_weights, strict=True)


def _trace(trace: Trace, weight: float) -> dict[str, Any]:
    ranges = sorted((*trace.shared, *trace.spans), key=lambda span: span.start)
    owned = {span.call_id for span in trace.spans}
    return {
        "role": trace.role,
        "tokens": int(trace.token_ids.size),
        "sampled_tokens": int(trace.log_probs.size),
        "weight": round(weight, 6),
        "calls": [
            {"call_id": span.call_id, "start": span.start, "end": span.end, "owned": span.call_id in owned}
            for span in ranges
        ],
    }


def _unmasked_by(
    log: FrozenLog, result: Result, snapshot: Snapshot, output: BuildOutput, settings: WorkerSettings
) -> list[str]:
    """What would have made the result trainable, tried and found to work."""
    if not result.mask_sample:
        return []
    ways: list[str] = []
    if result.delivery == SINGLE_RESPONSE and not view(result, ALL_TRACES).masked:
        ways.append("reading it as all_traces: every trace is trained, each token once")
    if not isinstance(log.closing, RolloutComplete) or result.builder == "per_request":
        return ways
    tried = dict.fromkeys([*result.unresolved_retries, *(path.end.call_id for path in output.traces)])
    for call_id in list(tried)[:TRIED_MAX]:
        ways += _tried(log, settings, call_id)
    if Reason.CALL_COUNT_MISMATCH in result.reasons and not _mask(log, settings, n_calls=snapshot.recorded):
        ways.append(f"n_calls {snapshot.recorded} in the complete event, if that is how many calls were made")
    return ways


def _tried(log: FrozenLog, settings: WorkerSettings, call_id: str) -> list[str]:
    """Whether it helps to say that the rollout ended with that call."""
    said = {"terminal_call_id": call_id, "terminal_response_id": None}
    way = f"terminal_call_id {call_id} in the complete event, if that is the call it ended with"
    if not _mask(log, settings, **said):
        return [way]
    lenient = settings.model_copy(update={"keep_attributed_chains": True})
    return [] if _mask(log, lenient, **said) else [f"{way}, and worker.keep_attributed_chains"]


def _mask(log: FrozenLog, settings: WorkerSettings, **said: Any) -> bool:
    """Whether the rollout would be masked, had its complete event said that."""
    assert isinstance(log.closing, RolloutComplete)
    return result_of(replace(log, closing=log.closing.model_copy(update=said)), settings).mask_sample
