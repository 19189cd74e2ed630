"""A worker's figures: counts of what happened, how things stand now, how long results took. Knows no exporter."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from freezepoint.telemetry.recent import Recent
from freezepoint.telemetry.tracing import RolloutTracer

LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class Latency:
    """How often each bound was kept: ``buckets[i]`` counts what took at most ``LATENCY_BOUNDS_S[i]``, the last one more."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


@dataclass(slots=True)
class Figures:
    """``counts``: by name, see ``telemetry.metrics`` for what each is. ``standing``: asked for how things stand now.
    ``recent``: for people who look. ``tracer``: where rollouts are traced to, if they are."""

    counts: Counter[str] = field(default_factory=Counter)
    freeze_to_publish: Latency = field(default_factory=Latency)
    recent: Recent = field(default_factory=Recent)
    tracer: RolloutTracer | None = None
    standing: Callable[[], Mapping[str, float]] = dict
