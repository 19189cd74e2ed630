"""An explanation as one page that needs nothing but itself: no network, no other file."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import orjson

from freezepoint.core.frozen import FrozenLog
from freezepoint.inspection.explain import Explanation
from freezepoint.inspection.standing import kept, said
from freezepoint.wording import counted
from freezepoint_schemas.results import Result, Trace

TOKENS_MAX = 2_000_000
"""Of all strips together; a page with more would be too large to open."""
ITEM_CALLS_MAX = 2_000
TEXT_MAX = 20_000
_TEXT_FIELDS = ("text", "content", "arguments", "output", "summary", "refusal", "reasoning")
_DEPTH_MAX = 4


def as_page(log: FrozenLog, explanation: Explanation) -> str:
    """The whole page. What producers wrote stands in it as JSON without any ``<``, and is shown as text only."""
    strips, left_out = _strips(explanation.result)
    owners = {span.call_id: trace.role for trace in explanation.result.traces for span in trace.spans}
    ordered = sorted(log.entries, key=lambda entry: (entry.created_at, entry.model_call_id))
    data = {
        "facts": explanation.facts,
        "kept": kept(explanation.facts),
        "said": said(published) if (published := explanation.facts["published"]) else None,
        "strips": strips,
        "strips_left_out": left_out,
        "items": [
            {
                "call_id": entry.model_call_id,
                "role": owners.get(entry.model_call_id),
                "items": [
                    {"type": str(item.get("type", "item"))[:80], "text": _shown(item)}
                    for item in entry.output_items
                ],
            }
            for entry in ordered[:ITEM_CALLS_MAX]
        ],
        "items_left_out": max(0, len(ordered) - ITEM_CALLS_MAX),
    }
    template = files(__package__).joinpath("page.html").read_text("utf-8")
    return template.replace("/*DATA*/", _embedded(data), 1)


def _embedded(data: Any) -> str:
    """JSON that cannot end its own script element."""
    return orjson.dumps(data).decode().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _strips(result: Result) -> tuple[list[dict[str, Any]], int]:
    """The traces that fit, in order, and how many tokens the others have."""
    strips: list[dict[str, Any]] = []
    drawn = left_out = 0
    for trace in result.traces:
        if drawn + trace.token_ids.size > TOKENS_MAX:
            left_out += trace.token_ids.size
        else:
            drawn += trace.token_ids.size
            strips.append(_strip(trace))
    return strips, left_out


def _strip(trace: Trace) -> dict[str, Any]:
    return {
        "role": trace.role,
        "token_ids": trace.token_ids.tolist(),
        "log_probs": trace.log_probs.round(4).tolist(),
        "spans": [span.model_dump() for span in trace.spans],
        "shared": [span.model_dump(include={"start", "end"}) for span in trace.shared],
    }


def _shown(item: dict[str, Any]) -> str:
    """An item as a reader wants it: its text where it has any, else all of it as JSON."""
    text = (
        "\n".join(_texts(item, _DEPTH_MAX))
        or orjson.dumps(item, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode()
    )
    if len(text) > TEXT_MAX:
        return f"{text[:TEXT_MAX]}\n... {counted(len(text) - TEXT_MAX, 'more character')}"
    return text


def _texts(value: Any, depth: int) -> list[str]:
    if isinstance(value, str):
        return [value] if value else []
    if depth == 0:
        return []
    if isinstance(value, list):
        return [text for part in value for text in _texts(part, depth - 1)]
    if isinstance(value, dict):
        name = [f"{value['name']}:"] if isinstance(value.get("name"), str) else []
        found = [text for field in _TEXT_FIELDS for text in _texts(value.get(field), depth - 1)]
        return [*name, *found] if found else []
    return []
