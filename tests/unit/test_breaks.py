"""Where a conversation broke, and the guess why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from freezepoint.core.breaks import BREAKS_MAX, Likely, Sides, likely
from freezepoint.core.build import build_result
from freezepoint_schemas.events import TokenEntry
from tests.events import entry
from tests.frozen_logs import calls, frozen

GIVEN = list(range(100, 140))
SAMPLED = list(range(200, 230))
MORE = list(range(300, 320))


def breaks(*entries: TokenEntry) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = build_result(frozen(entries)).diagnostics.get("prefix_breaks", [])
    return found


def first() -> TokenEntry:
    return entry("r", "first", GIVEN, SAMPLED, created_at=1.0)


def second(prompt: list[int], **fields: Any) -> TokenEntry:
    return entry("r", "second", prompt, [9], created_at=2.0, **fields)


@pytest.mark.parametrize(
    ("prompt", "guess"),
    [
        (GIVEN, Likely.SAME_PROMPT),
        (GIVEN[:30], Likely.TRUNCATION),
        ([*GIVEN, *SAMPLED[:10]], Likely.TRUNCATION),
        ([*GIVEN[:5], *GIVEN[20:], *SAMPLED, *MORE], Likely.TRUNCATION),
        ([*GIVEN, *SAMPLED[:4], 7, *SAMPLED[6:], *MORE], Likely.RETOKENIZATION),
        ([*GIVEN, *SAMPLED[:-1], 7, 8, *MORE], Likely.RETOKENIZATION),
        ([*GIVEN, *SAMPLED[12:], *MORE], Likely.TEMPLATE_REWRITE),
        ([*GIVEN[:5], 7, *GIVEN[6:], *SAMPLED, *MORE], Likely.TEMPLATE_REWRITE),
        ([*GIVEN, *SAMPLED[:5], *range(400, 440)], Likely.TEMPLATE_REWRITE),
        ([*GIVEN[:2], *range(400, 440)], Likely.UNRELATED),
        (list(range(400, 440)), Likely.UNRELATED),
        ([*GIVEN[:20], *range(400, 440)], Likely.UNKNOWN),
    ],
)
def test_what_likely_happened(prompt: list[int], guess: Likely) -> None:
    [found] = breaks(first(), second(prompt))
    assert found["likely"] == guess
    assert (found["call_id"], found["earlier_call_id"]) == ("second", "first")
    assert not found["named_parent"]


def test_a_break_says_where_and_with_which_tokens() -> None:
    [found] = breaks(first(), second([*GIVEN, *SAMPLED[:4], 7, *SAMPLED[6:], *MORE]))
    assert found["position"] == 44
    assert found["before"] == [138, 139, 200, 201, 202, 203]
    assert found["earlier_ids"] == [204, 205, 206, 207, 208, 209]
    assert found["prompt_ids"] == [7, 206, 207, 208, 209, 210]


def test_the_best_match_is_shown_whoever_came_first() -> None:
    near = entry("r", "near", [*GIVEN, *SAMPLED, 1], [2], created_at=1.5)
    found = breaks(entry("r", "far", [1, 2], [3], created_at=0.5), first(), near, second([*GIVEN, 7]))
    assert [(part["call_id"], part["earlier_call_id"]) for part in found] == [
        ("first", "far"),
        ("second", "first"),
    ]


def test_a_named_parent_is_what_a_mismatch_is_compared_with() -> None:
    other = entry("r", "other", [*GIVEN, *SAMPLED, 1], [2], created_at=1.5)
    [found] = breaks(first(), other, second([*GIVEN, *SAMPLED[:10], 7], parent_call_id="first"))
    assert found["named_parent"]
    assert found["earlier_call_id"] == "first"
    assert found["position"] == 50


def test_the_drift_of_one_token() -> None:
    [found] = breaks(*calls("a:[1]->[10,11,12] b:[1,10,11,99,5]->[6]"))
    assert (found["position"], found["likely"]) == (3, Likely.RETOKENIZATION)


def test_one_conversation_has_no_break() -> None:
    assert breaks(*calls("a:[1]->[2] b:[1,2,3]->[4] c:[1,2,9]->[5]")) == []


def test_a_drift_in_a_later_turn_looks_like_a_fork() -> None:
    follow = entry("r", "follow", [*GIVEN, *SAMPLED, *MORE], list(range(500, 530)), created_at=2.0)
    drifted = [*GIVEN, *SAMPLED, *MORE, *range(500, 520), 7, *range(522, 530), *range(600, 620)]
    third = entry("r", "third", drifted, [9], created_at=3.0)
    [found] = breaks(first(), follow, third)
    assert (found["call_id"], found["earlier_call_id"], found["position"]) == ("third", "follow", 110)
    assert found["likely"] == Likely.RETOKENIZATION


def test_a_retry_and_a_fork_behind_a_whole_turn_are_no_breaks() -> None:
    notation = (
        "a:[1]->[2,3] b:[1,2,3,4]->[5] retry:[1,2,3,4]->[6] fork:[1,2,3,7]->[8] next:[1,2,3,4,5,9]->[10]"
    )
    assert breaks(*calls(notation)) == []


def test_only_the_first_breaks_are_looked_at() -> None:
    entries = [entry("r", f"c{n}", [n], [50], created_at=float(n)) for n in range(BREAKS_MAX + 5)]
    assert len(breaks(*entries)) == BREAKS_MAX


def test_a_repetitive_history_is_searched_in_bounds() -> None:
    same = np.zeros(200_000, dtype=np.int32)
    prompt = np.concatenate([same[:1000], np.ones(1, np.int32), same[:50]])
    assert likely(Sides(same, prompt, 100, 1000)) in Likely
