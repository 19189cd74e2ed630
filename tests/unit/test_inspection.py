"""One rollout explained, as data, as text and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from freezepoint.core.frozen import FrozenLog
from freezepoint.inspection import Found, Life, LifeState, as_page, as_text, explain, find_in_files
from freezepoint.inspection.advice import ASIDE, MEANINGS
from freezepoint.inspection.explain import Explanation
from freezepoint.lines import sources
from freezepoint.settings import WorkerSettings
from freezepoint.transport.ports import Retention
from freezepoint_schemas import codec
from freezepoint_schemas.events import InputEvent
from freezepoint_schemas.reasons import NotDelivered, Reason
from tests.events import complete, entry
from tests.frozen_logs import calls, frozen

FORK = "m:[1,2]->[3] x:[1,2,3,4]->[5] y:[1,2,3,9]->[6]"
RETRY = "root:[1,2]->[3] a:[1,2,3,4]->[5] b:[1,2,3,4]->[9]"


MOMENT_MS = 1_750_000_000_000


def explained(log: FrozenLog, state: LifeState = LifeState.FROZEN, **found: Any) -> Explanation:
    life = Life(log, state, first_ms=MOMENT_MS, notes=["offset 3: bad"])
    return explain(Found(life, **found), WorkerSettings())


def test_every_reason_has_a_meaning() -> None:
    assert set(MEANINGS) == set(Reason)
    assert set(ASIDE) == set(NotDelivered)


def test_the_facts_are_json_and_say_where_each_call_went() -> None:
    notation = (
        "root:[1]->[2] kept:[1,2,3]->[4] drop:[1,2,3]->[5] next:[1,2,3,4,6]->[7] other:[8]->[9] none:[1]->[]"
    )
    facts = orjson.loads(orjson.dumps(explained(frozen(calls(notation))).facts))
    went = {call["call_id"]: call["trace"] or call["set_aside"] for call in facts["calls"]}
    assert went == {
        "root": "main",
        "kept": "main",
        "drop": "superseded_retry",
        "next": "main",
        "other": "branch-0",
        "none": "empty_generation",
    }
    assert [call["call_id"] for call in facts["calls"]] == ["root", "kept", "drop", "next", "other", "none"]
    assert [(trace["role"], trace["weight"]) for trace in facts["traces"]] == [
        ("main", 0.75),
        ("branch-0", 0.25),
    ]


def test_what_would_unmask_is_tried() -> None:
    ways = explained(frozen(calls(FORK))).facts["unmasked_by"]
    assert [way.split(" in ")[0] for way in ways] == [
        "reading it as all_traces: every trace is trained, each token once",
        "terminal_call_id x",
        "terminal_call_id y",
    ]
    assert len(explained(frozen(calls(RETRY))).facts["unmasked_by"]) == 2
    assert explained(frozen(calls("a:[1]->[2]"))).facts["unmasked_by"] == []
    lost = frozen(calls("a:[1]->[2]"), intents=frozenset({"lost"}))
    assert explained(lost).facts["unmasked_by"] == []
    counted = frozen(calls("a:[1]->[2]"), complete("r", n_calls=3))
    assert explained(counted).facts["unmasked_by"] == [
        "n_calls 1 in the complete event, if that is how many calls were made"
    ]


CONTINUED = f"{RETRY} next:[1,2,3,4,9,8]->[7]"


@pytest.mark.parametrize(
    ("notation", "terminal", "aside", "why"),
    [
        (CONTINUED, None, "a", "its sibling b was gone on from, and it by no call that counts"),
        (RETRY, "b", "a", "its sibling b is the call that the rollout ended with"),
        (CONTINUED, "b", "a", "its sibling b is the call that the rollout ended with"),
        (CONTINUED, "next", "a", "its sibling b was gone on from, and it by no call that counts"),
        (RETRY, None, "b", "neither it nor any sibling was gone on from"),
        ("a:[1]->[2] b:[1]->[3] task:[5]->[6]", "task", "b", "neither it nor any sibling was gone on from"),
    ],
)
def test_a_retry_is_set_aside_for_what_holds(
    notation: str, terminal: str | None, aside: str, why: str
) -> None:
    log = frozen(calls(notation), complete("r", terminal_call_id=terminal))
    found = {call["call_id"]: call for call in explained(log).facts["calls"] if call["set_aside"]}
    assert found[aside]["set_aside"] == "superseded_retry"
    assert why in found[aside]["why"]


def test_a_proved_chain_names_the_setting_that_keeps_it() -> None:
    a, b = calls("a:[1]->[2] b:[1,2,3]->[4]")
    entries = [a, b.model_copy(update={"parent_call_id": "a"})]
    ways = explained(frozen(entries, intents=frozenset({"lost"}))).facts["unmasked_by"]
    assert ways == [
        "terminal_call_id b in the complete event, if that is the call it ended with, and worker.keep_attributed_chains"
    ]


def test_the_text_says_what_matters() -> None:
    drifted = "a:[1]->[10,11,12] b:[1,10,11,99,5]->[6]"
    text = as_text(explained(frozen(calls(drifted)), LifeState.OPEN, retention=Retention(40_000)).facts)
    for part in (
        "rollout r: MASKED (prefix_merging, single_response)",
        "the topic keeps it until 2025-06-15 15:07:20 UTC at least",
        "still open",
        "multiple_roots: there is not exactly one first call",
        "main: 4 tokens, 3 sampled, weight 0.75",
        "b shares 3 tokens with a: likely retokenization",
        "offset 3: bad",
    ):
        assert part in text, text


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), None),
        (Retention(1_000), "the topic keeps it until 2025-06-15 15:06:41 UTC at least\n"),
        (Retention(1_000, 500), "15:06:41 UTC at least, unless its partition grows beyond 500 bytes\n"),
        (Retention(None, 500), "the topic keeps it until its partition grows beyond 500 bytes\n"),
    ],
)
def test_how_long_the_topic_keeps_it(retention: Retention, kept: str | None) -> None:
    log = frozen(calls(FORK))
    explanation = explained(log, retention=retention)
    text = as_text(explanation.facts)
    assert kept in text if kept else "keeps it" not in text
    data = orjson.loads(as_page(log, explanation).split('id="data">')[1].split("</script>")[0])
    assert (data["kept"] is None) == (kept is None)
    assert (data["kept"] or "") in text


def test_ids_cannot_steer_a_terminal() -> None:
    call = entry("r", "\x1b[2Jevil\nline", [1], [2])
    text = as_text(explained(frozen([call])).facts)
    assert "\\u001b[2Jevil\\u000aline" in text
    assert "\x1b" not in text


def test_a_thousand_turns_are_shortened() -> None:
    history: list[int] = [1]
    entries = []
    for turn in range(1_000):
        entries.append(entry("r", f"c{turn:04}", history, [turn], created_at=float(turn)))
        history = [*history, turn, 7]
    text = as_text(explained(frozen(entries)).facts)
    assert "... 988 more ..." in text
    assert len(text.splitlines()) < 40


def test_a_thousand_traces_are_shortened() -> None:
    forks = [entry("r", f"f{number:04}", [1, 2, 3, number + 10], [5]) for number in range(1_000)]
    text = as_text(explained(frozen([entry("r", "root", [1, 2], [3]), *forks])).facts)
    assert "... 988 more traces ..." in text
    assert "branch-998: " in text
    assert len(text.splitlines()) < 120


def test_nothing_recorded_is_explained_too() -> None:
    text = as_text(explained(frozen([])).facts)
    assert "no_records" in text


def _file(path: Path, *events: InputEvent | bytes) -> str:
    raw = [event if isinstance(event, bytes) else codec.encode_event(event) for event in events]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return str(path)


def test_the_last_life_in_files_is_found(tmp_path: Path) -> None:
    bad = b'{"rollout_id":"a","event":"nonsense"}'
    name = _file(tmp_path / "x", entry("a", "c1", [1], [2]), bad, entry("b", "c1", [1], [2]), complete("a"))
    with sources([name]) as files:
        found = find_in_files(WorkerSettings(), "a", files)
        assert found is not None
        assert (found.log.rollout_id, len(found.log.entries), len(found.life.notes)) == ("a", 1, 1)
        assert find_in_files(WorkerSettings(), "c", files) is None


def test_the_page_holds_no_markup_of_a_producer() -> None:
    evil = "</script><script>alert(1)</script><!--"
    call = entry("r", f"id{evil}", [1], [2], output_items=[{"type": evil, "content": [{"text": evil}]}])
    log = frozen([call], complete("r", group_id=evil))
    written = as_page(log, explained(log))
    assert "alert(1)</script>" not in written
    assert written.count("</script>") == 2
    data = written.split('id="data">')[1].split("</script>")[0]
    assert orjson.loads(data)["items"][0]["items"][0]["text"] == evil


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"type": "message", "content": [{"type": "output_text", "text": "hello"}]}, "hello"),
        ({"type": "reasoning", "summary": [{"text": "because"}]}, "because"),
        ({"type": "function_call", "name": "look", "arguments": '{"a":1}'}, 'look:\n{"a":1}'),
        ({"type": "x", "b": 1}, '{\n  "type": "x",\n  "b": 1\n}'),
    ],
)
def test_items_are_shown_as_text(item: dict[str, Any], text: str) -> None:
    log = frozen([entry("r", "a", [1], [2], output_items=[item])])
    data = as_page(log, explained(log)).split('id="data">')[1].split("</script>")[0]
    assert orjson.loads(data)["items"][0]["items"] == [{"type": item["type"], "text": text}]


def test_too_many_tokens_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freezepoint.inspection.page.TOKENS_MAX", 5)
    log = frozen(calls(FORK))
    data = orjson.loads(as_page(log, explained(log)).split('id="data">')[1].split("</script>")[0])
    assert [strip["role"] for strip in data["strips"]] == ["main"]
    assert data["strips_left_out"] == 5
