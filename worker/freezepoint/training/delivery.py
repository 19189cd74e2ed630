"""What a result is under a delivery that its reader chooses. A result carries every live trace whatever its own delivery
is; the delivery decides which of them are meant, and which reasons mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from freezepoint_schemas.reasons import Reason, ordered
from freezepoint_schemas.results import Result, Trace

SINGLE_RESPONSE = "single_response"
ALL_TRACES = "all_traces"
DeliveryName: TypeAlias = Literal["single_response", "all_traces"]

_SHAPE = frozenset({Reason.MULTIPLE_ROOTS, Reason.MULTIPLE_CHAINS})
_MAIN = "main"


@dataclass(frozen=True, slots=True)
class View:
    """A result under a delivery: ``traces`` are the ones to train on (of a masked result: to look at)."""

    delivery: str
    reasons: Sequence[Reason]
    traces: Sequence[Trace]

    @property
    def masked(self) -> bool:
        return bool(self.reasons)


def view(result: Result, delivery: DeliveryName | None = None) -> View:
    """The result under that delivery, by default under its own.

    ``all_traces`` unmasks a result whose reasons are all in {multiple_roots, multiple_chains}. ``single_response`` masks by
    them what was published as all_traces, judged by the metrics, which speak of the main chain whatever the delivery.
    """
    chosen = delivery or result.delivery
    reasons = list(result.reasons)
    if chosen == ALL_TRACES and result.delivery != ALL_TRACES:
        reasons = [] if _SHAPE.issuperset(reasons) else reasons
    elif chosen == SINGLE_RESPONSE and result.delivery == ALL_TRACES:
        reasons = ordered({*reasons, *_single_reasons(result)})
    main_only = chosen == SINGLE_RESPONSE
    traces = tuple(trace for trace in result.traces if not main_only or trace.role == _MAIN)
    return View(chosen, tuple(reasons), traces)


def _single_reasons(result: Result) -> set[Reason]:
    """What masks a result that was published as all_traces where one response is asked for."""
    if result.builder == "per_request":
        return {Reason.BUILDER_NOT_DELIVERABLE}
    if result.error is not None:
        return set()
    reasons = set()
    if all(trace.role != _MAIN for trace in result.traces):
        reasons.add(Reason.NO_SAFE_CHAIN)
    if result.metrics.get("roots", 1) != 1:
        reasons.add(Reason.MULTIPLE_ROOTS)
    if result.metrics.get("chains", 1) != 1:
        reasons.add(Reason.MULTIPLE_CHAINS)
    return reasons
