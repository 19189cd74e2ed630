"""Bytes to models and back, with orjson. Every failure is a :class:`DecodeError` that names its reason code."""

from __future__ import annotations

import reprlib
from typing import Any, TypeVar

import numpy as np
import orjson
import xxhash
from pydantic import BaseModel, ValidationError

from freezepoint_schemas import arrays
from freezepoint_schemas.arrays import token_ids
from freezepoint_schemas.errors import DecodeError
from freezepoint_schemas.events import (
    EVENTS,
    PACKED,
    SCHEMA_VERSION,
    InputEvent,
    PromptPrefix,
    RolloutClear,
    TokenEntry,
)
from freezepoint_schemas.ledger import LedgerRecord, ProgressRecord
from freezepoint_schemas.prompts import KnownPrompts
from freezepoint_schemas.reasons import Reason
from freezepoint_schemas.results import Result

_ARRAY_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_WRITTEN_AGAIN = {
    model: frozenset(model.model_fields) - frozenset(_ARRAY_FIELDS) for model in set(EVENTS.values())
}
_ENTRY_FIELDS = ("event", *(name for name in TokenEntry.model_fields if name != "event"))
_DEPTH_IN_A_RESULT = 16
_DEPTH_WRITTEN = 200
_LOOKED_AT_BYTES = 4 * 1024
_Model = TypeVar("_Model", bound=BaseModel)


def decode_event(rollout_id: str, value: bytes | None, known: KnownPrompts | None = None) -> InputEvent:
    """The event in a record's value; a null value is a clear, a missing ``rollout_id`` is the key's.

    :param rollout_id: the valid rollout id that the record's key names.
    :param known: prompts of this rollout that were read before; makes this faster, and learns from it.
    :raises DecodeError: with the reason its rollout is masked with.
    """
    if value is None:
        return RolloutClear(rollout_id=rollout_id)
    return _event(rollout_id, _loads(value, known), writable=_is_flat(value))


def _is_flat(value: bytes) -> bool:
    """Whether JSON is nested so little that it can be written again: the only thing that is read and not written is depth,
    1,024 levels against 254. A look at large ones costs more than writing what they hold beside their arrays."""
    return len(value) <= _LOOKED_AT_BYTES and value.count(b"[") + value.count(b"{") <= _DEPTH_WRITTEN


def event_from_object(rollout_id: str, body: Any) -> InputEvent:
    """The event in a decoded JSON object (see :func:`decode_event`), which may also have been made in memory."""
    return _event(rollout_id, body, writable=False)


def _event(rollout_id: str, body: Any, *, writable: bool) -> InputEvent:
    """:param writable: it is known that it can be written as JSON again, inside a result."""
    if not isinstance(body, dict):
        raise DecodeError(
            Reason.UNDECODABLE_RECORD, f"the value is a JSON {type(body).__name__}, not an object"
        )
    if body.get("rollout_id", rollout_id) != rollout_id:
        raise DecodeError(Reason.FOREIGN_RECORD, f"the body names rollout {_short(body['rollout_id'])}")
    name = event_name(body)
    if name is None:
        raise DecodeError(Reason.UNDECODABLE_RECORD, _no_event(body))
    version = body.get("schema_version", SCHEMA_VERSION)
    if type(version) is int and version > SCHEMA_VERSION:
        raise DecodeError(
            Reason.UNSUPPORTED_SCHEMA, f"schema_version {version} is newer than {SCHEMA_VERSION}"
        )
    fields = {**body, "rollout_id": rollout_id, "event": name}
    if not writable:
        _require_writable(EVENTS[name], fields)
    if name == "token_entry":
        _lift_inline_arrays(fields)
    return _validated(EVENTS[name], fields)


def _no_event(body: dict[str, Any]) -> str:
    """What names no event is meant for a token entry, most likely, with that field spelt otherwise."""
    if "event" in body:
        return f"unknown event {_short(body['event'])}; there are {', '.join(EVENTS)}"
    close = [_short(name) for name in body if "prompt" in name[:80]]
    spelt = f" (there is {', '.join(close[:3])})" if close else ""
    return f"neither an event nor a token entry: prompt_token_ids is missing{spelt}"


def event_name(body: dict[str, Any]) -> str | None:
    """The known event this object is, or None; an object without ``event`` that has prompt tokens is a token entry."""
    if "event" not in body:
        return "token_entry" if "prompt_token_ids" in body else None
    name = body["event"]
    return name if isinstance(name, str) and name in EVENTS else None


def _require_writable(model: type[InputEvent], fields: dict[str, Any]) -> None:
    """JSON is read to a greater depth than it is written, and an object from memory may hold what JSON cannot (integers
    beyond 64 bit, lone surrogates): what could not be written again, inside a result, is refused before anything
    depends on it. Token arrays have their own check."""
    written = _WRITTEN_AGAIN[model]
    nested: Any = [value for name, value in fields.items() if name in written]
    for _ in range(_DEPTH_IN_A_RESULT):
        nested = [nested]
    try:
        orjson.dumps(nested, default=_nothing)
    except TypeError as error:
        raise DecodeError(Reason.INVALID_ENTRY, f"cannot be written as JSON again: {error}") from None


def _nothing(_: Any) -> None:
    """Stands for what is no JSON in an object from memory: arrays are checked elsewhere."""


