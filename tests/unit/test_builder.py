"""Every case a builder must get right, in both deliveries, and rollouts that are deep or long."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from freezepoint.core.build import ALL_TRACES, build_result
from freezepoint.core.builder import per_request, prefix_merging
from freezepoint.core.projection import response_form
from freezepoint.core.snapshot import take_snapshot
from freezepoint_schemas.events import TokenEntry
from freezepoint_schemas.reasons import Reason
from freezepoint_schemas.results import Result
from tests.events import comparable, complete
from tests.frozen_logs import calls, frozen

FORK = "m:[1,2]->[3] x:[1,2,3,4]->[5] y:[1,2,3,9]->[6]"
TWO_ROOTS = "c1:[1,2,3]->[4,5] c2:[1,2,3,4,5,6]->[7] c3:[90,91]->[92,93,94,95]"
AMBIGUOUS_SIDE = "a:[1]->[2] b:[1,2]->[3,4] c:[1,2,3]->[4] d:[1,2,3,4,5]->[6]"
TWINS = "a:[1,2]->[7,8] b:[1,2]->[7,8] child:[1,2,7,8,9]->[20]"


def single(notation: str, **fields: Any) -> Result:
    return build_result(frozen(calls(notation), **fields))


def every_trace(notation: str, **fields: Any) -> Result:
    return build_result(frozen(calls(notation), **fields), delivery=ALL_TRACES)


def paths(result: Result) -> dict[str, list[str]]:
    """Role -> the calls of the trace, shared ones included."""
    return {
        trace.role: [
            span.call_id for span in sorted((*trace.shared, *trace.spans), key=lambda span: span.start)
        ]
        for trace in result.traces
    }


def trained(result: Result) -> list[int]:
    """Every token that some trace trains on."""
    return sorted(
        token
        for trace in result.traces
        for span in trace.spans
        for token in trace.token_ids[span.start : span.end].tolist()
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_chain_in_any_order(seed: int) -> None:
    chain = calls("c1:[1,2,3]->[10,11] c2:[1,2,3,10,11,4,5]->[12] c3:[1,2,3,10,11,4,5,12,6]->[13,14]")
    result = build_result(frozen(Random(seed).sample(chain, 3)))
    assert not result.mask_sample
    response = response_form(result)["rebuilt_response"]
    assert [len(item["prompt_token_ids"]) for item in response["output"]] == [3, 7, 9]
    assert response["usage"] == {"input_tokens": 3, "output_tokens": 5}
    (trace,) = result.traces
    assert trace.token_ids.tolist() == [1, 2, 3, 10, 11, 4, 5, 12, 6, 13, 14]
    assert [(span.call_id, span.start, span.end) for span in trace.spans] == [
        ("c1", 3, 5),
        ("c2", 7, 8),
        ("c3", 9, 11),
    ]


def test_a_retry_that_was_not_continued_is_quarantined() -> None:
    result = single("root:[1,2]->[3] kept:[1,2,3,4]->[5] drop:[1,2,3,4]->[9] next:[1,2,3,4,5,6]->[7]")
    assert not result.mask_sample
    assert result.metrics["quarantined_calls"] == 1
    assert result.metrics["quarantined_fraction"] == 0.25
    assert result.metrics["delivered_fraction"] == 0.75
    assert result.diagnostics["quarantined"] == {"drop": "superseded_retry"}
    assert result.diagnostics["not_delivered"] == {"superseded_retry": {"calls": 1, "tokens": 1}}


def test_a_retry_of_the_last_call_is_unresolved() -> None:
    result = single("root:[1,2]->[3] b:[1,2,3,4]->[9] a:[1,2,3,4]->[5]")
    assert result.reasons == [Reason.UNRESOLVED_RETRY]
    assert result.unresolved_retries == ["a", "b"]
    assert paths(result) == {"main": ["root", "a"]}
    assert response_form(result)["unresolved_retries"] == ["a", "b"]


def test_a_retried_first_call_is_kept_by_its_child_but_leaves_two_roots() -> None:
    result = single("a:[1,2]->[3] b:[1,2]->[4] n:[1,2,4,5]->[6]")
    assert paths(result) == {"main": ["b", "n"]}
    assert result.reasons == [Reason.MULTIPLE_ROOTS]
    assert result.metrics["roots"] == 2


def test_an_empty_generation_is_set_aside() -> None:
    result = single("f:[1,2,3]->[] r:[1,2,3]->[9,9]")
    assert not result.mask_sample
    assert result.metrics["empty_generation_calls"] == 1
    assert result.metrics["generated_tokens_captured"] == 2
    assert result.diagnostics["not_delivered"] == {"empty_generation": {"calls": 1, "tokens": 0}}


def test_an_empty_generation_is_nobodys_parent() -> None:
    result = single("a:[1]->[2] f:[1,2,3]->[] r:[1,2,3,4]->[5]")
    assert paths(result) == {"main": ["a", "r"]}


def test_a_lost_call_masks() -> None:
    result = single("c1:[1,2]->[3] c3:[1,2,3,4,5,6]->[7]", intents=frozenset({"c1", "c2", "c3"}))
    assert result.reasons == [Reason.DANGLING_INTENT]
    assert result.metrics["capture_incomplete"] is True
    assert result.diagnostics["dangling_intents"] == ["c2"]
    assert response_form(result)["rebuilt_response"] is not None


def test_two_roots_mask_a_single_response() -> None:
    result = single(TWO_ROOTS)
    assert result.reasons == [Reason.MULTIPLE_ROOTS, Reason.MULTIPLE_CHAINS]
    assert result.metrics["roots"] == 2
    assert result.metrics["delivered_fraction"] == 0.4286
    assert paths(result) == {"main": ["c1", "c2"], "branch-0": ["c3"]}


def test_two_roots_are_both_delivered_as_traces() -> None:
    result = every_trace(TWO_ROOTS)
    assert not result.mask_sample
    assert paths(result) == {"main": ["c1", "c2"], "branch-0": ["c3"]}
    assert result.diagnostics["generated_tokens_in_traces"] == 7
    assert "not_delivered" not in result.diagnostics


def test_a_quarantined_child_keeps_its_parent_from_being_a_leaf() -> None:
    result = single(AMBIGUOUS_SIDE)
    assert not result.mask_sample
    assert paths(result)["main"] == ["a", "c"]
    assert result.metrics["chains"] == 1


def test_a_quarantined_child_does_not_keep_its_parent_from_being_an_end() -> None:
    result = every_trace(AMBIGUOUS_SIDE)
    assert not result.mask_sample
    assert paths(result) == {"main": ["a", "c"], "branch-0": ["a", "b"]}
    assert trained(result) == [2, 3, 4, 4]
    assert result.diagnostics["not_delivered"] == {"ambiguous_parent": {"calls": 1, "tokens": 1}}


def test_ambiguous_parents_are_delivered_all_the_same() -> None:
    result = every_trace("a:[1]->[2,3] b:[1,2]->[3] c:[1,2,3,4]->[5]")
    assert not result.mask_sample
    assert trained(result) == [2, 3, 3]
    assert result.diagnostics["quarantined"] == {"c": "ambiguous_parent"}


def test_no_trace_is_the_main_one_without_a_chain() -> None:
    result = every_trace(TWINS)
    assert paths(result) == {"branch-0": ["a"]}
    assert response_form(result)["rebuilt_response"] is None


def test_twins_with_a_child_leave_no_safe_chain() -> None:
    result = single(TWINS)
    assert result.reasons == [Reason.UNRESOLVED_RETRY, Reason.NO_SAFE_CHAIN]
    assert result.metrics == {"n_calls": 3}
    form = response_form(result)
    assert form.pop("error")
    assert form == {
        "rollout_id": "r",
        "builder": "prefix_merging",
        "rebuilt_response": None,
        "mask_sample": True,
        "metrics": {"n_calls": 3},
    }


def test_a_fork_masks_a_single_response() -> None:
    result = single(FORK)
    assert result.reasons == [Reason.MULTIPLE_CHAINS]
    assert (result.metrics["roots"], result.metrics["chains"]) == (1, 2)


def test_the_main_chain_has_the_oldest_root() -> None:
    side, task = calls("side:[90]->[91] task:[1,2]->[3]")
    assert paths(build_result(frozen([task, side]))) == {"main": ["side"], "branch-0": ["task"]}
    late = side.model_copy(update={"created_at": 3.0})
    assert paths(build_result(frozen([task, late]))) == {"main": ["task"], "branch-0": ["side"]}


def test_each_token_of_a_fork_is_trained_once() -> None:
    result = every_trace("a:[1,2]->[10,11] b:[1,2,10,11,4]->[12] c:[1,2,10,11,5]->[13] d:[7,7,7,7,7,7]->[14]")
    assert not result.mask_sample
    assert trained(result) == [10, 11, 12, 13, 14]
    owners = [trace.role for trace in result.traces for span in trace.spans if span.call_id == "a"]
    assert owners == ["main"]
    assert [span.call_id for span in result.traces[1].shared] == ["a"]


def test_drift_gives_two_traces() -> None:
    result = every_trace("a:[1]->[10,11,12] b:[1,10,11,99,5]->[6]")
    assert len(result.traces) == 2
    assert trained(result) == [6, 10, 11, 12]


def test_an_equal_sequence_counts_as_a_prefix() -> None:
    assert paths(single("a:[1]->[2] b:[1,2]->[3]")) == {"main": ["a", "b"]}


def test_retry_groups_in_quarantined_subtrees_count() -> None:
    result = single(
        "root:[1]->[2] a:[1,2]->[3,4] b:[1,2,3]->[4] q:[1,2,3,4,5]->[6] "
        "x:[1,2,3,4,5,6,7]->[8] y:[1,2,3,4,5,6,7]->[9]"
    )
    assert result.diagnostics["quarantined"] == {"q": "ambiguous_parent", "y": "superseded_retry"}
    assert result.unresolved_retries == ["x", "y"]
    assert result.diagnostics["not_delivered"]["quarantined_ancestor"] == {"calls": 1, "tokens": 1}


def test_a_decision_looks_at_what_is_quarantined_by_then() -> None:
    """Calls are decided before their children: both roots are continued, whichever child is kept later."""
    result = single("a:[1]->[2] b:[1]->[3] a1:[1,2,4]->[5] b1:[1,3,4]->[6] b2:[1,3,4]->[7]")
    assert result.diagnostics["quarantined"] == {"b2": "superseded_retry"}
    assert result.unresolved_retries == ["b1", "b2"]


def test_per_request_is_never_a_single_response() -> None:
    result = build_result(frozen(calls("a:[1]->[2]")), builder="per_request")
    assert result.reasons == [Reason.BUILDER_NOT_DELIVERABLE]
    assert result.metrics == {"n_calls": 1}
    assert [trace.role for trace in result.traces] == ["req-0"]
    assert response_form(result)["rebuilt_response"] is None


def test_per_request_gives_every_call_its_trace() -> None:
    entries = calls("b:[1,2,3]->[4] f:[1,2]->[] a:[1,2,3]->[5]")
    result = build_result(frozen(entries), builder="per_request", delivery=ALL_TRACES)
    assert not result.mask_sample
    assert [(trace.role, trace.token_ids.tolist()) for trace in result.traces] == [
        ("req-0", [1, 2]),
        ("req-1", [1, 2, 3, 5]),
        ("req-2", [1, 2, 3, 4]),
    ]
    assert [[span.call_id for span in trace.spans] for trace in result.traces] == [[], ["a"], ["b"]]
    assert [trace.items[0].call_id for trace in result.traces] == ["f", "a", "b"]


@pytest.mark.parametrize("builder", ["prefix_merging", "per_request"])
@pytest.mark.parametrize("delivery", ["single_response", "all_traces"])
def test_only_empty_generations_are_nothing_to_train_on(builder: str, delivery: str) -> None:
    result = build_result(frozen(calls("a:[1]->[] b:[1,2]->[]")), builder=builder, delivery=delivery)
    assert Reason.NO_TRAINABLE_TOKENS in result.reasons
    assert result.metrics == {"n_calls": 2}
    assert result.error


def test_the_builders_take_no_calls() -> None:
    assert prefix_merging([]).traces == ()
    assert per_request([]).traces == ()


def _conversation(turns: int, prompt: int, generated: int) -> list[TokenEntry]:
    """A single chain, each prompt whole; tokens count up so that nothing repeats by accident."""
    tokens = np.arange(prompt + turns * (generated + 1), dtype=np.int32)
    written = []
    for turn in range(turns):
        start = prompt + turn * (generated + 1)
        written.append(
            TokenEntry(
                rollout_id="r",
                model_call_id=f"c{turn}",
                prompt_token_ids=tokens[:start],
                generation_token_ids=tokens[start : start + generated],
                generation_log_probs=np.full(generated, -0.5),
            )
        )
    return written


def test_thousands_of_turns_do_not_recurse() -> None:
    result = build_result(frozen(_conversation(5_000, 3, 1)))
    assert not result.mask_sample
    assert result.metrics["n_calls"] == len(result.traces[0].spans) == 5_000
    assert result.traces[0].token_ids.size == 3 + 5_000 * 2 - 1


def test_long_prompts_are_not_copied() -> None:
    entries = _conversation(20, 100_000, 500)
    result = build_result(frozen(entries))
    assert not result.mask_sample
    assert result.traces[0].token_ids.size == 100_000 + 20 * 501 - 1
    snapshot = take_snapshot(frozen(entries))
    assert all(
        np.shares_memory(snapshot.tree.tokens(call.prompt_node), call.entry.prompt_token_ids)
        or call.prompt_node.run.tokens.size >= call.prompt_length
        for call in snapshot.calls
    )


def test_a_complete_event_chooses_for_its_rollout() -> None:
    closing = complete("r", builder="per_request", delivery="all_traces")
    result = single(FORK, closing=closing)
    assert (result.builder, result.delivery, len(result.traces)) == ("per_request", "all_traces", 3)
    assert not result.mask_sample


@pytest.mark.parametrize("named", ["event", "worker"])
def test_the_delivery_per_request_is_that_builder_as_all_traces(named: str) -> None:
    closing = complete("r", delivery="per_request") if named == "event" else complete("r")
    own = "single_response" if named == "event" else "per_request"
    result = build_result(frozen(calls(FORK), closing), delivery=own)
    as_pair = build_result(frozen(calls(FORK)), builder="per_request", delivery="all_traces")
    assert comparable(result) == comparable(as_pair)
    assert (result.builder, result.delivery, result.mask_sample) == ("per_request", "all_traces", False)
    assert [trace.role for trace in result.traces] == ["req-0", "req-1", "req-2"]


def test_what_an_event_names_goes_before_the_delivery_per_request_of_a_worker() -> None:
    def choice(worker_builder: str = "prefix_merging", **named: str) -> tuple[str, str]:
        log = frozen(calls(FORK), complete("r", **named))
        result = build_result(log, builder=worker_builder, delivery="per_request")
        return result.builder, result.delivery

    assert choice() == choice("per_request") == ("per_request", "all_traces")
    assert choice(delivery="single_response") == ("prefix_merging", "single_response")
    assert choice(builder="prefix_merging") == ("prefix_merging", "all_traces")
    assert choice(builder="prefix_merging", delivery="per_request") == ("per_request", "all_traces")
