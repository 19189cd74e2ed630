"""What an unmasked result may hold, told from the records alone: naive, quadratic, and with none of the worker's code but
the partitioner's key. It knows one direction only: a result that it cannot account for must be masked."""

from __future__ import annotations

import struct
from base64 import b64decode
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson
import xxhash

from freezepoint.core.records import InputRecord
from freezepoint_schemas.results import Result

_FORMATS = {"u8": "B", "u16": "H", "i32": "i", "i64": "q", "f32": "f", "f64": "d"}
_ARRAYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


class UnaccountedError(AssertionError):
    """An unmasked result holds, or lacks, what the records do not account for."""


@dataclass(slots=True)
class Life:
    """The records of one life, read naively."""

    forms: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    intents: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    closing: dict[str, Any] | None = None

    def add(self, rollout_id: str, body: Any) -> None:
        if not isinstance(body, dict) or body.get("rollout_id", rollout_id) != rollout_id:
            raise UnaccountedError("a record of the rollout was lost")
        name = body.get("event", "token_entry")
        call_id = body.get("model_call_id")
        match name:
            case "token_entry":
                self.forms.setdefault(str(call_id), []).append(_lifted(body))
            case "call_intent":
                self.intents.add(str(call_id))
            case "call_cancelled":
                self.cancelled.add(str(call_id))
            case "rollout_complete":
                self.closing = body
            case _:
                raise UnaccountedError(f"{name} in an unmasked life")


def account_for(result: Result, records: Iterable[InputRecord]) -> None:
    """:raises UnaccountedError: the result is unmasked and should not be, or trains what was not sampled so."""
    if result.mask_sample:
        return
    first, freeze = result.snapshot.first_offset, result.snapshot.freeze_offset
    life = Life()
    for value, in_parts in _values(result.rollout_id, records, first, freeze):
        try:
            body = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise UnaccountedError("a record of the rollout was lost") from None
        if in_parts or not (isinstance(body, dict) and body.get("event") == "rollout_clear"):
            life.add(result.rollout_id, body)
    if life.closing is None:
        raise UnaccountedError("nothing completed the rollout")
    if life.intents - life.forms.keys() - life.cancelled:
        raise UnaccountedError("an announced call is missing")
    if life.closing.get("n_calls") not in (None, len(life.forms)):
        raise UnaccountedError("calls are missing")
    _account_for_tokens(result, {call_id: _agreed(life, call_id) for call_id in life.forms})


def _values(
    rollout_id: str, records: Iterable[InputRecord], first: int, freeze: int
) -> Iterable[tuple[bytes, bool]]:
    """The whole values of a life, and whether they came in parts; a clear may be its first record."""
    pending: dict[str, dict[int, bytes]] = {}
    whole: set[str] = set()
    for record in records:
        if record.key != rollout_id.encode() or not first <= record.offset <= freeze or record.value is None:
            continue
        names = [content for name, content in record.headers if name == "freezepoint-part"]
        if not names:
            yield record.value, False
            continue
        value_id, index, count = names[-1].decode("ascii").split(":")
        if value_id in whole:
            continue
        known = pending.setdefault(value_id, {})
        if known.setdefault(int(index), record.value) != record.value:
            raise UnaccountedError("a part came twice with different content")
        if len(known) == int(count):
            value = b"".join(known[position] for position in range(int(count)))
            if xxhash.xxh3_128_hexdigest(value) != value_id:
                raise UnaccountedError("a value is not what its id says")
            whole.add(value_id)
            del pending[value_id]
            yield value, True
    if pending:
        raise UnaccountedError("parts are missing")


def _lifted(body: dict[str, Any]) -> dict[str, Any]:
    """The entry's arrays as lists, wherever they stood."""
    inline = [
        item
        for item in body.get("output_items") or ()
        if isinstance(item, dict) and item.get("generation_token_ids") is not None
    ]
    arrays = {name: body.get(name) for name in _ARRAYS}
    for item in inline:
        arrays = {name: item.get(name) if known is None else known for name, known in arrays.items()}
    return {name: _plain(value) for name, value in arrays.items()} | {
        "prompt_prefix": body.get("prompt_prefix")
    }


def _plain(value: Any) -> list[Any]:
    if not isinstance(value, dict):
        if bool in map(type, value):
            raise UnaccountedError("a truth value among numbers")
        return list(value)
    raw, form = b64decode(value["data"]), _FORMATS[value["dtype"]]
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(form)}{form}", raw))


def _agreed(life: Life, call_id: str) -> tuple[list[int], list[int], list[float]]:
    """The call's prompt, generation and log probabilities, on which all its forms have to agree."""
    found: list[tuple[list[int], list[int], list[float]]] = []
    for form in life.forms[call_id]:
        prompt = _prompt(life, form, depth=0)
        if prompt is None:
            raise UnaccountedError("a prompt refers to nothing")
        found.append((prompt, form["generation_token_ids"], [float(x) for x in form["generation_log_probs"]]))
    if any(other != found[0] for other in found):
        raise UnaccountedError("a call has two payloads")
    return found[0]


def _prompt(life: Life, form: dict[str, Any], depth: int) -> list[int] | None:
    prefix = form["prompt_prefix"]
    rest: list[int] = form["prompt_token_ids"]
    if prefix is None:
        return rest
    for target in life.forms.get(prefix["call_id"], ()) if depth < len(life.forms) * 4 else ():
        before = None if target is form else _prompt(life, target, depth + 1)
        if before is None:
            continue
        head = [*before, *target["generation_token_ids"]][: prefix["length"]]
        packed = struct.pack(f"<{len(head)}i", *head)
        if len(head) == prefix["length"] and xxhash.xxh3_128_hexdigest(packed) == prefix["digest"]:
            return [*head, *rest]
    return None


def _account_for_tokens(result: Result, calls: dict[str, tuple[list[int], list[int], list[float]]]) -> None:
    trained: set[str] = set()
    for trace in result.traces:
        tokens, log_probs = trace.token_ids.tolist(), trace.log_probs.tolist()
        position = 0
        for span in trace.spans:
            prompt, generation, measured = calls[span.call_id]
            stop = position + len(generation)
            if span.call_id in trained:
                raise UnaccountedError("a call is trained twice")
            if tokens[: span.start] != prompt or tokens[span.start : span.end] != generation:
                raise UnaccountedError("a span does not hold its call's tokens after its call's prompt")
            if log_probs[position:stop] != measured:
                raise UnaccountedError("a span does not hold its call's log probabilities")
            position = stop
            trained.add(span.call_id)
        if position != len(log_probs):
            raise UnaccountedError("log probabilities of no span")
    if not trained:
        raise UnaccountedError("nothing to train in an unmasked result")
