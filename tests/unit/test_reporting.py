"""Many results in a few numbers."""

from __future__ import annotations

from freezepoint.core.build import ALL_TRACES, build_result
from freezepoint.reporting import Report
from freezepoint_schemas import codec
from freezepoint_schemas.results import Result
from tests.frozen_logs import calls, frozen

CHAIN = "a:[1,2]->[3] b:[1,2,3,4]->[5]"
FORK = "m:[1,2]->[3] x:[1,2,3,4]->[5] y:[1,2,3,9]->[6]"
RETRY = "root:[1]->[2] kept:[1,2,3]->[4] drop:[1,2,3]->[5,5] next:[1,2,3,4,6]->[7]"


def result(notation: str, *versions: int) -> Result:
    entries = calls(notation)
    for position, version in enumerate(versions):
        entries[position] = entries[position].model_copy(update={"policy_version": version})
    return codec.decode_result(codec.encode_result(build_result(frozen(entries))))


def reported(*results: Result, delivery: str | None = None) -> Report:
    report = Report(delivery)
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
        "min": 3,
        "max": 5,
        "spread_mean": 0.5,
        "spread_max": 2,
        "rollouts_crossing_refits": 1,
    }


def test_another_delivery_can_be_asked_about() -> None:
    summary = reported(result(FORK), delivery=ALL_TRACES).summary()
    assert (summary["masked"], summary["delivered_fraction"], summary["traces"]) == (0, 1.0, 2)


def test_breaks_are_counted() -> None:
    summary = reported(result("a:[1]->[10,11,12] b:[1,10,11,99,5]->[6]")).summary()
    assert summary["likely_prefix_breaks"] == {"retokenization": 1}


def test_nothing_is_no_division() -> None:
    summary = reported().summary()
    assert (summary["masked_fraction"], summary["delivered_fraction"]) == (0.0, 0.0)
