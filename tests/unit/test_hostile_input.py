"""Input that is small and costs much, or reads one way and writes another. Each test stands for a kind, not for one input."""

from __future__ import annotations

import sys
import tracemalloc
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest

from freezepoint.core.digests import tokens_digest
from freezepoint_schemas import codec
from freezepoint_schemas.errors import DecodeError
from freezepoint_schemas.events import TokenEntry
from freezepoint_schemas.reasons import Reason
from tests.events import Bench, complete, record

BODY: dict[str, Any] = {
    "model_call_id": "c",
    "prompt_token_ids": [1],
    "generation_token_ids": [2],
    "generation_log_probs": [-1.0],
}


def entry_with(**fields: Any) -> bytes:
    return orjson.dumps({**BODY, **fields})


def reasons_of(*values: bytes) -> list[Reason]:
    """What one rollout with these records is masked with."""
    bench = Bench()
    bench.feed(record(offset, "r", value) for offset, value in enumerate(values))
    (result,) = bench.run([record(len(values), "r", complete("r"))])
    return result.reasons


def refused(value: Any) -> Reason:
    with pytest.raises(DecodeError) as caught:
        codec.event_from_object("r", value)
    return caught.value.reason


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def at_depth(frames: int, work: Callable[[], object]) -> object:
    """The work's outcome, called with that many more frames on the stack than now."""
    return work() if not frames else at_depth(frames - 1, work)


@pytest.mark.parametrize("name", ["rollout_id", "event", "model_call_id", "schema_version"])
def test_a_message_about_a_nested_value_does_not_recurse_into_it(name: str) -> None:
    """``repr`` of what orjson reads needs more of the stack than a worker has left."""
    value = b'{"prompt_token_ids": [1], "%s": %s}' % (name.encode(), b"[" * 1_000 + b"]" * 1_000)
    frames = sys.getrecursionlimit() // 2
    with pytest.raises(DecodeError) as caught:
        at_depth(frames, lambda: codec.decode_event("r", value))
    assert len(str(caught.value)) < 300


def test_a_message_about_a_large_value_does_not_write_all_of_it() -> None:
    value = b'{"event": [%s]}' % b",".join([b"1"] * 100_000)
    loaded = peak_bytes(lambda: orjson.loads(value))

    def decode() -> None:
        with pytest.raises(DecodeError):
            codec.decode_event("r", value)

    assert peak_bytes(decode) < loaded + 100_000


def test_of_a_million_wrong_items_one_is_reported() -> None:
    """An error object for each of them would be a hundred times the record."""
    value = entry_with(output_items=[1] * 100_000)
    loaded = peak_bytes(lambda: orjson.loads(value))

    def decode() -> None:
        with pytest.raises(DecodeError):
            codec.decode_event("r", value)

    assert peak_bytes(decode) < 10 * loaded


@pytest.mark.parametrize("shape", [[10**12, 0], [1, 0], [3, 0, 8], [0, 2**40, 2**40], [2**40] * 7 + [0]])
def test_an_empty_array_is_empty_in_its_first_dimension(shape: list[int]) -> None:
    """Else a few bytes stand for as many empty lists as the first dimension says."""
    routes = {"dtype": "i32", "data": "", "shape": shape}
    assert reasons_of(entry_with(routed_experts=routes)) == [Reason.INVALID_ENTRY]


def test_an_empty_array_keeps_its_other_dimensions() -> None:
    assert reasons_of(entry_with(routed_experts={"dtype": "u8", "data": "", "shape": [0, 4, 2]})) == []


