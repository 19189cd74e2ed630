"""What was read of a prompt is not read again, and nobody can tell from what comes out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freezepoint_schemas import codec, prompts
from freezepoint_schemas.errors import DecodeError
from freezepoint_schemas.events import TokenEntry
from freezepoint_schemas.prompts import KnownPrompts
from tests.events import Bench, complete, entry, record


@pytest.fixture(autouse=True)
def _short_texts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "TEXT_BYTES_MIN", 1)


def meaning(body: Any) -> Any:
    """The body with lists for arrays."""
    if isinstance(body, dict) and isinstance(body.get("prompt_token_ids"), np.ndarray):
        body = {**body, "prompt_token_ids": body["prompt_token_ids"].tolist()}
    return body


def take(known: KnownPrompts, value: bytes) -> Any:
    try:
        return known.loads(value)
    except orjson.JSONDecodeError as error:
        return str(error)


def read(known: KnownPrompts, value: bytes) -> Any:
    return meaning(take(known, value))


def plainly(value: bytes) -> Any:
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        return str(error)


def prompt(text: str, before: str = "", after: str = "") -> bytes:
    return f'{{{before}"prompt_token_ids":[{text}]{after}}}'.encode()


def test_only_what_is_new_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownPrompts()
    history = ",".join(map(str, range(1_000)))
    known.loads(prompt(history))
    parsed: list[int] = []

    def loads(value: bytes) -> Any:
        parsed.append(len(value))
        return json.loads(value)

    monkeypatch.setattr(orjson, "loads", loads)
    body = known.loads(prompt(history + ",7,8"))
    assert body["prompt_token_ids"].tolist() == [*range(1_000), 7, 8]
    assert sum(parsed) < 100


def test_arrays_cannot_be_written_to_and_are_not_changed_by_what_follows() -> None:
    known = KnownPrompts()
    first = known.loads(prompt("1,2"))["prompt_token_ids"]
    second = known.loads(prompt("1,2,3"))["prompt_token_ids"]
    assert (first.tolist(), second.tolist()) == ([1, 2], [1, 2, 3])
    assert (first.dtype, second.dtype) == (np.int32, np.int32)
    assert not first.flags.writeable
    assert not second.flags.writeable


@pytest.mark.parametrize(
    "value",
    [
        prompt("1,23"),
        prompt("1,2,"),
        prompt("1,2,,3"),
        prompt("1,2 ,3"),
        prompt("1,2, 3 "),
        prompt("1,2,true"),
        prompt("1,2,-3"),
        prompt("1,2,3.0"),
        prompt("1,2,4294967296"),
        prompt('1,2,"]"'),
        prompt("1,2,[3]"),
        prompt("1,2,3", after=',"prompt_token_ids":[9]'),
        prompt("1,2,3", after=',"prompt_token_ids":null'),
        prompt("1,2,3", after=',"\\u0070rompt_token_ids":[9]'),
        prompt("1,2,3", before='"prompt_token_ids":[8],'),
        prompt("1,2,3", before='"inner":{"prompt_token_ids":[8]},'),
        prompt("1,2,3", before='"text":"\\"prompt_token_ids\\":[8]",'),
        b'{"inner":{"prompt_token_ids":[1,2,3]}}',
        b'{"odd \\"prompt_token_ids":[1,2,3]}',
        b'{"odd \\"prompt_token_ids":[1,2,3],"prompt_token_ids":[4]}',
        b'["prompt_token_ids",[1,2,3]]',
        b'{"a" "prompt_token_ids":[1,2,3]}',
        prompt("1,2,3").replace(b":", b" : "),
        prompt("1,2,3")[:-2],
        prompt("1,2,3")[:-1],
        prompt("1,2,3") + b"x",
        b'{"prompt_token_ids":[1,2,3',
        b'{"prompt_token_ids":{"dtype":"i32","data":"AAAA"}}',
        prompt(""),
        b"",
    ],
)
def test_whatever_it_looks_like_it_means_what_it_says(value: bytes) -> None:
    known = KnownPrompts()
    for _ in range(2):
        known.loads(prompt("1,2"))
        assert read(known, value) == plainly(value)


PIECES = st.sampled_from(
    [
        ",",
        "1",
        "12",
        "0",
        " ",
        "]",
        "[",
        '"',
        "\\",
        "{",
        "}",
        ":",
        "true",
        "-1",
        "1.5",
        '"prompt_token_ids":[',
        "x",
    ]
)


@settings(max_examples=600, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 300), max_size=5), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3), PIECES), max_size=3),
    st.data(),
)
def test_a_conversation_reads_as_it_is_written(
    turns: list[list[int]], changes: list[tuple[int, int, str]], data: st.DataObject
) -> None:
    """Several lines of thought under one id, with whatever spaces, some of them torn."""
    known = KnownPrompts()
    threads: list[list[int]] = [[]]
    taken: list[tuple[Any, Any]] = []
    for turn in turns:
        base = data.draw(st.sampled_from(threads))
        threads.append([*base, *turn])
        separators = data.draw(st.sampled_from([(",", ":"), (", ", ": ")]))
        body = {"a": ["]"], "prompt_token_ids": threads[-1], "b": '"prompt_token_ids":[5]'}
        text = json.dumps(body, separators=separators)
        if data.draw(st.booleans()):
            for at, length, piece in changes:
                text = text[:at] + piece + text[at + length :]
        taken.append((take(known, text.encode()), plainly(text.encode())))
    for read_so, expected in taken:  # at the end: what came later has changed nothing
        assert meaning(read_so) == expected


def test_an_entry_is_the_same_whatever_is_known() -> None:
    """Also where the arrays stand on an output item, and where the record is refused."""
    known = KnownPrompts()
    whole = entry("a", "c1", [1, 2, 3], [4])
    inline = {
        "model_call_id": "c2",
        "prompt_token_ids": [1, 2, 3, 4],
        "output_items": [
            {
                "prompt_token_ids": [1, 2, 3, 4],
                "generation_token_ids": [5],
                "generation_log_probs": [-0.5],
            }
        ],
    }
    contradicting = orjson.dumps({**inline, "prompt_token_ids": [1, 2, 3, 9]})
    for value in (codec.encode_event(whole), orjson.dumps(inline)):
        given, expected = codec.decode_event("a", value, known), codec.decode_event("a", value)
        assert isinstance(given, TokenEntry)
        assert codec.encode_event(given) == codec.encode_event(expected)
    for refused in (contradicting, codec.encode_event(whole).replace(b"[1,2,3]", b"[1,2,3,-1]")):
        with pytest.raises(DecodeError) as plain:
            codec.decode_event("a", refused)
        with pytest.raises(DecodeError) as caught:
            codec.decode_event("a", refused, known)
        assert (caught.value.reason, str(caught.value)) == (plain.value.reason, str(plain.value))


def test_a_conversation_takes_the_memory_of_its_longest_prompt() -> None:
    bench = Bench()
    history = list(range(2_000))
    for number in range(60):
        history += range(100)
        bench.feed([record(number, "a", entry("a", f"c{number:02}", history, [2]))])
    life = bench.core.open["a"]
    arrays = [held.prompt_token_ids for held in life.entries()]
    buffers = {id(array.base): array.base for array in arrays[1:]}
    held_bytes = arrays[0].nbytes + sum(np.asarray(buffer).nbytes for buffer in buffers.values())
    assert held_bytes < 5 * arrays[-1].nbytes < sum(array.nbytes for array in arrays) / 3
    assert held_bytes <= life.memory_bytes < held_bytes + 60 * 4_000
    assert bench.core.memory_bytes == life.memory_bytes
    bench.feed([record(60, "a", entry("a", "c59", history, [2]))])  # a repeat
    assert bench.core.memory_bytes == life.memory_bytes
    life.spill()
    assert life.memory_bytes == 0
    bench.feed([record(61, "a", entry("a", "c60", history, [3]))])
    assert life.memory_bytes > arrays[-1].nbytes


def test_a_life_that_is_spilled_or_too_large_lets_go_of_its_prompts() -> None:
    bench = Bench(bytes_max=2_000)
    for number in range(3):
        bench.feed([record(number, "a", entry("a", f"c{number}", [1] * (number + 5), [2]))])
    life = bench.core.open["a"]
    assert life.prompts._known
    life.spill()
    assert not life.prompts._known
    for number in range(3, 10):
        bench.feed([record(number, "a", entry("a", f"c{number}", [1] * (number + 5), [2]))])
    assert life.oversized
    assert not life.prompts._known
    assert bench.run([record(99, "a", complete("a"))])[0].mask_sample
