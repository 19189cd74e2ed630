"""Paths of calls to flat traces, and traces back to the response form.

A trace holds every token once and is linear in its tokens; the response form repeats the whole prompt with
every call, as the reference does, and is made only for who asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from freezepoint.core.builder import MAIN, TracePath
from freezepoint.core.prefixes import PrefixTree
from freezepoint.core.routes import aligned_routes, route_patch, routes_of
from freezepoint.core.snapshot import ResolvedCall
from freezepoint_schemas.arrays import AnyArray, FloatArray
from freezepoint_schemas.results import Result, Span, Trace, TraceItem


def project(paths: Iterable[TracePath], tree: PrefixTree, snapshot_id: str) -> list[Trace]:
    """One trace per path. A call on several paths is owned by the first, plain context in the others."""
    owned: set[str] = set()
    traces: list[Trace] = []
    for path in paths:
        calls = path.calls
        own = [call for call in calls if call.call_id not in owned]
        shared = [call for call in calls if call.call_id in owned]
        owned.update(call.call_id for call in own)
        traces.append(_trace(path, own, shared, tree, f"{snapshot_id}:{path.role}"))
    return traces


def _trace(
    path: TracePath, own: list[ResolvedCall], shared: list[ResolvedCall], tree: PrefixTree, trace_id: str
) -> Trace:
    tokens = tree.tokens(path.end.end_node)
    rows = aligned_routes(own, tokens.size)
    return Trace(
        trace_id=trace_id,
        role=path.role,
        token_ids=tokens,
        log_probs=_joined([call.entry.generation_log_probs for call in own]),
        spans=[_span(call) for call in own if call.generated],
        shared=[_span(call) for call in shared],
        items=[_item(call, rows) for call in own],
        routed_experts=rows,
    )


def _joined(pieces: list[FloatArray]) -> FloatArray:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.float64)


def _span(call: ResolvedCall) -> Span:
    return Span(
        call_id=call.call_id,
        start=call.prompt_length,
        end=call.cumulative_length,
        policy_version=call.entry.policy_version,
    )


def _item(call: ResolvedCall, rows: AnyArray | None) -> TraceItem:
    patch = None
    if rows is not None and isinstance(call.routes, np.ndarray):
        patch = route_patch(call.routes, rows)
    return TraceItem(
        call_id=call.call_id,
        output_items=call.entry.output_items,
        token_item_index=call.entry.token_item_index,
        routed_experts=call.routes if patch is None else None,
        routed_patch=patch,
    )


def response_form(result: Result) -> dict[str, Any]:
    """The result as the reference's dictionary.

    ``rebuilt_response`` is the main trace's; None, beside an ``error``, where the build failed.
    """
    form: dict[str, Any] = {"rollout_id": result.rollout_id, "builder": result.builder}
    main = next((trace for trace in result.traces if trace.role == MAIN), None)
    if result.error is not None or main is None:
        return form | {
            "rebuilt_response": None,
            "mask_sample": True,
            "error": result.error or "No main chain: this result holds side traces only.",
            "metrics": {"n_calls": result.metrics.get("n_calls", 0)} | _incomplete(result.metrics),
        }
    return form | {
        "rebuilt_response": trace_response(result, main),
        "metrics": dict(result.metrics),
        "mask_sample": result.mask_sample,
        "unresolved_retries": list(result.unresolved_retries),
    }


def _incomplete(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name == "capture_incomplete"}


def trace_response(result: Result, trace: Trace) -> dict[str, Any]:
    """One trace as a response: every call's output items, one of them with its tokens and whole prompt.

    Calls that another trace owns are looked up there. Quadratic in the tokens, as the form itself is.
    """
    recorded = {call.item.call_id: call for owner in result.traces for call in _recorded_calls(owner)}
    tokens = trace.token_ids.tolist()
    calls = sorted(
        (*_positions(trace, tokens), *((span.start, span.end, span.call_id) for span in trace.shared))
    )
    output: list[dict[str, Any]] = []
    for start, end, call_id in calls:
        output += _output_items(recorded[call_id], tokens[:start], tokens[start:end])
    suffix = "" if trace.role == MAIN else f"-{trace.role}"
    return {
        "id": f"proj-{result.rollout_id}{suffix}",
        "model": result.model,
        "object": "response",
        "output": output,
        "usage": {
            "input_tokens": calls[0][0] if calls else 0,
            "output_tokens": sum(end - start for start, end, _ in calls),
        },
    }


@dataclass(frozen=True, slots=True)
class _RecordedCall:
    item: TraceItem
    log_probs: list[float]
    routes: list[Any] | None


def _recorded_calls(owner: Trace) -> Iterator[_RecordedCall]:
    position = 0
    lengths = {span.call_id: span.end - span.start for span in owner.spans}
    for item in owner.items:
        stop = position + lengths.get(item.call_id, 0)
        yield _RecordedCall(item, owner.log_probs[position:stop].tolist(), routes_of(owner, item))
        position = stop


def _positions(trace: Trace, tokens: list[int]) -> Iterator[tuple[int, int, str]]:
    """(start, end, call id) of each owned generation; one without tokens lies behind its prompt."""
    spans = {span.call_id: span for span in trace.spans}
    for item in trace.items:
        span = spans.get(item.call_id)
        yield (span.start, span.end, item.call_id) if span else (len(tokens), len(tokens), item.call_id)


def _output_items(call: _RecordedCall, prompt: list[int], generation: list[int]) -> list[dict[str, Any]]:
    items = [dict(item) for item in call.item.output_items] or [{"type": "message"}]
    index = call.item.token_item_index
    carrier = items[-1 if index is None else index]
    carrier["prompt_token_ids"] = prompt
    carrier["generation_token_ids"] = generation
    carrier["generation_log_probs"] = call.log_probs
    if call.routes is not None:
        carrier["routed_experts"] = call.routes
    return items
