"""The figures that are promised."""

from __future__ import annotations

import pytest

from tests.benchmarks.rollouts import rollout
from tests.benchmarks.wire_bytes import measured


@pytest.mark.slow
def test_the_standard_rollout_by_reference_takes_a_thirtieth_of_json() -> None:
    totals = measured(rollout())
    assert totals["packed, by reference"] * 30 <= totals["JSON, whole prompts"]
