"""A result under a delivery that its reader chooses.

A result carries every live trace whatever its own delivery is, and its diagnostics say what would mask it under the other
one (``reasons_as``). So a reader may decide later than the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from freezepoint.core.builder import MAIN
from freezepoint.core.judging import ALL_TRACES, DELIVERIES, SINGLE_RESPONSE
from freezepoint.core.routes import routes_of
from freezepoint_schemas.reasons import Reason, ordered
from freezepoint_schemas.results import Result, Trace, TraceItem

PER_REQUEST = "per_request"
VIEWS = (*DELIVERIES, PER_REQUEST)
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
    judged_as = ALL_TRACES if chosen == PER_REQUEST else chosen
    other = result.diagnostics.get("reasons_as", {}).get(judged_as)
    reasons = _judged_later(result, judged_as) if other is None else tuple(map(Reason, other))
    traces: Sequence[Trace] = result.traces
    if chosen == SINGLE_RESPONSE:
        traces = [trace for trace in traces if trace.role == MAIN]
    elif chosen == PER_REQUEST:
        traces = list(_by_call(result.snapshot.id, traces))
    return View(chosen, reasons, tuple(traces))


_SHAPE = frozenset({Reason.MULTIPLE_ROOTS, Reason.MULTIPLE_CHAINS})


def _judged_later(result: Result, delivery: str) -> tuple[Reason, ...]:
    """The reasons of a result that does not say them for this delivery: what only branched is whole as all traces, and
    what branched is more than one response."""
    if delivery == ALL_TRACES and result.delivery != ALL_TRACES and _SHAPE.issuperset(result.reasons):
        return ()
    if delivery == SINGLE_RESPONSE and result.delivery == ALL_TRACES:
        return tuple(ordered({*result.reasons, *_branched(result)}))
    return tuple(result.reasons)


def _branched(result: Result) -> Iterator[Reason]:
    if result.metrics.get("roots", 1) != 1:
        yield Reason.MULTIPLE_ROOTS
    if result.metrics.get("chains", 1) != 1:
        yield Reason.MULTIPLE_CHAINS


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
