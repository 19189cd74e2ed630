"""Reasons, what is handed through, and builds that fail."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from freezepoint.core.build import ALL_TRACES, build_result
from freezepoint.core.builder import BUILDERS
from freezepoint.core.choices import BUILDER_NAMES
from freezepoint.core.prefixes import Node, Run
from freezepoint.core.projection import response_form
from freezepoint_schemas.codec import encode_result
from freezepoint_schemas.events import RolloutCancelled, RolloutComplete
from freezepoint_schemas.reasons import Reason
from tests.events import cancelled, clear, complete, entry
from tests.frozen_logs import calls, cumulative, digest, frozen

CHAIN = "a:[1,2]->[3] b:[1,2,3,4]->[5]"


def test_the_result_names_its_snapshot() -> None:
    result = build_result(frozen(calls(CHAIN), partition=4, first_offset=10, freeze_offset=12))
    assert (result.snapshot.partition, result.snapshot.first_offset, result.snapshot.freeze_offset) == (
        4,
        10,
        12,
    )
    assert result.snapshot.version == 3
    assert result.traces[0].trace_id == f"{result.snapshot.id}:main"
    assert result.error is None


@pytest.mark.parametrize(
    ("closing", "model"),
    [
        (complete("r", model="given"), "given"),
        (complete("r", model=""), ""),
        (complete("r"), "second"),
        (cancelled("r"), "second"),
    ],
)
def test_the_model_is_the_given_or_the_first_named(
    closing: RolloutComplete | RolloutCancelled, model: str
) -> None:
    a, b = calls(CHAIN)
    entries = [a, b.model_copy(update={"model": "second"})]
    assert build_result(frozen(entries, closing)).model == model


def test_a_cancelled_rollout_is_built_and_masked() -> None:
    result = build_result(frozen(calls(CHAIN), cancelled("r", group_id="g", group_size=8)))
    assert result.reasons == [Reason.ROLLOUT_CANCELLED]
    assert (result.group_id, result.group_size) == ("g", 8)
    assert response_form(result)["rebuilt_response"] is not None


def test_the_complete_event_is_handed_through() -> None:
    closing = complete("r", reward={"a": 1.0}, group_id="g", group_size=2, metadata={"task": 1})
    dispatch = clear("r", group_id="other", group_size=3, metadata="other")
    result = build_result(frozen(calls(CHAIN), closing, dispatch=dispatch))
    assert (result.reward, result.group_id, result.group_size) == ({"a": 1.0}, "g", 2)
    assert result.metadata == {"task": 1}


def test_the_dispatch_speaks_where_the_end_does_not() -> None:
    dispatch = clear("r", group_id="g", group_size=3, metadata="m")
    for closing in (complete("r"), cancelled("r")):
        result = build_result(frozen(calls(CHAIN), closing, dispatch=dispatch))
        assert (result.group_id, result.group_size, result.metadata, result.reward) == ("g", 3, "m", None)


@pytest.mark.parametrize(
    ("closing", "name"),
    [(complete("r", builder="wishful"), "wishful"), (complete("r", delivery="by_post"), "by_post")],
)
def test_unknown_names_mask(closing: RolloutComplete, name: str) -> None:
    result = build_result(frozen(calls(CHAIN), closing, marks=frozenset({("", "lost")})))
    assert result.reasons == [Reason.CAPTURE_INCOMPLETE, Reason.BUILDER_FAILED]
    assert result.traces == []
    assert result.error is not None
    assert name in result.error
    assert name in (result.builder, result.delivery)
    assert result.metrics == {"n_calls": 2, "capture_incomplete": True}


def test_every_builder_can_be_chosen_by_its_name() -> None:
    assert tuple(BUILDERS) == BUILDER_NAMES


def _raising(error: BaseException) -> Any:
    def broken(_: Any, __: Any) -> Any:
        raise error

    return broken


def test_a_build_that_raises_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILDERS, "broken", _raising(RuntimeError("first line\nsecond line")))
    result = build_result(frozen(calls(CHAIN)), builder="broken")
    assert result.reasons == [Reason.BUILDER_FAILED]
    assert result.error == "The build failed: RuntimeError: first line"
    assert result.metrics == {"n_calls": 2}
    assert result.snapshot.id == build_result(frozen(calls(CHAIN))).snapshot.id
    assert response_form(result)["rebuilt_response"] is None


def test_a_snapshot_that_raises_masks() -> None:
    (call,) = calls("a:[1]->[2]")
    unreadable = call.model_copy(update={"output_items": [{"x": object()}]})
    result = build_result(frozen([unreadable], faults=frozenset({Reason.INVALID_ENTRY})))
    assert result.reasons == [Reason.INVALID_ENTRY, Reason.BUILDER_FAILED]
    assert result.metrics == {"n_calls": 1, "capture_incomplete": True}
    assert encode_result(result)


def test_memory_that_runs_out_is_not_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILDERS, "broken", _raising(MemoryError()))
    with pytest.raises(MemoryError):
        build_result(frozen(calls(CHAIN)), builder="broken")


@pytest.mark.parametrize("delivery", ["single_response", ALL_TRACES])
@pytest.mark.parametrize("fault", [Reason.CONFLICTING_ENTRY, Reason.FOREIGN_RECORD, Reason.ROLLOUT_TIMEOUT])
def test_faults_of_the_log_mask_every_delivery(delivery: str, fault: Reason) -> None:
    result = build_result(frozen(calls(CHAIN), faults=frozenset({fault})), delivery=delivery)
    assert result.reasons == [fault]
    assert [trace.role for trace in result.traces] == ["main"]


@pytest.mark.parametrize(
    ("fields", "incomplete"),
    [
        ({"marks": frozenset({("x", "lost")})}, True),
        ({"intents": frozenset({"x"})}, True),
        ({"faults": frozenset({Reason.UNDECODABLE_RECORD})}, True),
        ({"faults": frozenset({Reason.CONFLICTING_ENTRY})}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("notation", [CHAIN, "a:[1]->[]"])
def test_metrics_say_that_something_was_lost(fields: dict[str, Any], incomplete: bool, notation: str) -> None:
    result = build_result(frozen(calls(notation), **fields))
    assert result.metrics.get("capture_incomplete", False) is incomplete


FORKS = "a:[1,2]->[3] b:[1,2,3,4]->[5] c:[1,2,3,6]->[7,8]"


@pytest.mark.parametrize(
    ("tokens_max", "roles"),
    [
        (5 + 200 + 6 + 200, ["main", "branch-0"]),
        (5 + 200 + 6 + 199, ["main"]),
        (5 + 200, ["main"]),
        (204, []),
    ],
)
def test_a_result_larger_than_the_limit_keeps_its_main_trace(tokens_max: int, roles: list[str]) -> None:
    result = build_result(frozen(calls(FORKS)), delivery=ALL_TRACES, trace_tokens_max=tokens_max)
    assert [trace.role for trace in result.traces] == roles
    assert result.reasons == ([] if len(roles) == 2 else [Reason.ROLLOUT_TOO_LARGE])
    assert result.diagnostics.get("traces_left_out", 0) == 2 - len(roles)
    assert result.metrics["n_calls"] == 3
    assert "capture_incomplete" not in result.metrics


def test_many_side_calls_on_a_long_stem_are_bounded() -> None:
    """A stem by reference costs little to send and its square to deliver with every side call's trace."""
    entries = [entry("r", "s0", range(1_000), [7])]
    stem = cumulative(entries[0])
    for turn in range(1, 60):
        reference = {"call_id": f"s{turn - 1}", "length": len(stem), "digest": digest(stem)}
        following = range(turn, turn + 1_000)
        entries.append(entry("r", f"s{turn}", following, [7], prompt_prefix=reference))
        entries.append(entry("r", f"x{turn}", [1_000_000], [9], prompt_prefix=reference))
        stem += [*following, 7]
    whole = build_result(frozen(entries), delivery=ALL_TRACES)
    assert whole.traces[-1].token_ids.size == len(stem)
    assert sum(trace.token_ids.size for trace in whole.traces) > 25 * len(stem)
    bounded = build_result(frozen(entries), delivery=ALL_TRACES, trace_tokens_max=10 * len(stem))
    assert bounded.reasons == [Reason.ROLLOUT_TOO_LARGE]
    assert [trace.role for trace in bounded.traces] == ["main"]


def test_unresolved_retries_mask_all_traces() -> None:
    result = build_result(frozen(calls("a:[1]->[2] b:[1]->[3]")), delivery=ALL_TRACES)
    assert result.reasons == [Reason.UNRESOLVED_RETRY]


@pytest.mark.parametrize("builder", ["prefix_merging", "per_request", "no such builder"])
def test_a_build_leaves_nothing_for_the_collector(builder: str) -> None:
    """In a worker it leaves alone what lives for long, and a build may."""
    gc.collect()
    gc.disable()
    try:
        build_result(
            frozen(calls("a:[1,2]->[3] b:[1,2,3,4]->[5] c:[1,2,3]->[6] d:[1]->[2]")), builder=builder
        )
        left = [item for item in gc.get_objects() if isinstance(item, (Node, Run))]
    finally:
        gc.enable()
    assert not left
