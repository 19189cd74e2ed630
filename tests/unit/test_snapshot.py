"""What a frozen log holds: references good and bad, forms that agree or not, identity."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest

from freezepoint.core.build import build_result
from freezepoint.core.frozen import FrozenLog
from freezepoint.core.snapshot import Snapshot, body_digest, payload_digest, prompt_form, take_snapshot
from freezepoint_schemas.codec import encode_result
from freezepoint_schemas.events import TokenEntry
from freezepoint_schemas.reasons import NotDelivered, Reason
from tests.events import cancelled, complete
from tests.frozen_logs import calls, frozen, recoded, referring

CHAIN = "a:[1,2]->[3] b:[1,2,3,4]->[5] c:[1,2,3,4,5,6]->[7]"
NOWHERE = "0" * 32


def snapshot(*entries: TokenEntry, **fields: Any) -> Snapshot:
    return take_snapshot(frozen(entries, **fields))


def prompts(taken: Snapshot) -> dict[str, list[int]]:
    return {call.call_id: taken.tree.tokens(call.prompt_node).tolist() for call in taken.calls}


def set_aside(taken: Snapshot) -> dict[str, NotDelivered]:
    return {entry.model_call_id: reason for entry, reason in taken.set_aside}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_reference_may_precede_the_call_it_names(order: tuple[int, ...]) -> None:
    a, b, c = calls(CHAIN)
    written = [a, referring(b, a), referring(c, b)]
    taken = snapshot(*(written[position] for position in order))
    assert prompts(taken) == {"a": [1, 2], "b": [1, 2, 3, 4], "c": [1, 2, 3, 4, 5, 6]}
    assert taken.faults == frozenset()
    assert taken.id == snapshot(a, b, c).id


@pytest.mark.parametrize("length", range(7))
def test_a_reference_may_end_anywhere(length: int) -> None:
    a, b, c = calls("a:[1,2]->[3] b:[1,2,3,4]->[5] c:[1,2,3,4,5,6]->[7]")
    other = c.model_copy(update={"model_call_id": "d"})
    taken = snapshot(a, referring(b, a), referring(c, b), referring(other, c, length))
    assert taken.faults == frozenset()
    assert prompts(taken)["d"] == [1, 2, 3, 4, 5, 6]


def test_calls_say_their_lengths() -> None:
    (call,) = snapshot(*calls("a:[1,2,3]->[4,5]")).calls
    assert (call.prompt_length, call.cumulative_length, call.generated) == (3, 5, 2)


def test_an_absent_target_sets_aside_what_depends_on_it() -> None:
    a, b, c = calls(CHAIN)
    taken = snapshot(a, referring(b, a, call_id="gone"), referring(c, b))
    assert set_aside(taken) == {"b": NotDelivered.PREFIX_UNRESOLVED, "c": NotDelivered.PREFIX_UNRESOLVED}
    assert taken.faults == {Reason.PREFIX_UNRESOLVED}
    assert taken.recorded == 3
    result = build_result(frozen([a, referring(b, a, call_id="gone"), referring(c, b)]))
    assert result.mask_sample
    assert result.metrics["n_calls"] == 3
    assert result.metrics["generated_tokens_captured"] == 3
    assert result.diagnostics["unresolved_prefixes"] == ["b", "c"]
    assert result.diagnostics["not_delivered"] == {"prefix_unresolved": {"calls": 2, "tokens": 2}}


def test_more_tokens_than_the_target_has_are_unresolved() -> None:
    a, b, _ = calls(CHAIN)
    taken = snapshot(a, referring(b, a, length=4))
    assert set_aside(taken) == {"b": NotDelivered.PREFIX_UNRESOLVED}


def test_another_digest_is_a_mismatch() -> None:
    a, b, c = calls(CHAIN)
    taken = snapshot(a, referring(b, a, digest=NOWHERE), referring(c, b))
    assert set_aside(taken) == {"b": NotDelivered.PREFIX_MISMATCH, "c": NotDelivered.PREFIX_UNRESOLVED}
    assert taken.faults == {Reason.PREFIX_UNRESOLVED, Reason.PREFIX_MISMATCH}


def test_a_circle_is_unresolved() -> None:
    a, b, c = calls(CHAIN)
    taken = snapshot(a, referring(b, c), referring(c, b))
    assert set_aside(taken) == dict.fromkeys("bc", NotDelivered.PREFIX_UNRESOLVED)
    assert set_aside(snapshot(referring(a, a))) == {"a": NotDelivered.PREFIX_UNRESOLVED}


def test_nothing_left_to_build_is_no_safe_chain() -> None:
    a, b, _ = calls(CHAIN)
    result = build_result(frozen([referring(b, a)]))
    assert result.reasons == [Reason.PREFIX_UNRESOLVED, Reason.NO_SAFE_CHAIN]
    assert result.metrics == {"n_calls": 1}


def test_a_reference_reaches_calls_without_a_generation() -> None:
    a, f, b = calls("a:[1]->[2] f:[1,2,3]->[] b:[1,2,3,4]->[5]")
    taken = snapshot(a, f, referring(b, f))
    assert prompts(taken)["b"] == [1, 2, 3, 4]


def test_the_same_prompt_written_two_ways_is_a_duplicate() -> None:
    a, b, _ = calls(CHAIN)
    whole, short = (
        snapshot(a, b, alternatives=(referring(b, a),)),
        snapshot(a, referring(b, a), alternatives=(b,)),
    )
    assert whole.faults == short.faults == frozenset()
    assert whole.id == short.id == snapshot(a, b).id
    assert whole.version == short.version == snapshot(a, b).version


def test_another_prompt_is_a_conflict() -> None:
    a, b, _ = calls(CHAIN)
    (other,) = calls("b:[1,2,3,9]->[5]", created_at=2.0)
    for kept, repeat in [(b, referring(other, a)), (referring(other, a), b)]:
        taken = snapshot(a, kept, alternatives=(repeat,))
        assert taken.faults == {Reason.CONFLICTING_ENTRY}
        assert len(taken.calls) == 2


def test_resolved_and_unresolvable_is_a_conflict_whichever_came_first() -> None:
    a, b, _ = calls(CHAIN)
    lost = referring(b, a, call_id="gone")
    first, second = snapshot(a, b, alternatives=(lost,)), snapshot(a, lost, alternatives=(b,))
    assert first.faults == second.faults == {Reason.CONFLICTING_ENTRY, Reason.PREFIX_UNRESOLVED}


def test_a_circle_is_broken_by_another_form() -> None:
    a, b, _ = calls(CHAIN)
    in_circle = (referring(a, b), referring(b, a))
    first = snapshot(*in_circle, alternatives=(b,))
    second = snapshot(in_circle[0], b, alternatives=(in_circle[1],))
    assert first.faults == second.faults == frozenset()
    assert first.id == second.id == snapshot(a, b).id


def test_a_call_written_in_too_many_ways_is_a_conflict() -> None:
    (stem,) = calls("a:[1]->[2]")
    (call,) = calls("b:[" + ",".join(["1"] * 40) + "]->[2]")
    stem = stem.model_copy(update={"prompt_token_ids": call.prompt_token_ids})
    forms = tuple(referring(call, stem, length) for length in range(40))
    assert snapshot(stem, call, alternatives=forms[:15] * 3).faults == frozenset()
    assert snapshot(stem, call, alternatives=forms[:16]).faults == {Reason.CONFLICTING_ENTRY}
    assert snapshot(stem, *forms).faults == {Reason.CONFLICTING_ENTRY}


def test_repeated_entries_are_compared_whole() -> None:
    a, b, _ = calls(CHAIN)
    assert snapshot(a, b, a).id == snapshot(a, b).id
    changed = a.model_copy(update={"finish_reason": "length"})
    taken = snapshot(a, b, changed)
    assert taken.faults == {Reason.CONFLICTING_ENTRY}
    assert taken.calls[0].entry is a


def test_same_id_with_another_generation_keeps_the_first() -> None:
    first, second = calls("a:[1,2,3]->[4,5] a:[1,2,3]->[8,9]", created_at=1.0)
    result = build_result(frozen([first, second]))
    assert result.reasons == [Reason.CONFLICTING_ENTRY]
    assert result.traces[0].token_ids.tolist() == [1, 2, 3, 4, 5]
    assert result.metrics["n_calls"] == 1


CHANGES: list[dict[str, Any]] = [
    {"model": "other"},
    {"generation_token_ids": np.array([4], dtype=np.int32)},
    {"generation_log_probs": np.array([-0.5])},
    {"routed_experts": [[[1]], [[2]], [[3]]]},
    {"routed_experts": [[0.5]]},
    {"output_items": [{"type": "message", "content": "b"}]},
    {"output_items": []},
    {"token_item_index": None},
    {"created_at": 1.5},
    {"parent_call_id": "p"},
    {"policy_version": 1},
    {"policy_version": "1"},
    {"finish_reason": "stop"},
    {"response_id": "resp"},
]


def test_every_field_counts() -> None:
    (call,) = calls("a:[1,2]->[3]")
    digests = [body_digest(call), *(body_digest(call.model_copy(update=change)) for change in CHANGES)]
    assert len(set(digests)) == len(CHANGES) + 1
    assert all(prompt_form(call.model_copy(update=change)) == prompt_form(call) for change in CHANGES)


@pytest.mark.parametrize(
    "routes",
    [
        [[[1, 2]], [[3, 4]], [[5, 6]]],
        [[[1, 300]], [[3, 4]], [[5, 6]]],
        [[1, 2], [3]],
        [[0.5, 1.0]],
        [],
        [1, 2, 3],
    ],
)
def test_the_encoding_does_not_count(routes: list[Any]) -> None:
    (call,) = calls("a:[1,2]->[3]", routed_experts=routes)
    assert body_digest(recoded(call, packed=True)) == body_digest(call)
    assert prompt_form(recoded(call, packed=True)) == prompt_form(call)
    if routes and routes != [[1, 2], [3]]:
        for dtype in (
            (np.uint16, np.int32, np.int64) if isinstance(np.ravel(routes)[0], np.integer) else (np.float64,)
        ):
            array = call.model_copy(update={"routed_experts": np.array(routes, dtype=dtype)})
            assert body_digest(array) == body_digest(call)


def test_the_order_of_keys_does_not_count() -> None:
    (call,) = calls("a:[1,2]->[3]", output_items=[{"type": "x", "a": 1}])
    (same,) = calls("a:[1,2]->[3]", output_items=[{"a": 1, "type": "x"}])
    assert body_digest(call) == body_digest(same)


def test_a_prompts_form_counts_its_reference() -> None:
    a, b, _ = calls(CHAIN)
    forms = {prompt_form(b), prompt_form(referring(b, a)), prompt_form(referring(b, a, 2))}
    assert len(forms) == 3
    assert len({body_digest(b), body_digest(referring(b, a))}) == 1


def test_a_payload_digest_needs_the_whole_prompt() -> None:
    a, b, _ = calls(CHAIN)
    taken = snapshot(a, referring(b, a))
    assert payload_digest(referring(b, a), taken.tree.digest(taken.calls[1].prompt_node)) == payload_digest(b)
    with pytest.raises(ValueError, match="resolved"):
        payload_digest(referring(b, a))


def test_what_the_snapshot_id_counts() -> None:
    chain = calls(CHAIN)
    logs: list[FrozenLog] = [
        frozen(chain),
        frozen(chain[:2]),
        frozen(chain, rollout_id="other"),
        frozen(chain, intents=frozenset({"x"})),
        frozen(chain, marks=frozenset({("x", "lost")})),
        frozen(chain, marks=frozenset({("", "lost")})),
        frozen(chain, faults=frozenset({Reason.INVALID_ENTRY})),
        frozen([*chain[:2], chain[2].model_copy(update={"policy_version": 2})]),
        frozen([*chain[:2], referring(chain[2], chain[1], digest=NOWHERE)]),
    ]
    assert len({take_snapshot(log).id for log in logs}) == len(logs)


def test_what_the_snapshot_id_does_not_count() -> None:
    chain = calls(CHAIN)
    logs = [
        frozen(chain),
        frozen(reversed(chain), complete("r", reward=1.0, n_calls=3)),
        frozen(chain, cancelled("r"), partition=3, freeze_offset=7),
        frozen(chain, intents=frozenset({"a", "x"}), cancelled=frozenset({"x"})),
    ]
    assert len({take_snapshot(log).id for log in logs}) == 1


def test_the_version_counts_distinct_facts() -> None:
    taken = snapshot(
        *calls(CHAIN),
        intents=frozenset({"a", "x", "y"}),
        cancelled=frozenset({"x"}),
        marks=frozenset({("z", "lost")}),
        faults=frozenset({Reason.INVALID_ENTRY}),
    )
    assert taken.version == 3 + 3 + 1 + 1 + 1 + 1
    assert taken.dangling == ("y",)
    assert taken.faults == {Reason.DANGLING_INTENT, Reason.CAPTURE_INCOMPLETE, Reason.INVALID_ENTRY}


@pytest.mark.parametrize(
    ("fields", "faults"),
    [
        ({}, {Reason.NO_RECORDS}),
        ({"closing": complete("r", n_calls=0)}, {Reason.NO_RECORDS}),
        ({"closing": complete("r", n_calls=2)}, {Reason.NO_RECORDS, Reason.CALL_COUNT_MISMATCH}),
        ({"intents": frozenset({"x"}), "cancelled": frozenset({"x"})}, {Reason.NO_RECORDS}),
        ({"intents": frozenset({"x"})}, {Reason.DANGLING_INTENT}),
        ({"marks": frozenset({("", "lost")})}, {Reason.CAPTURE_INCOMPLETE}),
        ({"faults": frozenset({Reason.ROLLOUT_TOO_LARGE})}, {Reason.ROLLOUT_TOO_LARGE}),
    ],
)
def test_a_log_without_calls(fields: dict[str, Any], faults: set[Reason]) -> None:
    assert snapshot(**fields).faults == faults
    result = build_result(frozen([], **fields))
    assert set(result.reasons) == faults
    assert result.error
    assert result.metrics["n_calls"] == 0


def test_the_announced_number_of_calls_is_of_distinct_calls() -> None:
    a, b, c = calls(CHAIN)
    assert (
        snapshot(a, b, c, alternatives=(referring(b, a),), closing=complete("r", n_calls=3)).faults == set()
    )
    assert snapshot(a, b, closing=complete("r", n_calls=3)).faults == {Reason.CALL_COUNT_MISMATCH}


def test_equal_logs_are_equal_bytes() -> None:
    chain = calls(CHAIN, routed_experts=None)
    results = [build_result(frozen(order)) for order in permutations(chain)]
    assert len({encode_result(result) for result in results}) == 1
