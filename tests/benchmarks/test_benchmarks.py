"""The benchmarks run and come to figures; how fast is for `make bench`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.benchmarks.core import core_rows
from tests.benchmarks.growth import Curve, Point, growth_rows, plot
from tests.benchmarks.kafka import kafka_rows
from tests.benchmarks.measuring import Figure, Row
from tests.benchmarks.pauses import build_rows, pause_rows
from tests.benchmarks.scaling import scaling_rows
from tests.benchmarks.store import store_rows


def assert_finite(rows: list[Row]) -> None:
    assert rows
    for row in rows:
        figure = row.value
        assert all(map(math.isfinite, (figure.median, figure.low, figure.high)))
        assert figure.low <= figure.median <= figure.high


def test_the_core_and_the_store_are_measured() -> None:
    assert_finite([*core_rows(1, quick=True), *store_rows(1)])


def test_a_result_is_a_twentieth_of_what_was_received() -> None:
    (size,) = [row for row in core_rows(1, quick=False) if row.name == "size"]
    assert size.met


@pytest.mark.slow
def test_two_workers_are_measured_against_one() -> None:
    assert_finite(scaling_rows(1, quick=True))


@pytest.mark.slow
def test_growth_is_measured_and_plotted(tmp_path: Path) -> None:
    assert_finite(growth_rows(tmp_path / "growth.svg", quick=True))
    assert (tmp_path / "growth.svg").read_text().startswith("<svg")


def test_pauses_are_measured() -> None:
    assert_finite([*pause_rows(1, quick=True), *build_rows(1)])


def test_a_plot_names_its_points() -> None:
    drawn = plot([Curve("turns", [Point(10, 1.5, 2.5), Point(1_000, 1.25, 2.25)])])
    assert "1,000" in drawn
    assert "by turns" in drawn


@pytest.mark.slow
@pytest.mark.parametrize("name", ["json-100k", "packed-100k", "small-1k", "replay", "sink", "latency"])
def test_a_worker_on_kafka_is_measured(kafka_bootstrap: str, name: str) -> None:
    assert_finite(kafka_rows(kafka_bootstrap, 1, name.__eq__, quick=True))


@pytest.mark.parametrize(("at_least", "met"), [(False, True), (True, False)])
def test_a_goal_is_a_ceiling_or_a_floor(at_least: bool, met: bool) -> None:
    row = Row("n", "what", "against", Figure.of([1.0, 2.0, 3.0]), goal=2.5, at_least=at_least)
    assert row.met is met
    assert Row("n", "what", "against", row.value).met is None
