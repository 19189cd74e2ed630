"""Every form in which model servers report tokens, good and bad."""

from __future__ import annotations

import base64
import contextlib
import copy
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    "sglang-native-part-of-a-known-prompt": {**native(input_token_logprobs=INPUT[1:]), "prompt_token_ids": PROMPT},
    "counted": chat(INLINE, {"logprobs": LOGPROBS}, prompt_token_ids=PROMPT, usage={
        "prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 5,
    }),
    "sglang-chat-counted": chat(
        choice={"meta_info": {"output_token_logprobs": TRIPLES, "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 2},
                "prompt_token_ids": PROMPT, "logprobs": LOGPROBS},
        usage={"prompt_tokens": 3, "completion_tokens": 2, "reasoning_tokens": 1},
    ),
    "usage-of-nothing-but-zeros": chat(
        INLINE, usage={"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    ),
    "sglang-chat-usage-without-the-templates-tail": chat(
        choice={"meta_info": {"output_token_logprobs": TRIPLES, "prompt_tokens": 3, "completion_tokens": 2}, "prompt_token_ids": PROMPT},
        usage={"prompt_tokens": 1, "completion_tokens": 2},
    ),
    "rounded-elsewhere": chat(INLINE, {"logprobs": {"content": [{"token": "a", "logprob": -0.5003}, {"token": "b", "logprob": -0.25}]}}),
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


NOTHING = {
    "response": ["error", "usage", "system_fingerprint", "service_tier", "prompt_logprobs", "kv_transfer_params", "prompt_token_ids",
                 "sglext", "metadata"],
    "choice": ["logprobs", "stop_reason", "matched_stop", "token_ids", "routed_experts", "prompt_token_ids", "meta_info",
               "hidden_states", "prompt_logprobs"],
    "message": ["refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning", "reasoning_content", "prompt_token_ids",
                "generation_token_ids", "generation_log_probs", "routed_experts"],
}  # fmt: skip
"""What servers write where they have nothing to say."""


@pytest.mark.parametrize("name", GOOD)
def test_null_fields_and_unknown_ones_mean_nothing(name: str) -> None:
    plain = copy.deepcopy(GOOD[name])
    full = {**dict.fromkeys(NOTHING["response"]), "new": {"choices": 3}, **plain}
    if "choices" in full:
        (choice,) = full["choices"]
        message = {**dict.fromkeys(NOTHING["message"]), "new": [1], **choice["message"]}
        full["choices"] = [{**dict.fromkeys(NOTHING["choice"]), "new": "x", **choice, "message": message}]
    known = {"created_at": 1.0}
    assert captured(full, **known).model_dump() == captured(plain, **known).model_dump()


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
    for message in ({"content": ""}, {"content": None}):
        entry = captured(chat(message, {"token_ids": [], "logprobs": None}, prompt_token_ids=PROMPT))
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
    "message-and-longer-logprobs": (
        chat(INLINE, {"logprobs": {"content": [*LOGPROBS["content"], *LOGPROBS["content"]]}}, usage={"completion_tokens": 4}),
        "message and .*logprobs carry 2 and 4 generation_log_probs",
    ),
    "message-and-other-logprobs": (
        chat(INLINE, {"logprobs": {"content": [{"token": "a", "logprob": -3.0}, {"token": "b", "logprob": -0.25}]}}),
        "message and .*logprobs carry different generation_log_probs",
    ),
    "message-and-no-numbers": (
        chat({**INLINE, "generation_log_probs": ["a", "b"]}, {"logprobs": LOGPROBS}), "carry different generation_log_probs"
    ),
    "meta-info-and-other-logprobs": (
        chat(choice={"meta_info": {"output_token_logprobs": [[-2.0, 4, "a"], TRIPLES[1]]}, "prompt_token_ids": PROMPT, "logprobs": LOGPROBS}),
        "meta_info.* and .*logprobs carry different generation_log_probs",
    ),
    "item-and-other-prompt": (responses({**TEXT_ITEM, **INLINE}, prompt_token_ids=[1, 2]), r"output\[0\] and .* carry 3 and 2 prompt"),
    "message-and-other-prompt": (chat(INLINE, prompt_token_ids=[1, 2, 4]), "message and .* carry different prompt_token_ids"),
    "text-without-tokens": (chat(choice={"token_ids": []}, prompt_token_ids=PROMPT), "text or a tool call, but no gen"),
    "call-without-tokens": (
        chat({"content": None, "tool_calls": [CALL]}, {"token_ids": []}, prompt_token_ids=PROMPT), "text or a tool call, but no gen"
    ),
    "reasoning-without-tokens": (
        chat({"content": "", "reasoning_content": "hm"}, {"token_ids": []}, prompt_token_ids=PROMPT), "text or a tool call, but no gen"
    ),
    "item-without-tokens": (
        responses({**TEXT_ITEM, **INLINE, "generation_token_ids": [], "generation_log_probs": []}), "text or a tool call, but no gen"
    ),
    "placeholder": (
        chat(choice={"token_ids": GENERATION, "logprobs": {"content": [LOGPROBS["content"][0], {"token": "b", "logprob": -9999.0}]}},
             prompt_token_ids=PROMPT),
        "says -9999.0 for generated token 1: a placeholder",
    ),
    "other-routes": (chat({**INLINE, "routed_experts": [[[1]]]}, {"routed_experts": [[[2]]]}), "carry different routed_experts"),
    "generation-failed": (chat(INLINE, {"finish_reason": "error"}), "ended with error"),
    "generation-filtered": (chat(INLINE, {"finish_reason": "content_filter"}), "ended with content_filter"),
    "echoed-prompt": (
        {"choices": [{"text": "abchi", "token_ids": GENERATION, "prompt_token_ids": PROMPT,
                      "logprobs": {"token_logprobs": [None, -1.0, -1.0, *LOG_PROBS], "tokens": list("abchi")}}]},
        "no log probability for generated token 0",
    ),
    "empty-prompt": (chat({**INLINE, "prompt_token_ids": []}), "prompt_token_ids in .*message is empty"),
    "part-of-uncounted-prompt": (
        native(input_token_logprobs=INPUT[1:], prompt_tokens=None), "2 of an unknown number .* logprob_start_len 0"
    ),
    "part-of-another-prompt": (
        {**native(input_token_logprobs=INPUT[:2]), "prompt_token_ids": PROMPT}, "input_token_logprobs carry different prompt"
    ),
    "error-beside-items": (responses({**TEXT_ITEM, **INLINE}, error={"message": "out of memory"}), "is an error: out of memory"),
    "filtered": (
        responses({**TEXT_ITEM, **INLINE}, status="incomplete", incomplete_details={"reason": "content_filter"}),
        "incomplete because of content_filter",
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


COUNTED = {
    "message": (chat(INLINE), "usage", "prompt_tokens", "completion_tokens"),
    "vllm": (GOOD["vllm"], "usage", "prompt_tokens", "completion_tokens"),
    "sglang-chat": (GOOD["sglang-chat"], "usage", "prompt_tokens", "completion_tokens"),
    "responses": (responses({**TEXT_ITEM, **INLINE}), "usage", "input_tokens", "output_tokens"),
    "native": (native(input_token_ids=PROMPT), "meta_info", "prompt_tokens", "completion_tokens"),
}


@pytest.mark.parametrize("form", COUNTED)
def test_what_the_server_counted_is_what_is_captured(form: str) -> None:
    response, place, prompt, generated = COUNTED[form]
    rest = response.get(place, {})
    assert_tokens(captured({**response, place: {**rest, prompt: 3, generated: 2}}))
    assert_tokens(captured({**response, place: {**rest, prompt: None, generated: None}}))
    for counts, message in (
        ({prompt: 9, generated: 2}, f"3 prompt tokens in .*, but {place}.{prompt} says 9"),
        ({prompt: 2, generated: 2}, f"3 prompt tokens in .*, but {place}.{prompt} says 2"),
        ({prompt: 3, generated: 5}, f"2 generated tokens in .*, but {place}.{generated} says 5"),
        ({prompt: 3, generated: 1}, f"2 generated tokens in .*, but {place}.{generated} says 1"),
    ):
        with pytest.raises(CaptureError, match=message):
            captured({**response, place: {**rest, **counts}})


@pytest.mark.parametrize("status", ["failed", "in_progress", "cancelled", "queued"])
def test_a_response_that_is_not_over_is_refused(status: str) -> None:
    with pytest.raises(CaptureError, match=f"the response is {status}, not completed"):
        captured(responses({**TEXT_ITEM, **INLINE}, status=status))


def test_a_response_that_ended_at_its_limit_is_whole() -> None:
    details = {"reason": "max_output_tokens"}
    entry = captured(responses({**TEXT_ITEM, **INLINE}, status="incomplete", incomplete_details=details))
    assert_tokens(entry)
    assert entry.finish_reason == "max_output_tokens"


def test_log_probabilities_are_taken_as_they_come() -> None:
    entry = captured(chat({**INLINE, "generation_log_probs": [0.5, -12000.0]}, {"logprobs": {"content": [
        {"token": "a", "logprob": 0.5}, {"token": "b", "logprob": -9999.0},
    ]}}))  # fmt: skip
    assert entry.generation_log_probs.tolist() == [0.5, -12000.0]


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
    chunk({"delta": {"reasoning_content": "m"}, "token_ids": []}),
    chunk({"delta": {"content": "hi"}, "token_ids": []}),
    chunk({"delta": {"tool_calls": [{"index": 0, "id": "call-1", "type": "function", "function": {"name": "f"}}]}, "token_ids": []}),
    chunk({"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, "token_ids": []}),
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
    first = {"text": "h", "output_ids": [4], "meta_info": {"id": "gen-1", "finish_reason": None, "prompt_tokens": 3, "completion_tokens": 1, "input_token_logprobs": INPUT, "output_token_logprobs": TRIPLES[:1]}}  # fmt: skip
    last = native(output_token_logprobs=TRIPLES[1:] if incremental else TRIPLES)
    last["output_ids"] = [5] if incremental else [4, 5]
    last["text"] = "i" if incremental else "hi"
    entry = streamed([first, last])
    assert_tokens(entry)
    assert entry.output_items == [TEXT_ITEM]


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
        (
            [*VLLM_STREAM[:6], *VLLM_STREAM[7:]],
            "1 generated tokens in .*token_ids, but usage.completion_tokens says 2",
        ),
        ([*VLLM_STREAM[:2], {"error": {"message": "out of memory"}}], "out of memory"),
        ([{"type": "response.created", "response": {}}], "broke off"),
        ([{"type": "response.failed", "response": {"error": {"message": "no"}}}], "failure: no"),
        ([*VLLM_STREAM, chunk({"index": 1, "finish_reason": "stop"})], "2 choices"),
        (
            [native(completion_tokens=3, input_token_ids=PROMPT)],
            "2 generated tokens .* meta_info.completion_tokens says 3",
        ),
        ([*VLLM_STREAM[1:]], "no prompt_token_ids"),
    ],
)
def test_streams_that_are_not_whole(chunks: list[Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        streamed(chunks)


def sglang_chunk(rows: list[Any], counted: int | None, *, last: bool = False) -> dict[str, Any]:
    """A chat chunk that carries its ``meta_info``."""
    meta = {"id": "g", "prompt_tokens": 3, "completion_tokens": counted, "output_token_logprobs": rows}
    return chunk(
        {
            "delta": {"content": "x"},
            "meta_info": meta,
            "finish_reason": "stop" if last else None,
            "prompt_token_ids": PROMPT,
        }
    )


def inline_chunk(tokens: int, *, start: int = 0, last: bool = False) -> dict[str, Any]:
    """A chunk whose delta carries the arrays from ``start`` to ``tokens``."""
    arrays = {"prompt_token_ids": PROMPT, "generation_token_ids": GENERATION[start:tokens], "generation_log_probs": LOG_PROBS[start:tokens]}  # fmt: skip
    return chunk({"delta": {"content": "x", **arrays}, "finish_reason": "stop" if last else None})


def native_chunk(rows: list[Any], counted: int | None, *, last: bool = False, **more: Any) -> dict[str, Any]:
    reason = {"type": "stop"} if last else None
    meta = {"id": "g", "finish_reason": reason, "prompt_tokens": 3, "completion_tokens": counted, "input_token_logprobs": INPUT, "output_token_logprobs": rows}  # fmt: skip
    return {"text": "x", "meta_info": meta, **more}


def vllm_chunk(position: int, *, ids: bool = True, last: bool = False) -> dict[str, Any]:
    carried = {"token_ids": GENERATION[position : position + 1], "logprobs": logprob(LOG_PROBS[position])}
    more = {"prompt_token_ids": PROMPT} if position == 0 else {}
    return chunk(
        {"delta": {"content": "x"}, "finish_reason": "stop" if last else None, **(carried if ids else {})},
        **more,
    )


CALL_DELTA = {
    "delta": {"tool_calls": [{"index": 0, "id": "call-1", "function": {"name": "f", "arguments": "{}"}}]}
}


def parsed_stream(delta: dict[str, Any], *, bare: bool) -> list[dict[str, Any]]:
    """A stream that a parser was at work on; ``bare``: the server sends what the parser swallows, without text."""
    middle = {"token_ids": [5], "logprobs": logprob(-0.25)}
    return [
        chunk({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=PROMPT),
        chunk({**delta, "token_ids": [4], "logprobs": logprob(-0.5)}),
        *([chunk({"delta": {}, **middle})] if bare else [chunk({"delta": {"content": ""}, **middle})]),
        chunk({"finish_reason": "stop"}),
    ]


USAGE = chunk(usage={"prompt_tokens": 3, "completion_tokens": 2})
BARE = chunk({"delta": {"content": "x"}})


@pytest.mark.parametrize(
    "chunks",
    [
        [sglang_chunk(TRIPLES[:1], 1), sglang_chunk(TRIPLES[1:], 2, last=True)],
        [sglang_chunk(TRIPLES[:1], 1), sglang_chunk(TRIPLES, 2, last=True), USAGE],
        [BARE, sglang_chunk(TRIPLES, None, last=True), USAGE],
        [inline_chunk(1), inline_chunk(2, start=1, last=True)],
        [BARE, inline_chunk(2, last=True), USAGE],
        [BARE, inline_chunk(1), inline_chunk(2, start=1, last=True)],
        [sglang_chunk(TRIPLES[:1], 1), BARE, sglang_chunk(TRIPLES[1:], 2, last=True)],
        [vllm_chunk(0), vllm_chunk(1, last=True)],
        parsed_stream(CALL_DELTA, bare=True),
        parsed_stream({"delta": {"reasoning_content": "x"}}, bare=True),
        [*parsed_stream(CALL_DELTA, bare=False), USAGE],
        [*parsed_stream({"delta": {"reasoning": "x"}}, bare=False)[:-1], chunk({"finish_reason": "stop"}, usage=USAGE["usage"])],
        [vllm_chunk(0), BARE, vllm_chunk(1, last=True), USAGE],
        [native_chunk(TRIPLES, None, last=True)],
        [native_chunk(TRIPLES[:1], 1, index=0), native_chunk(TRIPLES, 2, last=True, index=0)],
    ],
    ids=["sglang-new-rows", "sglang-all-rows", "sglang-last-chunk", "inline-new", "inline-last", "inline-late", "sglang-counted", "vllm", "bare-call", "bare-reasoning", "counted-call", "counted-each-chunk", "vllm-split-counted", "native-once", "native-index"],
)  # fmt: skip
def test_streams_whose_chunks_agree(chunks: list[Any]) -> None:
    assert_tokens(streamed(chunks))


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([sglang_chunk(TRIPLES[:1], None), sglang_chunk(TRIPLES[1:], None, last=True)], "without completion_tokens"),
        ([sglang_chunk(TRIPLES[:1], 1), sglang_chunk(TRIPLES[1:], 1, last=True)], "neither repeat nor continue"),
        ([sglang_chunk(TRIPLES[:1], 1), sglang_chunk(TRIPLES[1:], 3, last=True)], "meta_info.completion_tokens says 3"),
        ([sglang_chunk(TRIPLES[:1], 1), sglang_chunk([5], 1, last=True)], "neither repeat nor continue"),
        ([inline_chunk(1), inline_chunk(2, last=True), USAGE], "usage.completion_tokens says 2"),
        ([inline_chunk(1), inline_chunk(2, last=True)], "deltas repeat the token arrays"),
        ([inline_chunk(1), BARE, inline_chunk(2, start=1, last=True)], "text but no generation_token_ids"),
        ([inline_chunk(2), chunk({"delta": {"content": "x"}, "finish_reason": "stop"})], "text but no generation_token_ids"),
        ([sglang_chunk(TRIPLES, 2), chunk({"delta": {"content": "x"}, "finish_reason": "stop"})], "text but no meta_info"),
        (parsed_stream(CALL_DELTA, bare=False), "whether their parser swallowed tokens .*include_usage"),
        (parsed_stream({"delta": {"reasoning": "x"}}, bare=False), "whether their parser swallowed tokens"),
        (parsed_stream({"delta": {"reasoning_content": "x"}}, bare=False), "whether their parser swallowed tokens"),
        ([BARE, chunk({"finish_reason": "stop"})], "carries no token ids"),
        ([vllm_chunk(0), BARE, vllm_chunk(1, last=True)], "text but no token_ids, .*include_usage"),
        ([vllm_chunk(0), vllm_chunk(1, ids=False, last=True)], "text but no token_ids"),
        ([vllm_chunk(0), vllm_chunk(1, ids=False, last=True), USAGE], "usage.completion_tokens says 2"),
        ([vllm_chunk(0), vllm_chunk(1, last=True), vllm_chunk(1, last=True)], "tokens after its finish reason"),
        ([native_chunk(TRIPLES[:1], 1, index=0), native_chunk(TRIPLES[:1], 1, index=1)], "several generations"),
        ([native_chunk(TRIPLES[:1], 1), {**native(), "text": "x"}], "several generations"),
        ([native_chunk(TRIPLES[:1], None), native_chunk(TRIPLES[1:], None, last=True)], "without completion_tokens"),
        ([native_chunk(TRIPLES[:1], 1), native_chunk(TRIPLES[:1], 1)], "broke off after 2 chunks"),
        ([vllm_chunk(0), vllm_chunk(1)], "broke off after 2 chunks"),
        ([vllm_chunk(0), vllm_chunk(1, last=True), chunk({"index": 1, "delta": {"content": "x"}})], "broke off"),
        ([{"type": "response.completed", "response": responses({**TEXT_ITEM, **INLINE}, status="failed")}], "failed"),
        (
            [{"type": "response.completed", "response": responses({**TEXT_ITEM, **INLINE}, usage={"output_tokens": 3})}],
            "usage.output_tokens says 3",
        ),
    ],
)  # fmt: skip
def test_streams_whose_chunks_contradict_each_other(chunks: list[Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        streamed(chunks)


def test_a_stream_that_names_its_ids_says_them_in_every_chunk() -> None:
    def named(token: int, value: float, *, last: bool = False) -> dict[str, Any]:
        content = [{"token": f"token_id:{token}", "logprob": value}]
        reason = "stop" if last else None
        return chunk({"delta": {"content": "x"}, "logprobs": {"content": content}, "finish_reason": reason}, prompt_token_ids=PROMPT)  # fmt: skip

    assert_tokens(streamed([named(4, -0.5), named(5, -0.25, last=True)]))
    with pytest.raises(CaptureError, match="text but no logprobs"):
        streamed([named(4, -0.5), BARE, named(5, -0.25, last=True)])


RUBBISH: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers() | st.text(max_size=2) | st.none(), max_size=2) | st.just({}) | st.just([{}]) | st.just([[1]])  # fmt: skip
STREAMS: list[list[dict[str, Any]]] = [
    VLLM_STREAM,
    parsed_stream(CALL_DELTA, bare=True),
    [sglang_chunk(TRIPLES[:1], 1), sglang_chunk(TRIPLES, 2, last=True), USAGE],
    [native_chunk(TRIPLES[:1], 1, index=0), native_chunk(TRIPLES, 2, last=True, index=0)],
    [inline_chunk(1), inline_chunk(2, start=1, last=True)],
    [
        {"type": "response.output_item.done", "output_index": 0, "item": {**TEXT_ITEM, **INLINE}},
        {"type": "response.completed", "response": responses(TEXT_ITEM)},
    ],
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Everything within a response, as a container and a key in it."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *places(value[key])]]


@given(st.data())
@settings(max_examples=500, deadline=None)
def test_whatever_stands_anywhere_it_is_an_entry_or_refused(data: st.DataObject) -> None:
    whole = [
        *GOOD.values(),
        responses({**TEXT_ITEM, **INLINE}),
        chat({**INLINE, "tool_calls": [CALL], "refusal": None}),
    ]
    is_stream = data.draw(st.booleans())
    response = copy.deepcopy(data.draw(st.sampled_from(STREAMS if is_stream else whole)))
    container, key = data.draw(st.sampled_from(places(response)))
    container[key] = data.draw(RUBBISH)
    with contextlib.suppress(CaptureError):
        entry = streamed(response) if is_stream else captured(response)
        assert entry.generation_token_ids.size == entry.generation_log_probs.size
        assert entry.prompt_token_ids.size
