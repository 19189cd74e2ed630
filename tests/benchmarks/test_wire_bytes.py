"""The figures that are promised."""

from __future__ import annotations

import re

import pytest

from tests.benchmarks.rollouts import rollout
from tests.benchmarks.wire_bytes import FORMS, measured
from tests.documents import rows_under


@pytest.mark.slow
def test_the_standard_rollout_by_reference_takes_a_thirtieth_of_json() -> None:
    totals = measured(rollout())
    assert totals["packed, by reference"] * 30 <= totals["JSON, whole prompts"]
    told = {row[0]: row[2] for row in rows_under("docs/sink.md", "Bytes")}
    assert told.keys() == FORMS.keys()
    for form, text in told.items():
        megabytes, _, share = text.partition(" MB")
        assert float(megabytes) == pytest.approx(totals[form] / 1e6, rel=0.01)
        for ratio in re.findall(r"1/([0-9.]+)", share):
            assert float(ratio) == pytest.approx(totals["JSON, whole prompts"] / totals[form], rel=0.01)
