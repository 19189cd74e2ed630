"""A result under a delivery that its reader chooses.

A result carries every live trace whatever its own delivery is, and its diagnostics say what would mask it under the other
one (``reasons_as``). So a reader may decide later than the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from freezepoint.core.builder import MAIN
from freezepoint.core.choices import ALL_TRACES, DELIVERY_NAMES, PER_REQUEST, SINGLE_RESPONSE
from freezepoint.core.routes import routes_of
from freezepoint_schemas.reasons import Reason, ordered
from freezepoint_schemas.results import Result, Trace, TraceItem

_SHAPE = frozenset({Reason.MULTIPLE_ROOTS, Reason.MULTIPLE_CHAINS})
VIEWS = DELIVERY_NAMES
"""What a reader may choose; ``per_request`` is all traces, taken apart into one for each call."""


@dataclass(frozen=True, slots=True)
class View:
    """A result under a delivery: ``traces`` are the ones to train on, or of a masked result to look at."""

    delivery: str
    reasons: tuple[Reason, ...]
    traces: tuple[Trace, ...]

    @property
    def masked(self) -> bool:
        return bool(self.reasons)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that these traces train on, each counted once."""
        return sum(trace.log_probs.size for trace in self.traces)

    @property
    def token_weight(self) -> float:
        """1 / :attr:`sampled_tokens`: with this weight on every trained token a rollout counts as one, in however many
        traces it comes. 0.0 where nothing is trained. For the trainer to use or not."""
        return 1 / self.sampled_tokens if self.sampled_tokens else 0.0

    @property
    def trace_weights(self) -> tuple[float, ...]:
        """What each trace's trained tokens weigh together with :attr:`token_weight` on each; the sum is 1, or 0."""
        return tuple(trace.log_probs.size * self.token_weight for trace in self.traces)


def view(result: Result, delivery: str | None = None) -> View:
    """The result under that delivery, by default under its own.

    :raises ValueError: no such delivery.
    """
    chosen = result.delivery if delivery is None else delivery
    if chosen not in (*VIEWS, result.delivery):
        raise ValueError(f"unknown delivery {chosen!r}; there are {', '.join(VIEWS)}")
    reasons = _reasons(result, ALL_TRACES if chosen == PER_REQUEST else chosen)
    traces: Sequence[Trace] = result.traces
    if chosen == SINGLE_RESPONSE:
        traces = [trace for trace in traces if trace.role == MAIN]
    elif chosen == PER_REQUEST:
        traces = list(_by_call(result.snapshot.id, traces))
    return View(chosen, tuple(reasons), tuple(traces))


def _reasons(result: Result, delivery: str) -> Sequence[Reason]:
    """What masks the result under that delivery: as its diagnostics say, or by the contract's rules where they are of a
    release that did not say."""
    said = result.diagnostics.get("reasons_as", {}).get(delivery)
    if said is not None:
        return [Reason(reason) for reason in said]
    if delivery == result.delivery:
        return result.reasons
    if delivery == ALL_TRACES:
        return [] if _SHAPE.issuperset(result.reasons) else result.reasons
    if "tokens" in result.diagnostics or result.error is not None:
        return result.reasons
    return ordered({*result.reasons, *_shape_by_metrics(result)})


def _shape_by_metrics(result: Result) -> set[Reason]:
    """What masks as a single response what was published as all traces, by the metrics, which speak of the main chain."""
    if result.builder == PER_REQUEST:
        return {Reason.BUILDER_NOT_DELIVERABLE}
    checks = {
        Reason.NO_SAFE_CHAIN: all(trace.role != MAIN for trace in result.traces),
        Reason.MULTIPLE_ROOTS: result.metrics.get("roots", 1) != 1,
        Reason.MULTIPLE_CHAINS: result.metrics.get("chains", 1) != 1,
    }
    return {reason for reason, holds in checks.items() if holds}


def _by_call(snapshot_id: str, traces: Iterable[Trace]) -> Iterator[Trace]:
    """One trace per call of these, by (prompt length, call id), as the ``per_request`` builder orders them."""
    found: list[tuple[int, str, Trace, TraceItem, int, int]] = []
    for trace in traces:
        spans = {span.call_id: span for span in trace.spans}
        reached = 0
        for item in trace.items:
            span = spans.get(item.call_id)
            start = span.start if span else trace.token_ids.size
            length = span.end - span.start if span else 0
            found.append((start, item.call_id, trace, item, reached, length))
            reached += length
    found.sort(key=lambda part: part[:2])
    for number, (start, call_id, trace, item, reached, length) in enumerate(found):
        rows = trace.routed_experts
        yield Trace(
            trace_id=f"{snapshot_id}:req-{number}",
            role=f"req-{number}",
            token_ids=trace.token_ids[: start + length],
            log_probs=trace.log_probs[reached : reached + length],
            spans=[span for span in trace.spans if span.call_id == call_id],
            items=[item.model_copy(update={"routed_patch": None, "routed_experts": routes_of(trace, item)})],
            routed_experts=rows[: start + length] if isinstance(rows, np.ndarray) else None,
        )
