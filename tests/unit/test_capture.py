"""Every form in which model servers report tokens, good and bad."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from freezepoint.capture import CaptureError, entry_from_response, entry_from_stream
from freezepoint_schemas.events import TokenEntry

INLINE: dict[str, Any] = {
    "prompt_token_ids": [1, 2, 3],
    "generation_token_ids": [4, 5],
    "generation_log_probs": [-0.5, -0.25],
}
PROMPT, GENERATION, LOG_PROBS = INLINE.values()
LOGPROBS = {"content": [{"token": "a", "logprob": -0.5, "bytes": None, "top_logprobs": []}, {"token": "b", "logprob": -0.25, "bytes": None, "top_logprobs": []}]}  # fmt: skip
TRIPLES = [[-0.5, 4, "a"], [-0.25, 5, None]]
TEXT_ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}
CALL = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALL_ITEM = {"type": "function_call", "call_id": "call-1", "name": "f", "arguments": "{}"}


def chat(
    message: dict[str, Any] | None = None, choice: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A chat completion with one choice."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "hi", **(message or {})},
                **(choice or {}),
            }
        ],
        **more,
    }


def responses(*items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "resp-1", "object": "response", "created_at": 1700000000.5, "model": "m", "status": "completed", "output": list(items), **more}  # fmt: skip


def native(**meta: Any) -> dict[str, Any]:
    """SGLang's /generate."""
    return {"text": "hi", "output_ids": [4, 5], "meta_info": {"id": "gen-1", "finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 3, "completion_tokens": 2, "output_token_logprobs": TRIPLES, **meta}}  # fmt: skip


INPUT = [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None]]
GOOD: dict[str, dict[str, Any]] = {
    "message": chat(INLINE),
    "message-and-logprobs": chat(INLINE, {"logprobs": LOGPROBS}),
    "vllm": chat(choice={"token_ids": GENERATION, "logprobs": LOGPROBS}, prompt_token_ids=PROMPT),
    "vllm-prompt-on-choice": chat(choice={"token_ids": GENERATION, "logprobs": LOGPROBS, "prompt_token_ids": PROMPT}),
    "vllm-ids-as-names": chat(
        choice={"logprobs": {"content": [{"token": "token_id:4", "logprob": -0.5}, {"token": "token_id:5", "logprob": -0.25}]}},
        prompt_token_ids=PROMPT,
    ),
    "sglang-chat": chat(choice={"meta_info": {"output_token_logprobs": TRIPLES}, "prompt_token_ids": PROMPT}),
    "sglang-chat-both": chat(
        choice={"meta_info": {"output_token_logprobs": TRIPLES}, "token_ids": GENERATION, "prompt_token_ids": PROMPT, "logprobs": LOGPROBS}
    ),
    "sglang-native": native(input_token_logprobs=INPUT),
    "sglang-native-ids": native(input_token_ids=PROMPT),
    "sglang-native-top": {**native(), "prompt_token_ids": PROMPT},
}  # fmt: skip


def captured(response: Any, **known: Any) -> TokenEntry:
    return entry_from_response(response, **{"rollout_id": "r", "model_call_id": "c1", **known})


def assert_tokens(entry: TokenEntry) -> None:
    assert entry.prompt_token_ids.tolist() == PROMPT
    assert entry.generation_token_ids.tolist() == GENERATION
    assert entry.generation_log_probs.tolist() == LOG_PROBS


@pytest.mark.parametrize("name", GOOD)
def test_each_form(name: str) -> None:
    entry = captured(GOOD[name])
    assert_tokens(entry)
    assert entry.output_items == [TEXT_ITEM]
    assert entry.token_item_index == 0
    assert entry.finish_reason == ("length" if "native" in name else "stop")
    assert entry.response_id == ("gen-1" if "native" in name else "chatcmpl-1")


def test_responses_keep_their_items_without_arrays() -> None:
    reasoning = {"type": "reasoning", "summary": [], "id": "rs"}
    carrier = {**CALL_ITEM, **INLINE, "routed_experts": [[[1]], [[2]]]}
    entry = captured(responses(reasoning, carrier))
    assert_tokens(entry)
    assert entry.output_items == [reasoning, CALL_ITEM]
    assert entry.token_item_index == 1
    assert entry.routed_experts == [[[1]], [[2]]]
    assert (entry.created_at, entry.model, entry.finish_reason) == (1700000000.5, "m", "completed")


def test_a_message_becomes_items_in_the_form_of_responses() -> None:
    entry = captured(
        chat({**INLINE, "reasoning_content": "hm", "tool_calls": [CALL, {**CALL, "id": "call-2"}]})
    )
    assert entry.output_items == [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        TEXT_ITEM,
        CALL_ITEM,
        {**CALL_ITEM, "call_id": "call-2"},
    ]
    assert entry.token_item_index == 3
    only_call = captured(chat({**INLINE, "content": None, "tool_calls": [CALL]}))
    assert only_call.output_items == [CALL_ITEM]
    nothing = captured(chat({**INLINE, "content": None}))
    assert nothing.output_items == [{**TEXT_ITEM, "content": [{"type": "output_text", "text": ""}]}]


def test_objects_of_the_openai_library_and_json_are_read() -> None:
    assert_tokens(captured(ChatCompletion.model_validate(GOOD["vllm"])))
    assert_tokens(captured(orjson.dumps(GOOD["vllm"])))
    message = {**TEXT_ITEM, "id": "msg", "status": "completed", **INLINE}
    more = {"parallel_tool_calls": False, "tool_choice": "auto", "tools": []}
    assert_tokens(captured(Response.construct(**responses(message, **more))))
    assert_tokens(captured([GOOD["sglang-native"]]))


def test_what_the_caller_knows_wins() -> None:
    entry = captured(GOOD["vllm"], created_at=5, model="other", parent_call_id="c0", policy_version=7)
    assert (entry.created_at, entry.model, entry.parent_call_id, entry.policy_version) == (
        5.0,
        "other",
        "c0",
        7,
    )
    assert entry_from_response(GOOD["vllm"], rollout_id="r").model_call_id == "chatcmpl-1"
    without = {"choices": GOOD["message"]["choices"]}
    first, second = (entry_from_response(without, rollout_id="r") for _ in range(2))
    assert first.model_call_id != second.model_call_id
    known = captured(chat(choice={"token_ids": GENERATION, "logprobs": LOGPROBS}), prompt_token_ids=(1, 2, 3))
    assert_tokens(known)


def test_an_empty_generation_needs_no_log_probabilities() -> None:
    entry = captured(chat(choice={"token_ids": [], "logprobs": None}, prompt_token_ids=PROMPT))
    assert entry.generation_token_ids.size == 0


def test_routed_experts_in_base64() -> None:
    routes = np.arange(8, dtype=np.uint8).reshape(4, 2, 1)
    file = io.BytesIO()
    np.save(file, routes)
    vllm = captured(chat(INLINE, {"routed_experts": base64.b64encode(file.getvalue()).decode()}))
    assert np.array_equal(np.asarray(vllm.routed_experts), routes)
    bare = base64.b64encode(routes.astype("<i4").tobytes()).decode()
    sglang = captured(native(input_token_ids=PROMPT, routed_experts=bare))
    assert np.asarray(sglang.routed_experts).tolist() == list(range(8))
    for broken in ("!", base64.b64encode(b"abc").decode(), base64.b64encode(b"\x93NUMPYx").decode(), 5):
        with pytest.raises(CaptureError, match="routed_experts"):
            captured(chat(INLINE, {"routed_experts": broken}))


TWO = {
    "token_ids": GENERATION,
    "logprobs": LOGPROBS,
    "index": 1,
    "message": {"role": "assistant", "content": "x"},
}
BAD: dict[str, tuple[Any, str]] = {
    "nothing": (chat(), "carries no token ids; ask the server"),
    "no-log-probs": (chat(choice={"token_ids": GENERATION}, prompt_token_ids=PROMPT), "no generation_log_probs"),
    "no-prompt": (chat(choice={"token_ids": GENERATION, "logprobs": LOGPROBS}), "no prompt_token_ids"),
    "no-ids": (chat(choice={"logprobs": LOGPROBS}, prompt_token_ids=PROMPT), "no generation_token_ids"),
    "partial-item": (responses({**TEXT_ITEM, "generation_token_ids": [1]}), "partial token metadata"),
    "two-items": (responses({**TEXT_ITEM, **INLINE}, {**CALL_ITEM, **INLINE}), "2 output items carry"),
    "two-disagree": (chat(INLINE, {"token_ids": [4, 6]}), "carry different generation_token_ids"),
    "ids-disagree": (
        chat(choice={"token_ids": [4, 6], "meta_info": {"output_token_logprobs": TRIPLES}}, prompt_token_ids=PROMPT),
        "carry different generation_token_ids",
    ),
    "two-choices": ({**chat(INLINE), "choices": [*chat(INLINE)["choices"], TWO]}, r"2 choices; .*\(n=1\)"),
    "no-choice": ({**chat(), "choices": []}, "0 choices"),
    "two-natives": ([native(), native()], "2 generations"),
    "lengths": (chat({**INLINE, "generation_log_probs": [-0.5]}), "2 generated tokens .* 1 log prob"),
    "vllm-lengths": (chat(choice={"token_ids": [4], "logprobs": LOGPROBS}, prompt_token_ids=PROMPT), "1 generated tok"),
    "unmeasured": (
        chat(choice={"token_ids": [4], "logprobs": {"content": [{"token": "a", "logprob": None}]}}, prompt_token_ids=[1]),
        "no log probability for generated token 0",
    ),
    "part-of-prompt": (native(input_token_logprobs=INPUT[1:]), "2 of 3 prompt tokens"),
    "no-triples": (native(input_token_ids=[1], output_token_logprobs=[1]), r"\[logprob, token id, text\]"),
    "no-numbers": (chat({**INLINE, "prompt_token_ids": ["a"]}), "integers"),
    "no-list": (chat({**INLINE, "prompt_token_ids": "abc"}), "no list"),
    "nan": (chat({**INLINE, "generation_log_probs": [float("nan"), 0.0]}), "finite"),
    "error": ({"error": {"message": "overloaded"}}, "overloaded"),
    "other": ({"object": "list", "data": []}, "neither choices, output nor meta_info"),
    "text": ("not json", "no JSON"),
    "number": (SimpleNamespace(), "not an object"),
    "empty-output": (responses(), "no token ids"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_an_entry_is_refused(name: str) -> None:
    response, message = BAD[name]
    with pytest.raises(CaptureError, match=message):
        captured(response)


# ------------------------------------------------------------------------------------------------------------ streams


def chunk(choice: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    choices = [] if choice is None else [{"index": 0, "delta": {}, "finish_reason": None, **choice}]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": choices,
        **more,
    }


def logprob(value: float) -> dict[str, Any]:
    return {"content": [{"token": "a", "logprob": value}]}


VLLM_STREAM = [
    chunk({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=PROMPT),
    chunk({"delta": {"reasoning_content": "h"}, "token_ids": [4], "logprobs": logprob(-0.5)}),
    chunk({"delta": {"reasoning_content": "m"}}),
    chunk({"delta": {"content": "hi"}}),
    chunk({"delta": {"tool_calls": [{"index": 0, "id": "call-1", "type": "function", "function": {"name": "f"}}]}}),
    chunk({"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}),
    chunk({"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}, "token_ids": [5], "logprobs": logprob(-0.25)}),
    chunk({"finish_reason": "tool_calls"}),
    chunk(usage={"prompt_tokens": 3, "completion_tokens": 2}),
]  # fmt: skip


def streamed(chunks: list[Any]) -> TokenEntry:
    return entry_from_stream(chunks, rollout_id="r", model_call_id="c1")


def test_a_chat_stream() -> None:
    entry = streamed(VLLM_STREAM)
    assert_tokens(entry)
    assert entry.output_items == [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        TEXT_ITEM,
        CALL_ITEM,
    ]
    assert entry.finish_reason == "tool_calls"


def test_a_chat_stream_with_the_arrays_on_its_last_delta() -> None:
    entry = streamed([chunk({"delta": {"content": "hi"}}), chunk({"delta": INLINE, "finish_reason": "stop"})])
    assert_tokens(entry)
    assert entry.output_items == [TEXT_ITEM]


def test_a_completion_stream() -> None:
    pieces = [
        {"choices": [{"index": 0, "text": "h", "token_ids": [4], "prompt_token_ids": PROMPT, "logprobs": {"token_logprobs": [-0.5], "tokens": ["h"]}, "finish_reason": None}]},
        {"choices": [{"index": 0, "text": "i", "token_ids": [5], "logprobs": {"token_logprobs": [-0.25], "tokens": ["i"]}, "finish_reason": "length"}]},
    ]  # fmt: skip
    entry = streamed(pieces)
    assert_tokens(entry)
    assert entry.output_items == [TEXT_ITEM]


@pytest.mark.parametrize("incremental", [False, True])
def test_a_native_sglang_stream(incremental: bool) -> None:
    first = {"text": "h", "output_ids": [4], "meta_info": {"id": "g", "finish_reason": None, "prompt_tokens": 3, "completion_tokens": 1, "input_token_logprobs": INPUT, "output_token_logprobs": TRIPLES[:1]}}  # fmt: skip
    last = native(output_token_logprobs=TRIPLES[1:] if incremental else TRIPLES)
    last["output_ids"] = [5] if incremental else [4, 5]
    assert_tokens(streamed([first, last]))


def test_responses_events() -> None:
    item = {**TEXT_ITEM, **INLINE}
    final = responses(TEXT_ITEM)
    events = [
        {"type": "response.created", "response": responses()},
        {"type": "response.output_text.delta", "delta": "hi"},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": final},
    ]
    assert_tokens(streamed(events))
    assert_tokens(streamed([events[0], {"type": "response.completed", "response": responses(item)}]))


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "broke off after 0 chunks"),
        (VLLM_STREAM[:-2], "broke off after 7 chunks"),
        ([*VLLM_STREAM[:6], *VLLM_STREAM[7:]], "1 of 2 generated tokens"),
        ([*VLLM_STREAM[:2], {"error": {"message": "out of memory"}}], "out of memory"),
        ([{"type": "response.created", "response": {}}], "broke off"),
        ([{"type": "response.failed", "response": {"error": {"message": "no"}}}], "failure: no"),
        ([*VLLM_STREAM[:-1], chunk({"index": 1, "finish_reason": "stop"})], "2 choices"),
        ([native(completion_tokens=3, input_token_ids=PROMPT)], "2 of 3 generated tokens"),
        ([*VLLM_STREAM[1:]], "no prompt_token_ids"),
    ],
)
def test_streams_that_are_not_whole(chunks: list[Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        streamed(chunks)
