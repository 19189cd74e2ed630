"""Results under a delivery that is chosen when they are read, and what their tokens weigh."""

from __future__ import annotations

import pytest

from freezepoint.core.build import ALL_TRACES, PER_REQUEST, SINGLE_RESPONSE, build_result
from freezepoint.core.views import view
from freezepoint_schemas import codec
from freezepoint_schemas.reasons import Reason
from tests.events import complete
from tests.frozen_logs import calls, frozen

FORK = "m:[1,2]->[3] x:[1,2,3,4]->[5,6] y:[1,2,3,9]->[6]"


@pytest.mark.parametrize("published_as", [SINGLE_RESPONSE, ALL_TRACES])
def test_a_reader_may_choose_another_delivery(published_as: str) -> None:
    result = codec.decode_result(
        codec.encode_result(build_result(frozen(calls(FORK)), delivery=published_as))
    )
    single, every = view(result, SINGLE_RESPONSE), view(result, ALL_TRACES)
    assert single.reasons == (Reason.MULTIPLE_CHAINS,)
    assert [trace.role for trace in single.traces] == ["main"]
    assert not every.masked
    assert [trace.role for trace in every.traces] == ["main", "branch-0"]
    assert view(result) == view(result, published_as)


@pytest.mark.parametrize("published_as", [SINGLE_RESPONSE, ALL_TRACES])
@pytest.mark.parametrize(
    "notation", [FORK, "a:[1]->[2]", "a:[1]->[2] b:[5]->[6]", "a:[1]->[2] b:[1]->[3]", "a:[1]->[]"]
)
def test_results_that_do_not_say_are_judged_by_the_contract(published_as: str, notation: str) -> None:
    """As an earlier release wrote them."""
    result = build_result(frozen(calls(notation)), delivery=published_as)
    earlier = result.model_copy(update={"diagnostics": {}})
    for delivery in (SINGLE_RESPONSE, ALL_TRACES):
        assert view(earlier, delivery).masked == view(result, delivery).masked


def test_losses_and_retries_mask_whatever_is_chosen() -> None:
    result = build_result(frozen(calls("a:[1]->[2] b:[1]->[3]"), intents=frozenset({"lost"})))
    assert view(result, ALL_TRACES).reasons == (Reason.DANGLING_INTENT, Reason.UNRESOLVED_RETRY)


def test_what_a_single_response_need_not_mind_masks_all_traces() -> None:
    notation = "p:[90,91,1]->[2] q:[90,91,1]->[3] task:[1,2]->[3]"
    result = build_result(frozen(calls(notation), complete("r", terminal_call_id="task")))
    assert not view(result).masked
    assert view(result, ALL_TRACES).reasons == (Reason.UNRESOLVED_RETRY,)


def test_a_rollout_weighs_one_in_however_many_traces() -> None:
    every = view(build_result(frozen(calls(FORK))), ALL_TRACES)
    assert every.sampled_tokens == 4
    assert every.token_weight == 0.25
    assert every.trace_weights == (0.75, 0.25)
    single = view(build_result(frozen(calls(FORK))), SINGLE_RESPONSE)
    assert single.trace_weights == (1.0,)


def test_nothing_to_train_on_weighs_nothing() -> None:
    nothing = view(build_result(frozen(calls("a:[1]->[]"))), ALL_TRACES)
    assert (nothing.token_weight, nothing.trace_weights) == (0.0, ())


def test_a_reader_may_take_the_calls_apart() -> None:
    """As the builder of that name would, of a rollout in which nothing was set aside."""
    rows = [[[3], [1]], [[5], [2]], [[7], [3]], [[4], [4]], [[5], [5]], [[6], [6]]]
    m, x, y = calls(FORK)
    entries = [m, x.model_copy(update={"routed_experts": rows}), y]
    apart = view(build_result(frozen(entries)), PER_REQUEST)
    built = build_result(frozen(entries), builder="per_request", delivery=ALL_TRACES)
    assert not apart.masked
    compared = {"items", "routed_experts"}
    assert [trace.model_dump(mode="json", exclude=compared) for trace in apart.traces] == [
        trace.model_dump(mode="json", exclude=compared) for trace in built.traces
    ]
    assert apart.traces[0].routed_experts is not None  # what its continuation knows of its tokens
    assert apart.traces[0].routed_experts.tolist() == rows[:3]
    assert [trace.items[0].call_id for trace in apart.traces] == ["m", "x", "y"]
    assert apart.traces[1].items[0].routed_experts == rows
    assert apart.token_weight == 0.25


def test_there_are_no_other_deliveries() -> None:
    with pytest.raises(ValueError, match="unknown delivery 'best'"):
        view(build_result(frozen(calls(FORK))), "best")
