"""From a served response to a token entry: exactly the ids that the server reports, never tokenized again.

| form | generated ids | log probabilities | prompt ids |
|---|---|---|---|
| message or output item | ``generation_token_ids`` | ``generation_log_probs`` | ``prompt_token_ids``, all beside the content |
| vLLM, ``return_token_ids`` | ``token_ids`` of the choice | ``logprobs.content`` or ``.token_logprobs`` | of the response or choice |
| SGLang | ``meta_info.output_token_logprobs`` | the same | ``prompt_token_ids``, or ``meta_info.input_token_logprobs`` |
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from freezepoint.capture.arrays import (
    GENERATION,
    PROMPT,
    ROUTES,
    Body,
    Found,
    carries,
    count_usage,
    from_choice,
    from_item,
    from_meta_info,
    objects,
)
from freezepoint.capture.items import Item, items_of_message, items_of_text, without_arrays
from freezepoint.capture.routes import decode_routes
from freezepoint.capture.streams import StreamAssembler
from freezepoint.errors import ArrayError, CaptureError, DecodeError
from freezepoint_schemas import codec
from freezepoint_schemas.events import TokenEntry


def entry_from_response(  # noqa: PLR0913 - what a server knows beside the response
    response: Any,
    *,
    rollout_id: str,
    model_call_id: str | None = None,
    created_at: float | None = None,
    model: str | None = None,
    parent_call_id: str | None = None,
    policy_version: int | str | None = None,
    prompt_token_ids: Sequence[int] | None = None,
) -> TokenEntry:
    """The token entry of one model call.

    :param response: an OpenAI Chat Completions, Completions or Responses object or SGLang's native one: a dict, JSON, or
        anything with ``model_dump``.
    :param model_call_id: default: the response's own id, or a new one.
    :param created_at: Unix seconds; default: the response's, or now.
    :param prompt_token_ids: where the caller sent ids and the response does not repeat them.
    :raises CaptureError: not exactly one generation with its prompt ids, generated ids and log probabilities; or parts of
        the response contradict each other.
    """
    body, found = _body(response), Found()
    if prompt_token_ids is not None:
        found.add(PROMPT, list(prompt_token_ids), "the argument")
    items, carrier, choice = _read(body, found)
    count_usage(found, body.get("usage"))
    arrays = found.checked()
    _check_said(items, arrays)
    fields: dict[str, Any] = {
        **arrays,
        "model_call_id": model_call_id or _text(body, "id") or uuid.uuid4().hex,
        "model": model or _text(body, "model") or "",
        "output_items": items,
        "token_item_index": carrier,
        "created_at": _created_at(body) if created_at is None else float(created_at),
        "parent_call_id": parent_call_id,
        "policy_version": policy_version,
        "finish_reason": _finish_reason(body, choice),
        "response_id": _text(body, "id"),
    }
    try:
        fields[ROUTES] = decode_routes(arrays.get(ROUTES))
        entry = codec.event_from_object(rollout_id, {"event": "token_entry", **fields})
    except (DecodeError, ArrayError) as error:
        raise CaptureError(f"the response cannot be an entry: {error}") from None
    assert isinstance(entry, TokenEntry)
    return entry


def entry_from_stream(chunks: Iterable[Any], **known: Any) -> TokenEntry:
    """The token entry of a streamed model call.

    :param chunks: all chunks (Chat Completions, Completions, SGLang) or events (Responses) in order: dicts, JSON, or
        objects with ``model_dump``.
    :param known: as in :func:`entry_from_response`.
    :raises CaptureError: also where the stream did not come to its end.
    """
    assembler = StreamAssembler()
    for chunk in chunks:
        assembler.add(_body(chunk))
    return entry_from_response(assembler.response(), **known)


def _body(response: Any) -> Body:
    if isinstance(response, bytes | bytearray | memoryview | str):
        try:
            response = orjson.loads(response)
        except orjson.JSONDecodeError as error:
            raise CaptureError(f"the response is no JSON: {error.msg}") from None
    elif hasattr(response, "model_dump"):
        response = response.model_dump()
    if isinstance(response, list) and response:
        if len(response) > 1:
            raise CaptureError(f"the response holds {len(response)} generations; capture needs one (n=1)")
        response = response[0]
    if not isinstance(response, Mapping):
        raise CaptureError(f"the response is a {type(response).__name__}, not an object")
    return response


def _read(body: Body, found: Found) -> tuple[list[Item], int, Body]:
    """The output items, which of them carried the arrays, and the choice (empty where there is none)."""
    if isinstance(body.get("error"), Mapping):
        raise CaptureError(f"the response is an error: {str(body['error'].get('message'))[:200]}")
    if isinstance(body.get("output"), list):
        return *_read_output(body, found), {}
    if isinstance(body.get("choices"), list):
        return _read_choices(body, found)
    if isinstance(body.get("meta_info"), Mapping):
        return *_read_native(body, found), {}
    raise CaptureError("the response has neither choices, output nor meta_info")


def _read_output(body: Body, found: Found) -> tuple[list[Item], int]:
    _check_status(body)
    items: list[Body] = [item for item in body["output"] if isinstance(item, Mapping)]
    carriers = [index for index, item in enumerate(items) if carries(item)]
    if len(carriers) > 1:
        raise CaptureError(f"{len(carriers)} output items carry token arrays; capture needs one generation")
    for index in carriers:
        from_item(found, items[index], f"output[{index}]")
    found.add(PROMPT, body.get(PROMPT), PROMPT)
    carrier = carriers[0] if carriers else len(items) - 1
    return [without_arrays(item) for item in items], carrier


def _check_status(body: Body) -> None:
    """A generation that ended, by itself or at its limit of tokens."""
    status, details = body.get("status"), body.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, Mapping) else None
    if status not in (None, "completed", "incomplete"):
        raise CaptureError(f"the response is {status}, not completed")
    if status == "incomplete" and reason not in (None, "max_output_tokens"):
        raise CaptureError(f"the response is incomplete because of {reason}")


def _read_choices(body: Body, found: Found) -> tuple[list[Item], int, Body]:
    choices = body["choices"]
    if len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise CaptureError(f"the response has {len(choices)} choices; capture needs exactly one (n=1)")
    choice = choices[0]
    if choice.get("finish_reason") in ("error", "content_filter"):
        raise CaptureError(f"the generation ended with {choice['finish_reason']}")
    message = choice.get("message")
    if isinstance(message, Mapping):
        if carries(message):
            from_item(found, message, "choices[0].message")
        items = items_of_message(message)
    else:
        items = items_of_text(str(choice.get("text") or ""))
    from_choice(found, choice, body, "choices[0]")
    return items, len(items) - 1, choice


def _read_native(body: Body, found: Found) -> tuple[list[Item], int]:
    """SGLang's own /generate."""
    found.add(PROMPT, body.get(PROMPT), PROMPT)
    from_meta_info(found, body["meta_info"], "meta_info")
    found.add(GENERATION, body.get("output_ids"), "output_ids")
    return items_of_text(str(body.get("text") or "")), 0


