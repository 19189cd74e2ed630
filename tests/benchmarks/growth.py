"""Growth: time and memory over turns, open rollouts and partitions. What is linear lies flat here: all is per record or
per byte received."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from math import log10
from pathlib import Path

from freezepoint.collector import young_collections
from freezepoint.core.build import build_result
from freezepoint.core.effects import Effect, Freeze
from freezepoint.core.partition import PartitionConfig, PartitionCore
from freezepoint.core.records import InputRecord
from freezepoint_schemas import codec
from freezepoint_schemas.events import RolloutComplete
from freezepoint_schemas.topics import partition_for
from tests.benchmarks.measuring import Figure, Row
from tests.benchmarks.rollouts import LIMITS, RECORD_BYTES_MAX, Shape, by_reference, rollout

RUNS = 3
TURN = Shape(1, 200, 40, 60)


@dataclass(frozen=True, slots=True)
class Point:
    """``size``: turns, open rollouts or partitions. Time and peak memory of a run, per record."""

    size: int
    microseconds: float
    kilobytes: float


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    points: Sequence[Point]

    def spread(self, of: Callable[[Point], float]) -> float:
        """The largest size's figure over the smallest one's."""
        return of(self.points[-1]) / of(self.points[0])


def growth_rows(target: Path | None, *, quick: bool) -> list[Row]:
    """:param target: where the plot is written to."""
    turns = (10, 100) if quick else (10, 100, 1_000)
    opened = (1, 100) if quick else (1, 100, 10_000)
    curves = [
        Curve("turns of a rollout", [_point(size, _waves(1, size, 1_000 // size)) for size in turns]),
        Curve("open rollouts", [_point(size, _waves(size, 5, 200 // size)) for size in opened]),
        Curve("partitions", [_point(size, _waves(100, 10), size) for size in (1, 16, 64)]),
    ]
    if target is not None:
        target.write_text(plot(curves), encoding="utf-8")
    return [
        row
        for curve in curves
        for row in (
            _row(curve, "time", lambda point: point.microseconds, "µs"),
            _row(curve, "memory", lambda point: point.kilobytes, "KB"),
        )
    ]


def _row(curve: Curve, what: str, of: Callable[[Point], float], unit: str) -> Row:
    note = ", ".join(f"{point.size:,}: {of(point):.3g} {unit}" for point in curve.points)
    against = f"{curve.points[-1].size:,} over {curve.points[0].size:,}"
    return Row(
        "growth", f"{what} a record by {curve.name}", against, Figure.of([curve.spread(of)]), note=note
    )


def _waves(count: int, turns: int, waves: int = 1) -> list[list[InputRecord]]:
    """In each wave, of which there is one at least, so many rollouts that are open at the same time."""
    values = by_reference(rollout(Shape(turns, TURN.first_prompt, TURN.generated, TURN.tool)))
    return [list(_wave(wave, count, values)) for wave in range(max(1, waves))]


def open_waves(count: int, turns: int) -> list[list[InputRecord]]:
    """One wave of rollouts that do not end."""
    return [wave[:-count] for wave in _waves(count, turns)]


def _wave(wave: int, count: int, values: Sequence[bytes]) -> Iterator[InputRecord]:
    """Offsets are given by each partition anew."""
    keys = [f"rollout-{wave}-{number}".encode() for number in range(count)]
    for value in values:
        for key in keys:
            body = value.replace(b'"rollout_id":"standard"', b'"rollout_id":"' + key + b'"')
            yield InputRecord(0, 0, 1_000, key, body)
    for key in keys:
        closing = RolloutComplete(rollout_id=key.decode(), n_calls=len(values))
        yield InputRecord(0, 0, 1_000, key, codec.encode_event(closing))


def _point(size: int, waves: Sequence[Sequence[InputRecord]], partitions: int = 1) -> Point:
    """Time is that of all waves; memory that of the first, since what is frozen is let go."""
    records = list(chain.from_iterable(waves))
    taken = []
    with young_collections():
        for _ in range(RUNS):
            began = time.process_time()
            _fold(records, partitions)
            taken.append(time.process_time() - began)
    tracemalloc.start()
    _fold(waves[0], partitions)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Point(size, 1e6 * min(taken) / len(records), peak / len(waves[0]) / 1024)


def _fold(records: Sequence[InputRecord], partitions: int) -> None:
    """Every record folded in, every result built and encoded."""
    cores = [PartitionCore(config(number, partitions)) for number in range(partitions)]
    for record in records:
        core = cores[partition_for(record.key or b"", partitions)]
        placed = InputRecord(core.config.partition, core.next_offset, 1_000, record.key, record.value)
        for log in _frozen(core.feed(placed)):
            codec.encode_result(build_result(log.log))


def _frozen(effects: Sequence[Effect]) -> Iterator[Freeze]:
    for effect in effects:
        assert isinstance(effect, Freeze)
        yield effect


def config(partition: int, partitions: int) -> PartitionConfig:
    return PartitionConfig("tokens", partition, partitions, "growth", RECORD_BYTES_MAX, LIMITS, 3_600.0)


_WIDTH, _HEIGHT, _LEFT, _TOP, _PANEL = 340, 240, 60, 50, 220


def plot(curves: Sequence[Curve]) -> str:
    """The curves side by side as SVG: time above, memory below, sizes on a logarithmic axis."""
    panels = []
    for column, curve in enumerate(curves):
        figures = (
            ("µs a record", "#1f5fa8", lambda point: point.microseconds),
            ("KB a record", "#b3541e", lambda point: point.kilobytes),
        )
        for row, (unit, colour, of) in enumerate(figures):
            at = f'<g transform="translate({column * _WIDTH + _LEFT},{row * _HEIGHT + _TOP})">'
            panels.append(at + _panel(f"{unit}, by {curve.name}", curve.points, of, colour) + "</g>")
    width, height = len(curves) * _WIDTH, 2 * _HEIGHT + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(panels)}</svg>\n'
    )


def _panel(title: str, points: Sequence[Point], of: Callable[[Point], float], colour: str) -> str:
    deep = 130
    top = 1.25 * max(map(of, points))
    decades = max(0.1, log10(points[-1].size / points[0].size))
    places = [
        (_PANEL * log10(point.size / points[0].size) / decades, deep * (1 - of(point) / top), point)
        for point in points
    ]
    line = " ".join(f"{x:.0f},{y:.0f}" for x, y, _ in places)
    marks = "".join(
        f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" fill="{colour}"/>'
        f'<text x="{x:.0f}" y="{y - 8:.0f}" text-anchor="middle">{of(point):.3g}</text>'
        f'<text x="{x:.0f}" y="{deep + 16}" text-anchor="middle">{point.size:,}</text>'
        for x, y, point in places
    )
    axes = f'<path d="M0,0 V{deep} H{_PANEL}" fill="none" stroke="#888"/>'
    name = f'<text x="0" y="-14" font-weight="bold">{escape(title)}</text>'
    return f'{name}{axes}<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>{marks}'
