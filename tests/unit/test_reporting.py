"""Many results in a few numbers."""

from __future__ import annotations

import pytest

from freezepoint.core.build import ALL_TRACES, build_result
from freezepoint.reporting import Report
from freezepoint_schemas import codec
from freezepoint_schemas.results import Result
from tests.frozen_logs import calls, frozen

CHAIN = "a:[1,2]->[3] b:[1,2,3,4]->[5]"
FORK = "m:[1,2]->[3] x:[1,2,3,4]->[5] y:[1,2,3,9]->[6]"
RETRY = "root:[1]->[2] kept:[1,2,3]->[4] drop:[1,2,3]->[5,5] next:[1,2,3,4,6]->[7]"


def result(notation: str, *versions: int | str | None) -> Result:
    entries = calls(notation)
    for position, version in enumerate(versions):
        entries[position] = entries[position].model_copy(update={"policy_version": version})
    return codec.decode_result(codec.encode_result(build_result(frozen(entries))))


def reported(*results: Result, delivery: str | None = None, policy_version: int | None = None) -> Report:
    report = Report(delivery, policy_version)
    for one in results:
        report.add(one)
    return report


def test_results_are_summed_up() -> None:
    report = reported(result(CHAIN, 3, 5), result(CHAIN, 4, 4), result(FORK), result(RETRY))
    summary = report.summary()
    assert (summary["results"], summary["masked"], summary["masked_fraction"]) == (4, 1, 0.25)
    assert summary["reasons"] == {"multiple_chains": {"results": 1, "fraction": 0.25}}
    assert summary["tokens"] == {"captured": 12, "delivered": 7, "masked": 2, "not_delivered": 3}
    assert summary["delivered_fraction"] == 0.5833
    assert summary["tokens_set_aside"] == {"superseded_retry": 2}
    assert (summary["calls"], summary["traces"]) == (11, 4)
    assert summary["policy_versions"] == {
        "results": 2,
        "min": 3,
        "max": 5,
        "spread_mean": 1.0,
        "spread_max": 2,
        "rollouts_crossing_refits": 1,
        "lag_to": 5,
        "lag_mean": 1.5,
        "lag_max": 2,
    }


def _lag(report: Report) -> tuple[int, int | None, float | None, int | None]:
    said = report.summary()["policy_versions"]
    return said["results"], said["lag_to"], said["lag_mean"], said["lag_max"]


def test_results_are_behind_the_newest_or_a_given_version_by_their_oldest_token() -> None:
    results = [result(CHAIN, 1, 2), result(CHAIN, 100, 100), result(CHAIN, 40, 100)]
    assert _lag(reported(*results)) == (3, 100, 53.0, 99)
    assert _lag(reported(*results, policy_version=110)) == (3, 110, 63.0, 109)
    assert _lag(reported(*results, policy_version=1)) == (3, 1, -46.0, 0)


@pytest.mark.parametrize("versions", [(), (None, None), ("step-1", "step-2"), ("step-1", 7)])
def test_results_without_a_number_for_a_version_count_in_no_mean(
    versions: tuple[int | str | None, ...],
) -> None:
    silent = [result(CHAIN, *versions)] * 5
    assert _lag(reported(result(CHAIN, 1, 3), result(CHAIN, 5, 5), *silent)) == (2, 5, 2.0, 4)
    assert reported(result(CHAIN, 1, 3), *silent).summary()["policy_versions"]["spread_mean"] == 2.0
    assert _lag(reported(*silent)) == (0, None, None, None)
    assert _lag(reported(*silent, policy_version=9)) == (0, 9, None, None)


def test_another_delivery_can_be_asked_about() -> None:
    summary = reported(result(FORK), delivery=ALL_TRACES).summary()
    assert (summary["masked"], summary["delivered_fraction"], summary["traces"]) == (0, 1.0, 2)


def test_breaks_are_counted() -> None:
    summary = reported(result("a:[1]->[10,11,12] b:[1,10,11,99,5]->[6]")).summary()
    assert summary["likely_prefix_breaks"] == {"retokenization": 1}


def test_nothing_is_no_division() -> None:
    summary = reported().summary()
    assert (summary["masked_fraction"], summary["delivered_fraction"]) == (0.0, 0.0)