@pytest.mark.parametrize("values", [["a" * 5_000] + ["a"] * 5_000, [["a" * 5_000]] + [["a"]] * 5_000])
def test_text_among_routed_experts_is_not_widened(values: list[Any]) -> None:
    """numpy gives every string the room of the longest: quadratic in the record."""
    value = entry_with(routed_experts=values)
    assert peak_bytes(lambda: reasons_of(value)) < 200 * len(value)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_routed_experts_that_json_cannot_hold_are_refused(dtype: str, number: float) -> None:
    """They would all be written as null, and two different payloads would have one digest."""
    data = b64encode(
        np.array([1.0, number], dtype="<" + dtype[0] + str(int(dtype[1:]) // 8)).tobytes()
    ).decode()
    assert refused({**BODY, "routed_experts": {"dtype": dtype, "data": data}}) is Reason.INVALID_ENTRY


@pytest.mark.parametrize("dimensions", [1, 7, 8, 9, 20])
def test_routed_experts_of_any_depth_come_out_as_they_went_in(dimensions: int) -> None:
    nested: Any = 7
    for _ in range(dimensions):
        nested = [nested]
    bench = Bench()
    bench.run([record(0, "r", entry_with(routed_experts=nested)), record(1, "r", complete("r"))])
    (item,) = bench.results[0].traces[0].items
    routes = item.routed_experts
    assert (routes.tolist() if isinstance(routes, np.ndarray) else routes) == nested


@pytest.mark.parametrize("dimensions", [0, 9])
def test_an_array_from_memory_that_cannot_be_packed_is_refused(dimensions: int) -> None:
    body = {**BODY, "routed_experts": np.ones((1,) * dimensions, np.uint8)}
    with pytest.raises(DecodeError, match="1 to 8 dimensions"):
        codec.event_from_object("r", body)


@pytest.mark.parametrize("field", ["generation_log_probs", "routed_experts"])
@pytest.mark.parametrize(
    ("dtype", "raw"), [("f32", b"\x01\x00\x80\x7f"), ("f64", b"\x01\x00\x00\x00\x00\x00\xf0\x7f")]
)
def test_a_signalling_nan_is_refused_without_a_warning(dtype: str, raw: bytes, field: str) -> None:
    data = b64encode(raw).decode()
    assert refused({**BODY, field: {"dtype": dtype, "data": data}}) is Reason.INVALID_ENTRY


@pytest.mark.parametrize(
    "fields",
    [
        {"policy_version": 2**64},
        {"policy_version": -(2**63) - 1},
        {"output_items": [{"n": 2**64}]},
        {"output_items": [{"text": "\ud800"}]},
        {"routed_experts": [2**64]},
        {"model": "\ud800"},
        {"model_call_id": "\ud800"},
    ],
)
def test_what_an_object_from_memory_cannot_write_as_json_is_refused(fields: dict[str, Any]) -> None:
    assert refused({**BODY, **fields}) is Reason.INVALID_ENTRY


@pytest.mark.parametrize("fields", [{"n_calls": 2**64}, {"group_size": 2**64}, {"metadata": [2**64]}])
def test_what_a_closing_object_cannot_write_as_json_is_refused(fields: dict[str, Any]) -> None:
    assert refused({"event": "rollout_complete", **fields}) is Reason.INVALID_ENTRY


def prefix_of(tokens: list[int]) -> dict[str, Any]:
    return {
        "call_id": "before",
        "length": len(tokens),
        "digest": tokens_digest(np.array(tokens, np.int32)).hex(),
    }


def carrier(prompt: Any) -> list[dict[str, Any]]:
    return [{"type": "message", "prompt_token_ids": prompt, "generation_token_ids": [2]}]


def test_a_whole_prompt_on_an_item_that_says_what_the_reference_says_is_fine() -> None:
    fields = {"prompt_prefix": prefix_of([1, 2]), "prompt_token_ids": [3]}
    event = codec.event_from_object(
        "r", {**BODY, "event": "token_entry", **fields, "output_items": carrier([1, 2, 3])}
    )
    assert isinstance(event, TokenEntry)
    assert event.prompt_token_ids.tolist() == [3]


@pytest.mark.parametrize(
    ("rest", "inline"),
    [
        (None, [1, 2, 3]),  # is this what comes after the prefix, or the whole?
        (None, [3]),
        ([3], [3]),
        ([3], [1, 2, 4]),
        ([3], [1, 9, 3]),
        ([3], [1, 2]),
        ([3], [1, 2, 3, 4]),
        ([3], "text"),
        ([3], [1, 2, 3.0]),
    ],
)
def test_a_prompt_on_an_item_that_says_something_else_than_the_reference_is_refused(
    rest: Any, inline: Any
) -> None:
    """Taken for what comes after the prefix, a whole prompt would be trained with its beginning doubled."""
    fields = {"prompt_prefix": prefix_of([1, 2]), "prompt_token_ids": rest}
    value = {**BODY, "event": "token_entry", **fields, "output_items": carrier(inline)}
    assert refused(value) is Reason.INVALID_ENTRY


@pytest.mark.parametrize("prefix", [7, {}, {"call_id": "", "length": 0, "digest": "0" * 32}])
def test_a_reference_that_is_none_is_refused_beside_inline_arrays_too(prefix: Any) -> None:
    value = {**BODY, "event": "token_entry", "prompt_prefix": prefix, "output_items": carrier([1])}
    assert refused(value) is Reason.INVALID_ENTRY