def _lift_inline_arrays(fields: dict[str, Any]) -> None:
    """Old lines carry the token arrays inline on one output item: move them off it and note which one it was."""
    items = fields.get("output_items")
    if not isinstance(items, list):
        return
    carriers = [
        index
        for index, item in enumerate(items)
        if isinstance(item, dict) and item.get("generation_token_ids") is not None
    ]
    if not carriers:
        return
    if len(carriers) > 1:
        raise DecodeError(Reason.INVALID_ENTRY, f"{len(carriers)} output items carry token arrays")
    index = carriers[0]
    if fields.get("token_item_index") not in (None, index):
        raise DecodeError(
            Reason.INVALID_ENTRY, f"output item {index} carries token arrays, token_item_index another"
        )
    if isinstance(fields.get("prompt_token_ids"), np.ndarray):
        fields["prompt_token_ids"] = fields["prompt_token_ids"].tolist()  # to be compared with the item's
    item = dict(items[index])
    for name in (*_ARRAY_FIELDS, "routed_experts"):
        inline = item.pop(name, None)
        if inline is None:
            continue
        if name == "prompt_token_ids" and fields.get("prompt_prefix") is not None:
            _compare_prompts(fields, inline)
        elif fields.get(name) is None:
            fields[name] = inline
        elif fields[name] != inline:
            raise DecodeError(Reason.INVALID_ENTRY, f"{name} of the entry and of its output item differ")
    fields["output_items"] = [*items[:index], item, *items[index + 1 :]]
    fields["token_item_index"] = index


def _compare_prompts(fields: dict[str, Any], inline: Any) -> None:
    """A prompt by reference beside a whole one on an output item: the reference must say the same. Without the entry's
    own tokens nobody could tell whether the item's come after the prefix or begin with it."""
    try:
        prefix = PromptPrefix.model_validate(fields["prompt_prefix"])
        rest, whole = token_ids(fields.get("prompt_token_ids")), token_ids(inline)
    except ValueError as error:
        raise DecodeError(
            Reason.INVALID_ENTRY, f"prompt_token_ids beside a prefix: {str(error)[:200]}"
        ) from None
    head, tail = whole[: prefix.length], whole[prefix.length :]
    digest = xxhash.xxh3_128_hexdigest(head.astype("<i4", copy=False).data)
    if head.size != prefix.length or digest != prefix.digest or not np.array_equal(tail, rest):
        raise DecodeError(
            Reason.INVALID_ENTRY,
            "prompt_token_ids of an output item are not the prompt that the entry refers to",
        )


def _validated(model: type[_Model], fields: dict[str, Any]) -> _Model:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise DecodeError(Reason.INVALID_ENTRY, _first_problem(error)) from None


def _first_problem(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    where = ".".join(str(part)[:100] for part in problems[0]["loc"]) or "record"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{where[:100]}: {problems[0]['msg'][:200]}{more}"


def _loads(value: bytes, known: KnownPrompts | None = None) -> Any:
    try:
        return orjson.loads(value) if known is None else known.loads(value)
    except orjson.JSONDecodeError as error:
        raise DecodeError(Reason.UNDECODABLE_RECORD, f"no JSON: {error.msg[:200]}") from None


def _short(value: Any) -> str:
    """The value in a few words. ``repr`` would recurse as deep as the value is nested, and write all of it first."""
    return reprlib.repr(value)[:80]


def encode_event(event: InputEvent, *, packed: bool = False) -> bytes:
    """The event's JSON; fields that are null are left out."""
    if packed and isinstance(event, TokenEntry):
        try:
            return orjson.dumps(_packed_entry(event))
        except TypeError:  # objects within its items, which the model may know how to write
            pass
    return orjson.dumps(
        {"event": event.event, **event.model_dump(context=PACKED if packed else None, exclude_none=True)}
    )


def _packed_entry(entry: TokenEntry) -> dict[str, Any]:
    """What its model's serializers make of it, at three quarters of the price: each call's entry is written so."""
    fields = {name: value for name in _ENTRY_FIELDS if (value := getattr(entry, name)) is not None}
    fields["prompt_token_ids"] = arrays.pack(entry.prompt_token_ids)
    fields["generation_token_ids"] = arrays.pack(entry.generation_token_ids)
    fields["generation_log_probs"] = arrays.pack_floats(entry.generation_log_probs)
    if entry.prompt_prefix is not None:
        fields["prompt_prefix"] = entry.prompt_prefix.model_dump()
    if entry.routed_experts is not None:
        fields["routed_experts"] = arrays.pack_routes(entry.routed_experts)
    return fields


def encode_result(result: Result, *, packed: bool = True) -> bytes:
    """The result's JSON, by default with packed arrays."""
    return orjson.dumps(result.model_dump(context=PACKED if packed else None, exclude_none=True))


def decode_result(value: bytes) -> Result:
    """:raises DecodeError: no result of a schema version this library reads."""
    body = _loads(value)
    if not isinstance(body, dict):
        raise DecodeError(Reason.UNDECODABLE_RECORD, "a result must be a JSON object")
    return _validated(Result, body)


def encode_ledger(record: LedgerRecord | ProgressRecord) -> bytes:
    """A ledger record's JSON."""
    return orjson.dumps(record.model_dump(mode="json", exclude_defaults=True))


def decode_ledger(value: bytes) -> LedgerRecord:
    """:raises DecodeError: no ledger record of a version this worker reads."""
    return _validated(LedgerRecord, _loads(value))


def decode_progress(value: bytes) -> ProgressRecord:
    """:raises DecodeError: no progress record of a version this worker reads."""
    return _validated(ProgressRecord, _loads(value))
