"""How time is measured: the compared jobs take turns in one run, so that whatever else the machine does hits both."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Job = Callable[[], Any]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Figure:
    """The median of some runs, and what they ranged over."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int = 3) -> str:
        return f"{self.median:.{digits}g} ({self.low:.{digits}g}–{self.high:.{digits}g})"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. ``goal`` is a bound on ``value``, a ceiling unless ``at_least``; None where it is only
    reported. ``note``: absolute figures, for orientation."""

    name: str
    what: str
    against: str
    value: Figure
    goal: float | None = None
    at_least: bool = False
    unit: str = "×"
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value.median >= self.goal if self.at_least else self.value.median <= self.goal

    @property
    def goal_text(self) -> str:
        if self.goal is None:
            return "–"
        return f"{'≥' if self.at_least else '≤'} {self.goal:.3g} {self.unit}"


def seconds(job: Job, clock: Clock = time.perf_counter, *, collect: bool = True) -> float:
    if collect:
        gc.collect()
    began = clock()
    job()
    return clock() - began


def in_turns(
    jobs: Mapping[str, Job], rounds: int, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each job, ``rounds`` times A B A B …, after one round that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds + 1):
        for name, job in jobs.items():
            elapsed = seconds(job, clock)
            if number:
                taken[name].append(elapsed)
    return taken


def ratio(above: Sequence[float], below: Sequence[float]) -> Figure:
    """Round by round."""
    return Figure.of([a / b for a, b in zip(above, below, strict=True)])


def blockwise(values: Sequence[float], size: int) -> list[float]:
    """The median of each so many values."""
    return [
        statistics.median(values[start : start + size]) for start in range(0, len(values) - size + 1, size)
    ]


def milliseconds(values: Sequence[float]) -> str:
    return f"{1000 * statistics.median(values):.3g} ms"
