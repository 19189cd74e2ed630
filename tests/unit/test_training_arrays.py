"""One trace as arrays: what is aligned with what, what may be written to, what a delivery shows."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from freezepoint.errors import InputError
from freezepoint.training import UNKNOWN_VERSION, DeliveryName, to_arrays, to_response, view
from freezepoint_schemas.results import Result
from tests.events import complete, entry
from tests.results import built, result, trace, trajectory


def test_arrays_of_two_calls() -> None:
    made = built(
        entry("r", "c1", [1, 2], [10, 11], policy_version=3),
        entry("r", "c2", [1, 2, 10, 11, 4], [12], policy_version=4, generation_log_probs=[-2.5]),
        complete("r", n_calls=2),
    )
    arrays = to_arrays(made)
    assert arrays.token_ids.tolist() == [1, 2, 10, 11, 4, 12]
    assert arrays.loss_mask.tolist() == [False, False, True, True, False, True]
    assert arrays.log_probs.tolist() == [0, 0, -0.25, -0.5, 0, -2.5]
    assert arrays.position.tolist() == [0, 1, 2, 3, 4, 5]
    assert arrays.policy_version is not None
    assert arrays.policy_version.tolist() == [-1, -1, 3, 3, -1, 4]
    assert (arrays.policy_version_min, arrays.policy_version_max) == (3, 4)
    assert (len(arrays), arrays.sampled) == (6, 3)
    assert [
        array.dtype for array in (arrays.token_ids, arrays.loss_mask, arrays.log_probs, arrays.position)
    ] == [
        np.int32,
        np.bool_,
        np.float32,
        np.int32,
    ]


def test_everything_is_writable_and_the_result_stays_as_it_is() -> None:
    """torch.from_numpy shares the memory: it warns of a read-only array, and writes must not reach the result."""
    made = result("r")
    arrays = to_arrays(made)
    for array in (arrays.token_ids, arrays.loss_mask, arrays.log_probs, arrays.position):
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert array.flags.aligned
        array[:] = 0
    assert made.traces[0].token_ids.tolist() == [1, 2, 3]


def test_without_a_copy_the_tokens_are_the_results_own_and_read_only() -> None:
    made = result("r")
    arrays = to_arrays(made, writable=False)
    assert np.shares_memory(arrays.token_ids, made.traces[0].token_ids)
    assert not arrays.token_ids.flags.writeable


def test_float64_is_lossless_and_float32_never_infinite() -> None:
    values = [-0.1, -1e300]
    made = result("r", traces=[trace([1, 2, 3], [(1, 3)], log_probs=values)])
    assert to_arrays(made, float_type="float64").log_probs.tolist() == [0, *values]
    narrow = to_arrays(made).log_probs
    assert np.isfinite(narrow).all()
    assert narrow[1] == np.float32(-0.1)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([None, None], None),
        (["a", "b"], None),
        (["a", 7], [-1, UNKNOWN_VERSION, 7]),
        ([2**80, 7], [-1, -1, 7]),
    ],
)
def test_versions_that_are_no_numbers_are_unknown(
    versions: list[int | str | None], expected: list[int] | None
) -> None:
    made = result("r", traces=[trace([1, 2, 3], [(1, 2), (2, 3)], versions=versions)])
    found = to_arrays(made).policy_version
    assert (None if found is None else found.tolist()) == expected


def test_a_trace_is_found_by_role_and_the_only_one_by_default() -> None:
    branches = [trace([1, 2], [(1, 2)]), trace([1, 3, 4], [(2, 3)], role="branch-0")]
    made = result("r", traces=branches)
    assert to_arrays(made, "branch-0").token_ids.tolist() == [1, 3, 4]
    assert to_arrays(made, branches[1]).token_ids.tolist() == [1, 3, 4]
    assert to_arrays(made).token_ids.tolist() == [1, 2]
    assert to_arrays(result("r", traces=branches[1:])).token_ids.tolist() == [1, 3, 4]
    with pytest.raises(InputError, match="no trace 'req-0'; it has: main, branch-0"):
        to_arrays(made, "req-0")
    with pytest.raises(InputError, match="none at all"):
        to_arrays(result("r", traces=[]))


@pytest.mark.parametrize("spans", [[(0, 4)], [(1, 3), (2, 3)], [(2, 1)], [(-1, 1)]])
def test_spans_that_contradict_the_tokens_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(InputError, match="rollout r, trace main"):
        to_arrays(result("r", traces=[trace([1, 2, 3], spans, log_probs=[-1.0])]))


def test_too_few_log_probabilities_are_refused() -> None:
    with pytest.raises(InputError, match="2 sampled tokens and 1 log prob"):
        to_arrays(result("r", traces=[trace([1, 2, 3], [(1, 3)], log_probs=[-1.0])]))


def test_a_trace_without_tokens_to_train_on() -> None:
    arrays = to_arrays(result("r", traces=[trace([1, 2], [])]))
    assert arrays.sampled == 0
    assert arrays.policy_version is None


def test_the_response_form() -> None:
    made = built(entry("r", "c1", [1, 2], [3]), complete("r", n_calls=1, model="m"))
    whole = to_response(made)
    assert whole["rebuilt_response"]["output"][0]["prompt_token_ids"] == [1, 2]
    assert to_response(made, "main") == whole["rebuilt_response"]


def test_all_traces_unmasks_what_only_branched() -> None:
    branches = [trace([1, 2], [(1, 2)]), trace([1, 3], [(1, 2)], role="branch-0")]
    branched = result("r", traces=branches, reasons=["multiple_chains"])
    assert view(branched).masked
    assert [found.role for found in view(branched).traces] == ["main"]
    seen = view(branched, "all_traces")
    assert not seen.masked
    assert [found.role for found in seen.traces] == ["main", "branch-0"]
    lossy = result("r", traces=branches, reasons=["capture_incomplete", "multiple_chains"])
    assert view(lossy, "all_traces").reasons == ("capture_incomplete", "multiple_chains")


def test_single_response_masks_what_was_published_as_all_traces() -> None:
    """The same judgement as if it had been published so."""
    events = [entry("r", "a", [1, 2], [3]), entry("r", "b", [9], [4])]
    published = built(*events, complete("r", n_calls=2, delivery="all_traces"))
    wanted = built(*events, complete("r", n_calls=2, delivery="single_response"))
    assert not published.mask_sample
    assert (
        list(view(published, "single_response").reasons)
        == wanted.reasons
        == ["multiple_roots", "multiple_chains"]
    )
    assert view(wanted, "all_traces").traces == tuple(wanted.traces)
    by_call = built(*events, complete("r", n_calls=2, builder="per_request", delivery="all_traces"))
    assert list(view(by_call, "single_response").reasons) == ["builder_not_deliverable"]


def two_calls_and_a_branch() -> Result:
    """Masked as a single response, since it branched."""
    calls = [
        entry("r", "c0", [1], [2]),
        entry("r", "c1", [1, 2, 3], [4]),
        entry("r", "c2", [1, 2, 9], [8]),
    ]
    return built(*calls, complete("r", n_calls=3, model="m"))


def test_a_trajectory_gives_the_traces_of_the_delivery_chosen_and_no_others() -> None:
    made = two_calls_and_a_branch()
    by_call = trajectory(made, delivery="per_request")
    assert [by_call.to_arrays(f"req-{n}").token_ids.tolist() for n in range(3)] == [
        [1, 2],
        [1, 2, 3, 4],
        [1, 2, 9, 8],
    ]
    assert by_call.to_response("req-1")["output"][0]["prompt_token_ids"] == [1, 2, 3]
    with pytest.raises(InputError, match="no trace 'main'; under per_request it has: req-0, req-1, req-2"):
        by_call.to_arrays("main")
    all_traces = trajectory(made, delivery="all_traces")
    for seen in all_traces.traces:
        assert all_traces.to_arrays(seen.role).token_ids.tolist() == seen.token_ids.tolist()
        assert all_traces.to_arrays(seen).token_ids.tolist() == seen.token_ids.tolist()


@pytest.mark.parametrize("delivery", ["all_traces", "per_request"])
def test_what_a_delivery_unmasks_never_gives_one_of_its_traces_for_all(delivery: DeliveryName) -> None:
    unmasked = trajectory(two_calls_and_a_branch(), delivery=delivery)
    assert not unmasked.masked
    with pytest.raises(InputError, match=f"several traces, and none was named; under {delivery} it has: "):
        unmasked.to_arrays()
    assert unmasked.to_response()["mask_sample"], "its response is that of the main trace alone"


def test_the_only_trace_of_a_delivery_needs_no_name() -> None:
    made = built(entry("r", "c0", [1], [2]), complete("r", n_calls=1, model="m"))
    for delivery in get_args(DeliveryName):
        assert trajectory(made, delivery=delivery).to_arrays().token_ids.tolist() == [1, 2]
    assert trajectory(two_calls_and_a_branch()).to_arrays().loss_mask.sum() > 0, "the main one"
    with pytest.raises(InputError, match="no trace; under single_response it has: none at all"):
        trajectory(result("r", traces=[])).to_arrays()


def test_what_the_delivery_masks_is_masked_in_the_response_too() -> None:
    branches = [trace([1, 2], [(1, 2)]), trace([1, 3], [(1, 2)], role="branch-0")]
    made = result("r", traces=branches, delivery="all_traces", metrics={"roots": 1, "chains": 2})
    seen = trajectory(made, delivery="single_response")
    assert seen.masked
    assert seen.to_arrays().token_ids.tolist() == [1, 2]
    with pytest.raises(InputError, match="no trace 'branch-0'"):
        seen.to_arrays("branch-0")
    assert (to_response(made)["mask_sample"], seen.to_response()["mask_sample"]) == (False, True)