def _check_said(items: list[Item], arrays: Mapping[str, Any]) -> None:
    """Whoever says something has generated something. :raises CaptureError: nothing was, by the arrays."""
    if arrays[GENERATION]:
        return
    for item in items:
        parts = [*objects(item.get("content")), *objects(item.get("summary"))]
        if item.get("type") == "function_call" or any(part.get("text") for part in parts):
            raise CaptureError("the response has text or a tool call, but no generated token")


def _text(body: Body, name: str) -> str | None:
    meta = body.get("meta_info")
    value = body.get(name) or (meta.get(name) if isinstance(meta, Mapping) else None)
    return value if isinstance(value, str) and value else None


def _created_at(body: Body) -> float:
    for name in ("created_at", "created"):
        if type(body.get(name)) in (int, float):
            return float(body[name])
    return time.time()


def _finish_reason(body: Body, choice: Body) -> str | None:
    """The choice's, SGLang's (an object with a type), or a Responses object's status with what made it incomplete."""
    meta, details = body.get("meta_info"), body.get("incomplete_details")
    reason = choice.get("finish_reason") or (meta.get("finish_reason") if isinstance(meta, Mapping) else None)
    if isinstance(reason, Mapping):
        reason = reason.get("type")
    if reason is None and isinstance(details, Mapping):
        reason = details.get("reason")
    return reason if isinstance(reason, str) else _text(body, "status")
