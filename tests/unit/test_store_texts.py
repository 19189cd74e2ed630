"""What was written of a prompt is not written again, and nobody can tell from the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freezepoint.core.digests import prompt_form
from freezepoint.store import TokenStore, texts
from freezepoint.store.texts import PromptTexts
from freezepoint_schemas.arrays import TokenArray
from freezepoint_schemas.events import TokenEntry
from tests.events import entry


@pytest.fixture(autouse=True, scope="module")
def _short_prompts_count() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "TOKENS_MIN", 1)
        yield


def array(tokens: list[int]) -> TokenArray:
    return np.array(tokens, dtype=np.int32)


def call(rollout_id: str, prompt: Any, **fields: Any) -> TokenEntry:
    return entry(rollout_id, "c", [], [1], **fields).model_copy(update={"prompt_token_ids": prompt})


def written(known: PromptTexts, rollout_id: str, tokens: list[int]) -> bytes:
    """Its text; what it says of the prompt is what everybody else says."""
    asked = call(rollout_id, array(tokens))
    found = known.of(asked)
    assert found.form == prompt_form(asked)
    return b"".join(found.array or ())


CONVERSATIONS = st.lists(
    st.tuples(
        st.sampled_from(["r", "s"]), st.integers(0, 6), st.lists(st.integers(0, 2**31 - 1), max_size=4)
    ),
    max_size=12,
)


@given(CONVERSATIONS, st.integers(0, 80))
def test_every_prompt_is_written_as_if_it_were_the_first(
    turns: list[tuple[str, int, list[int]]], bytes_max: int
) -> None:
    """Longer ones, shorter ones, equal ones and forks, of several rollouts, whatever is forgotten in between."""
    known = PromptTexts(bytes_max)
    last: list[int] = []
    for rollout_id, kept, more in turns:
        last = last[:kept] + more or [7]
        assert written(known, rollout_id, last) == orjson.dumps(last)
        assert known.bytes <= bytes_max


def test_only_what_is_new_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    known = PromptTexts()
    history = list(range(1_000))
    written(known, "r", history)
    seen: list[int] = []
    write = texts._text

    def counted(tokens: TokenArray) -> bytes:
        seen.append(tokens.size)
        return write(tokens)

    monkeypatch.setattr(texts, "_text", counted)
    assert written(known, "r", [*history, 5, 6]) == orjson.dumps([*history, 5, 6])
    assert written(known, "r", [*history, 5, 6]) == orjson.dumps([*history, 5, 6])
    assert written(known, "s", history) == orjson.dumps(history)
    known.forget("r")
    written(known, "r", [*history, 5])
    assert seen == [2, 1_000, 1_001]


def test_tokens_changed_behind_our_back_are_written_as_they_are_now() -> None:
    """A caller's array may be a view of a buffer that he uses again."""
    known = PromptTexts()
    buffer = array([1, 2, 3, 4])
    known.of(call("r", buffer[:3]))
    buffer[1] = 9
    assert b"".join(known.of(call("r", buffer)).array or ()) == b"[1,9,3,4]"


@pytest.mark.parametrize("unusual", [np.arange(4, dtype=np.int64), np.arange(8, dtype=np.int32)[::2]])
def test_an_unusual_array_is_left_to_its_own_serializer(unusual: Any) -> None:
    assert PromptTexts().of(call("r", unusual)) == (None, None)


def test_a_reference_is_not_taken_for_a_whole_prompt() -> None:
    known = PromptTexts()
    prefix = {"call_id": "a", "length": 5, "digest": "0" * 32}
    assert known.of(call("r", array([1, 2, 3]), prompt_prefix=prefix)) == (None, None)
    assert known.bytes == 0


def test_what_is_remembered_is_bounded_and_goes_with_the_rollout(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    for number in range(3):
        store.put_now(entry(f"r{number}", "a", range(100), [1]))
    assert store._texts.bytes == 3 * (len(orjson.dumps(list(range(100)))) - 1)
    store.freeze_now("r0")
    store.delete("r1")
    assert list(store._texts._known) == ["r2"]


def test_what_is_remembered_in_many_pieces_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PIECES_MAX", 4)
    known, prompt = PromptTexts(), [0]
    for turn in range(30):
        prompt = [*prompt, turn, turn + 1]
        pieces = known.of(call("r", array(prompt))).array or ()
        assert len(pieces) <= 6
        assert b"".join(pieces) == orjson.dumps(prompt)
        assert known.bytes == len(orjson.dumps(prompt)) - 1


def test_a_conversation_lies_in_the_file_as_it_was_put(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    prompt = [1, 2, 3]
    for turn in range(20):
        store.put_now(entry("r", f"c{turn}", prompt, [turn]))
        prompt = [*prompt, turn, 2**31 - 1]
    found = store.freeze_now("r").entries
    assert [found_entry.prompt_token_ids for found_entry in found] == [
        [1, 2, 3, *(token for earlier in range(turn) for token in (earlier, 2**31 - 1))] for turn in range(20)
    ]
