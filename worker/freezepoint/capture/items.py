"""Output items: what a response said, in the form of OpenAI's Responses API, without token arrays.

A chat message becomes, in this order and as far as there is any of it: a ``reasoning`` item, a ``message`` item, and a
``function_call`` item for each tool call. The last item is the one that carried the arrays, since the generation ends
with it (NeMo Gym's converter decides the same).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freezepoint.capture.arrays import ITEM_FIELDS, Body, objects

Item = dict[str, Any]


def without_arrays(item: Body) -> Item:
    """An output item as it came, without token arrays."""
    return {name: value for name, value in item.items() if name not in ITEM_FIELDS}


def items_of_message(message: Body) -> list[Item]:
    """A chat completion's message as output items; never empty."""
    items: list[Item] = []
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": reasoning}]})
    calls = objects(message.get("tool_calls"))
    parts = _parts(message)
    if parts or not calls:
        items.append(
            {"type": "message", "role": message.get("role") or "assistant", "content": parts or [_text("")]}
        )
    items += [_call(call) for call in calls]
    return items


def items_of_text(text: str) -> list[Item]:
    """A plain completion as output items."""
    return [{"type": "message", "role": "assistant", "content": [_text(text)]}]


def _parts(message: Body) -> list[Item]:
    content, refusal = message.get("content"), message.get("refusal")
    parts: list[Item] = []
    if isinstance(content, str) and content:
        parts.append(_text(content))
    elif isinstance(content, list):
        parts += [_part(part) for part in objects(content)]
    if isinstance(refusal, str) and refusal:
        parts.append({"type": "refusal", "refusal": refusal})
    return parts


def _part(part: Body) -> Item:
    return _text(str(part.get("text", ""))) if part.get("type") in ("text", "output_text") else dict(part)


def _text(text: str) -> Item:
    return {"type": "output_text", "text": text}


def _call(call: Body) -> Item:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    return {
        "type": "function_call",
        "call_id": call.get("id") or "",
        "name": function.get("name") or "",
        "arguments": function.get("arguments") or "",
    }
