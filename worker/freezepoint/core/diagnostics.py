"""What a result says about itself beside the reference's metrics; empty parts are left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from freezepoint.core.breaks import prefix_breaks
from freezepoint.core.builder import BuildOutput
from freezepoint.core.forest import How
from freezepoint.core.judging import Choice, Judgement
from freezepoint.core.routes import is_mismatch
from freezepoint.core.snapshot import Snapshot
from freezepoint_schemas.reasons import NotDelivered
from freezepoint_schemas.results import Trace

MAIN = "main"
_ROUNDED = 4
_NAMES_MAX = 16


def diagnostics(
    snapshot: Snapshot,
    output: BuildOutput,
    traces: Sequence[Trace],
    choice: Choice,
    judged: dict[str, Judgement],
) -> dict[str, Any]:
    """:param judged: by delivery; the chosen one is among them."""
    own = judged[choice.delivery]
    hows = [link.how for link in output.links.values()]
    lost = not_delivered(snapshot, output)
    parts = {
        "tokens": _token_account(_captured(snapshot, output), lost, traces, choice, masked=bool(own.reasons)),
        "not_delivered": lost,
        "quarantined": {call_id: reason.value for call_id, reason in sorted(output.quarantined.items())},
        "dangling_intents": list(snapshot.dangling),
        "unresolved_prefixes": [entry.model_call_id for entry, _ in snapshot.set_aside],
        "traces_left_out": output.left_out,
        "routes_mismatch": sum(
            is_mismatch(call) for call in snapshot.calls if call.call_id not in output.not_delivered
        ),
        "verified_parents": hows.count(How.VERIFIED),
        "parent_mismatch": hows.count(How.MISMATCH),
        "parent_recovered": sum(link.recovered for link in output.links.values()),
        "terminal": _terminal(snapshot, output),
        "tolerated_losses": list(own.tolerated.call_ids) if own.tolerated else [],
        "reasons_as": {
            delivery: [reason.value for reason in other.reasons]
            for delivery, other in judged.items()
            if other.reasons != own.reasons
        },
        "policy_versions": policy_versions(traces),
        "merge_ratio": _merge_ratio(traces),
        "prefix_breaks": prefix_breaks(snapshot, output),
    }
    tokens = sum(trace.log_probs.size for trace in traces)
    return {"generated_tokens_in_traces": tokens} | {name: part for name, part in parts.items() if part}


def not_delivered(snapshot: Snapshot, output: BuildOutput) -> dict[str, dict[str, int]]:
    """Calls and generated tokens that are in no trace, by why."""
    counts: defaultdict[NotDelivered, dict[str, int]] = defaultdict(lambda: {"calls": 0, "tokens": 0})
    lost = [(call.entry, output.not_delivered.get(call.call_id)) for call in snapshot.calls]
    for entry, reason in (*lost, *snapshot.set_aside):
        if reason is not None:
            counts[reason]["calls"] += 1
            counts[reason]["tokens"] += entry.generation_token_ids.size
    return {reason.value: counts[reason] for reason in NotDelivered if reason in counts}


def _captured(snapshot: Snapshot, output: BuildOutput) -> int:
    return output.captured + sum(entry.generation_token_ids.size for entry, _ in snapshot.set_aside)


def _token_account(
    captured: int, lost: dict[str, dict[str, int]], traces: Sequence[Trace], choice: Choice, *, masked: bool
) -> dict[str, int]:
    """Where every sampled token went: ``captured`` = ``delivered`` + ``masked`` (would be, but for the reasons) +
    ``side_traces`` (of a single response) + ``set_aside`` (in no trace, by ``not_delivered``) + ``left_out`` (by a limit).
    """
    aside = sum(count["tokens"] for count in lost.values())
    kept = sum(trace.log_probs.size for trace in traces)
    meant = sum(trace.log_probs.size for trace in traces if not choice.is_single or trace.role == MAIN)
    account = {
        "captured": captured,
        "delivered": 0 if masked else meant,
        "masked": meant if masked else 0,
        "side_traces": kept - meant,
        "set_aside": aside,
        "left_out": captured - aside - kept,
    }
    return {name: tokens for name, tokens in account.items() if tokens}


def _terminal(snapshot: Snapshot, output: BuildOutput) -> dict[str, Any]:
    terminal = snapshot.terminal
    if terminal is None:
        return {}
    said: dict[str, Any] = {"attribution": terminal.attribution.value}
    if terminal.candidates:
        said["calls"] = list(terminal.candidates)
    if output.aimed and output.main is not None and output.main.call_id != terminal.call_id:
        said["chain_ends_with"] = output.main.call_id
    return said


def policy_versions(traces: Iterable[Trace]) -> dict[str, Any]:
    """The weights that sampled these traces: ``min`` and ``max`` where all are numbers, else their ``names``, the first
    of them; ``distinct``: how many. Empty where no call says."""
    found = {span.policy_version for trace in traces for span in trace.spans} - {None}
    if not found:
        return {}
    numbers = [version for version in found if isinstance(version, int)]
    if len(numbers) == len(found):
        return {"min": min(numbers), "max": max(numbers), "distinct": len(found)}
    return {"names": sorted(map(str, found))[:_NAMES_MAX], "distinct": len(found)}


def _merge_ratio(traces: Sequence[Trace]) -> float:
    """Calls that the traces own, per trace: 1 where nothing could be merged; 0 without a trace."""
    return round(sum(len(trace.items) for trace in traces) / len(traces), _ROUNDED) if traces else 0.0
