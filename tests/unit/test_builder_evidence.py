"""Named parents and the terminal: what they decide, what contradicts them, and the cases they were made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from freezepoint.core.build import ALL_TRACES, Leniency, build_result
from freezepoint_schemas.events import TokenEntry
from freezepoint_schemas.reasons import Reason
from freezepoint_schemas.results import Result
from tests.events import complete
from tests.frozen_logs import calls, frozen, referring

TWINS = "a:[1,2]->[7,8] b:[1,2]->[7,8] child:[1,2,7,8,9]->[20]"
RETRY = "root:[1,2]->[3] a:[1,2,3,4]->[5] b:[1,2,3,4]->[9]"
SIDE = "side:[90]->[91] task:[1,2]->[3]"


def named(notation: str, parents: Mapping[str, str]) -> list[TokenEntry]:
    """Entries of which some name their parents."""
    return [
        call.model_copy(update={"parent_call_id": parents.get(call.model_call_id)})
        for call in calls(notation)
    ]


def built(entries: list[TokenEntry], delivery: str = "single_response", **closing: Any) -> Result:
    return build_result(frozen(entries, complete("r", **closing)), delivery=delivery)


def paths(result: Result) -> dict[str, list[str]]:
    return {
        trace.role: [
            span.call_id for span in sorted((*trace.shared, *trace.spans), key=lambda span: span.start)
        ]
        for trace in result.traces
    }


def test_a_named_parent_settles_an_ambiguity_and_the_retry() -> None:
    result = built(named(TWINS, {"child": "b"}))
    assert result.reasons == [Reason.MULTIPLE_ROOTS]  # the reference's rule for retried first calls
    assert paths(result) == {"main": ["b", "child"]}
    assert result.diagnostics["quarantined"] == {"a": "superseded_retry"}
    assert result.diagnostics["verified_parents"] == 1
    attributed = built(named(TWINS, {"child": "b"}), terminal_call_id="child")
    assert attributed.reasons == []
    assert paths(attributed) == {"main": ["b", "child"]}


def test_a_named_parent_wins_over_a_longer_match() -> None:
    notation = "a:[1]->[2] b:[1,2]->[3] c:[1,2,3]->[4]"
    assert paths(built(named(notation, {}))) == {"main": ["a", "b", "c"]}
    result = built(named(notation, {"c": "a"}))
    assert paths(result) == {"main": ["a", "b"], "branch-0": ["a", "c"]}
    assert result.reasons == [Reason.MULTIPLE_CHAINS]


def test_a_named_parent_that_is_no_prefix_makes_a_root() -> None:
    """The template re-rendered the history; what happens to be a prefix is not what the producer meant."""
    result = built(named("a:[1]->[2] b:[1,2,3]->[4] c:[1,2,9,9]->[5]", {"b": "a", "c": "b"}))
    assert result.reasons == [Reason.MULTIPLE_ROOTS, Reason.MULTIPLE_CHAINS]
    assert result.diagnostics["parent_mismatch"] == 1
    assert paths(result) == {"main": ["a", "b"], "branch-0": ["c"]}


@pytest.mark.parametrize("parent", ["gone", "empty", ""])
def test_a_parent_without_tokens_is_recovered_by_the_prefix(parent: str) -> None:
    result = built(named("a:[1]->[2] empty:[1,2]->[] b:[1,2,3]->[4]", {"b": parent}))
    assert result.reasons == []
    assert paths(result) == {"main": ["a", "b"]}
    assert result.diagnostics["parent_recovered"] == 1


def test_a_recovered_parent_can_be_ambiguous() -> None:
    result = built(named(TWINS, {"child": "gone"}))
    assert Reason.NO_SAFE_CHAIN in result.reasons


def test_a_call_cannot_name_itself() -> None:
    result = built(named("a:[1]->[2] b:[1,2,3]->[4]", {"b": "b"}))
    assert result.diagnostics["parent_mismatch"] == 1


def test_a_continued_retry_stays_as_a_side_chain() -> None:
    """Both were continued, one of them by evidence: neither is lost, and without a terminal nothing says which counts."""
    entries = named("a:[1]->[2] b:[1]->[3] c:[1,2,4]->[5] d:[1,3,4]->[6]", {"c": "a"})
    result = built(entries)
    assert result.reasons == [Reason.MULTIPLE_ROOTS, Reason.MULTIPLE_CHAINS]
    attributed = built(entries, terminal_call_id="d")
    assert attributed.reasons == []
    assert paths(attributed) == {"main": ["b", "d"], "branch-0": ["a", "c"]}


@pytest.mark.parametrize("kept", ["a", "b"])
@pytest.mark.parametrize("by", ["terminal_call_id", "terminal_response_id"])
def test_the_terminal_settles_a_retry_of_the_last_call(kept: str, by: str) -> None:
    entries = [call.model_copy(update={"response_id": f"resp-{call.model_call_id}"}) for call in calls(RETRY)]
    result = built(entries, **{by: kept if by == "terminal_call_id" else f"resp-{kept}"})
    assert result.reasons == []
    assert result.unresolved_retries == []
    assert paths(result) == {"main": ["root", kept]}


def test_the_terminal_chooses_among_roots() -> None:
    assert built(calls(SIDE)).reasons == [Reason.MULTIPLE_ROOTS, Reason.MULTIPLE_CHAINS]
    result = built(calls(SIDE), terminal_call_id="task")
    assert result.reasons == []
    assert paths(result) == {"main": ["task"], "branch-0": ["side"]}


def test_what_follows_the_terminal_is_set_aside() -> None:
    notation = "a:[1]->[2] b:[1,2,3]->[4] x:[1,2,3,4,5]->[6] y:[1,2,3,4,5]->[7] z:[1,2,3,4,5,6,8]->[9]"
    for delivery in ("single_response", ALL_TRACES):
        result = built(calls(notation), delivery, terminal_call_id="b")
        assert result.reasons == []
        assert paths(result) == {"main": ["a", "b"]}
        assert result.diagnostics["not_delivered"] == {"after_terminal": {"calls": 3, "tokens": 3}}
        assert (result.metrics["roots"], result.metrics["chains"]) == (1, 1)


def test_unresolved_groups_off_the_path_mask_only_all_traces() -> None:
    notation = "s:[90]->[91] p:[90,91,1]->[2] q:[90,91,1]->[3] task:[1,2]->[3]"
    result = built(calls(notation), terminal_call_id="task")
    assert result.reasons == []
    assert result.unresolved_retries == ["p", "q"]
    assert result.diagnostics["reasons_as"] == {"all_traces": ["unresolved_retry"]}
    assert built(calls(notation), ALL_TRACES, terminal_call_id="task").reasons == [Reason.UNRESOLVED_RETRY]


def test_an_ambiguous_terminal_leaves_no_safe_chain() -> None:
    result = built(calls(TWINS), terminal_call_id="child")
    assert result.reasons == [Reason.NO_SAFE_CHAIN]
    assert result.error is not None
    assert "main" not in paths(result)


def test_a_terminal_below_an_ambiguous_call_leaves_no_safe_chain() -> None:
    result = built(calls(TWINS + " last:[1,2,7,8,9,20,3]->[4]"), terminal_call_id="last")
    assert result.reasons == [Reason.NO_SAFE_CHAIN]


def test_an_empty_terminal_ends_with_what_it_continues() -> None:
    result = built(calls("a:[1]->[2] b:[1,2,3]->[4] t:[1,2,3,4,5]->[]"), terminal_call_id="t")
    assert result.reasons == []
    assert paths(result) == {"main": ["a", "b"]}
    assert result.diagnostics["terminal"] == {
        "attribution": "recorded",
        "calls": ["t"],
        "chain_ends_with": "b",
    }
    assert "not_delivered" in result.diagnostics


def test_an_empty_terminal_that_continues_nothing_has_nothing_to_train_on() -> None:
    result = built(calls("a:[1]->[2] t:[5]->[]"), terminal_call_id="t")
    assert result.reasons == [Reason.NO_TRAINABLE_TOKENS]
    assert built(calls("a:[1]->[2] t:[5]->[]"), ALL_TRACES, terminal_call_id="t").reasons == []


def test_an_empty_terminal_behind_equal_calls_leaves_no_safe_chain() -> None:
    result = built(calls("a:[1]->[2] b:[1]->[2] t:[1,2,3]->[]"), terminal_call_id="t")
    assert result.reasons == [Reason.NO_SAFE_CHAIN]


@pytest.mark.parametrize("delivery", ["single_response", ALL_TRACES])
@pytest.mark.parametrize("closing", [{"terminal_call_id": "lost"}, {"terminal_response_id": "lost"}])
def test_an_unrecorded_terminal_was_lost(delivery: str, closing: dict[str, str]) -> None:
    result = built(calls("a:[1]->[2] b:[1,2,3]->[4]"), delivery, **closing)
    assert result.reasons == [Reason.CAPTURE_INCOMPLETE]
    assert result.metrics["capture_incomplete"] is True
    assert result.diagnostics["terminal"] == {"attribution": "unrecorded"}
    assert paths(result) == {"main": ["a", "b"]}


def test_without_any_call_the_terminal_says_nothing_more() -> None:
    assert built([], terminal_call_id="t").reasons == [Reason.NO_RECORDS]


def test_a_response_id_of_several_calls_is_ambiguous() -> None:
    entries = [call.model_copy(update={"response_id": "same"}) for call in calls("a:[1]->[2] b:[1,2,3]->[4]")]
    result = built(entries, terminal_response_id="same")
    assert result.reasons == [Reason.NO_SAFE_CHAIN]
    assert result.diagnostics["terminal"] == {"attribution": "ambiguous_response_id", "calls": ["a", "b"]}
    assert built(entries, ALL_TRACES, terminal_response_id="same").reasons == []
    assert built(entries, terminal_call_id="b", terminal_response_id="same").reasons == []


def test_a_call_id_and_a_response_id_must_agree() -> None:
    entries = [call.model_copy(update={"response_id": call.model_call_id}) for call in calls("a:[1]->[2]")]
    result = built(entries, terminal_call_id="a", terminal_response_id="other")
    assert result.reasons == [Reason.NO_SAFE_CHAIN]
    assert result.diagnostics["terminal"]["attribution"] == "contradicted"


def test_a_terminal_whose_prompt_cannot_be_told_leaves_no_safe_chain() -> None:
    a, b = calls("a:[1]->[2] b:[1,2,3]->[4]")
    result = built([a, referring(b, a, call_id="gone")], terminal_call_id="b")
    assert result.reasons == [Reason.PREFIX_UNRESOLVED, Reason.NO_SAFE_CHAIN]


def test_an_unrelated_root_beside_a_chain() -> None:
    notation = "a:[1,2]->[3,4] b:[1,2,3,4,5]->[6] other:[70,71]->[72]"
    assert built(calls(notation)).reasons == [Reason.MULTIPLE_ROOTS, Reason.MULTIPLE_CHAINS]
    assert built(calls(notation), ALL_TRACES).reasons == []
    assert built(calls(notation), terminal_call_id="b").reasons == []


@pytest.mark.parametrize("delivery", ["single_response", ALL_TRACES])
def test_more_calls_than_the_rollout_says_it_made(delivery: str) -> None:
    result = built(calls("a:[1]->[2] b:[1,2,3]->[4] c:[1,2,3,4,5]->[6]"), delivery, n_calls=2)
    assert result.reasons == [Reason.CALL_COUNT_MISMATCH]


def test_a_subagent_whose_calls_interleave_with_its_parents() -> None:
    notation = "p1:[1]->[2] s1:[50]->[51] p2:[1,2,3]->[4] s2:[50,51,52]->[53] p3:[1,2,3,4,5]->[6]"
    every = built(calls(notation), ALL_TRACES)
    assert every.reasons == []
    assert paths(every) == {"main": ["p1", "p2", "p3"], "branch-0": ["s1", "s2"]}
    assert paths(built(calls(notation), terminal_call_id="p3"))["main"] == ["p1", "p2", "p3"]


def test_an_orchestrator_that_hands_over_and_continues() -> None:
    """It plans, hands a part over to workers with prompts of their own, and goes on with what they found."""
    notation = "plan:[1]->[2] w1:[60]->[61] w2:[80]->[81] w1b:[60,61,62]->[63] join:[1,2,61,81]->[4] end:[1,2,61,81,4,5]->[6]"
    result = built(calls(notation), terminal_call_id="end")
    assert result.reasons == []
    assert paths(result) == {
        "main": ["plan", "join", "end"],
        "branch-0": ["w2"],
        "branch-1": ["w1", "w1b"],
    }


def test_a_thousand_turns_with_a_compaction_every_fifty() -> None:
    written = []
    history: list[int] = []
    for turn in range(1_000):
        if turn % 50 == 0:
            history = [100_000 + turn]  # the summary
        written.append(f"c{turn}:{history}->{[turn]}".replace(" ", ""))
        history = [*history, turn, 50_000 + turn]
    entries = calls(" ".join(written))
    every = built(entries, ALL_TRACES)
    assert every.reasons == []
    assert len(every.traces) == 20
    assert every.diagnostics["tokens"] == {"captured": 1_000, "delivered": 1_000}
    assert every.diagnostics["merge_ratio"] == 50.0
    single = built(entries, terminal_call_id="c999")
    assert single.reasons == []
    assert paths(single)["main"] == [f"c{turn}" for turn in range(950, 1_000)]


KILLED = "a:[1]->[2] b:[1,2,3]->[4] side:[70]->[71]"
PARENTS = {"b": "a"}


def lossy(entries: list[TokenEntry], *, n_calls: int | None = None, **log: Any) -> Result:
    """Of a rollout that ended with b, built by a worker that keeps attributed chains."""
    closing = complete("r", terminal_call_id="b", n_calls=n_calls)
    return build_result(frozen(entries, closing, **log), leniency=Leniency(keep_attributed=True))


@pytest.mark.parametrize(
    "log",
    [
        {"intents": frozenset({"lost"})},
        {"marks": frozenset({("lost", "killed")})},
        {"marks": frozenset({("side", "cut off")})},
        {"intents": frozenset({"lost", "lost2"}), "n_calls": 5},
    ],
)
def test_a_proved_chain_outlives_lost_calls_beside_it(log: dict[str, Any]) -> None:
    result = lossy(named(KILLED, PARENTS), **log)
    assert result.reasons == []
    assert result.diagnostics["tolerated_losses"]
    assert result.metrics["capture_incomplete"] is True
    assert result.diagnostics["reasons_as"][ALL_TRACES]


@pytest.mark.parametrize(
    ("parents", "log"),
    [
        ({}, {"intents": frozenset({"lost"})}),
        ({"b": "lost"}, {"intents": frozenset({"lost"})}),
        ({"b": "a", "a": "lost"}, {"intents": frozenset({"lost"})}),
        (PARENTS, {"marks": frozenset({("", "unknown")})}),
        (PARENTS, {"marks": frozenset({("a", "cut off")})}),
        (PARENTS, {"intents": frozenset({"lost"}), "n_calls": 5}),
        (PARENTS, {"n_calls": 4}),
        (PARENTS, {"faults": frozenset({Reason.CAPTURE_INCOMPLETE})}),
        (PARENTS, {"faults": frozenset({Reason.UNDECODABLE_RECORD}), "intents": frozenset({"lost"})}),
    ],
)
def test_without_the_whole_proof_a_lost_call_masks(parents: dict[str, str], log: dict[str, Any]) -> None:
    assert lossy(named(KILLED, parents), **log).mask_sample


def test_a_chain_of_one_call_needs_a_rollout_that_names_parents() -> None:
    log: dict[str, Any] = {"intents": frozenset({"lost"})}
    assert lossy(calls("b:[1,2,3]->[4] side:[70]->[71]"), **log).mask_sample
    entries = named("b:[1,2,3]->[4] s:[70]->[71] s2:[70,71,72]->[73]", {"s2": "s"})
    assert not lossy(entries, **log).mask_sample


def test_a_producer_that_is_silent_about_some_parents_proves_nothing() -> None:
    entries = named("a:[1]->[2] b:[1,2,3]->[4] s:[70]->[71] s2:[70,71,72]->[73]", {"b": "a"})
    assert lossy(entries, intents=frozenset({"lost"})).mask_sample


def test_losses_mask_where_nothing_else_was_asked_for() -> None:
    log = frozen(named(KILLED, PARENTS), complete("r", terminal_call_id="b"), intents=frozenset({"lost"}))
    assert build_result(log).reasons == [Reason.DANGLING_INTENT]
