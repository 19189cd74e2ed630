"""What callers hand to the sink, as the contract's entry: our own model, a dict, or anything with an entry's attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from freezepoint.capture.routes import decode_routes
from freezepoint.errors import DecodeError, InputError
from freezepoint_schemas import codec
from freezepoint_schemas.arrays import AnyArray, integer_array
from freezepoint_schemas.events import SCHEMA_VERSION, InputEvent, TokenEntry
from freezepoint_schemas.topics import is_rollout_id

GYM_SCHEMA_VERSION_MAX: Final = 3
"""NeMo Gym counts its own records' versions: 2 added the parent and ``cum_len``, 3 how the parent was found. What they
share with version 1 means the same."""

_FIELDS = tuple(name for name in TokenEntry.model_fields if name not in {"event", "schema_version"})
_ARRAYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def named(run: str, rollout_id: Any) -> str:
    """The rollout id with the run's name before it.

    :raises InputError: no valid rollout id.
    """
    whole = f"{run}.{rollout_id}" if run else rollout_id
    if not isinstance(rollout_id, str) or not rollout_id or not is_rollout_id(whole):
        raise InputError(
            f"{str(rollout_id)[:80]!r} is no valid rollout id{f' behind the run name {run!r}' if run else ''}: letters, "
            "digits, '.', '_' and '-', at most 255 with the run's name, beginning with a letter or digit"
        )
    return whole


def event_of(rollout_id: str, name: str, fields: Mapping[str, Any]) -> InputEvent:
    """The contract's event of that name.

    :raises InputError: a field is not what the contract allows.
    """
    try:
        return codec.event_from_object(rollout_id, {"event": name, **fields})
    except DecodeError as error:
        raise InputError(f"{name} of rollout {rollout_id}: {error}") from None


def rollout_of(given: Any) -> Any:
    """The rollout id that an entry names, whatever it is."""
    return given.get("rollout_id") if isinstance(given, Mapping) else getattr(given, "rollout_id", None)


def entry_of(given: Any, rollout_id: str) -> TokenEntry:
    """The entry, under that rollout id. Attributes the contract does not know are left behind.

    :raises InputError: a field is missing or not what the contract allows.
    """
    if isinstance(given, TokenEntry):
        return given.model_copy(update={"rollout_id": rollout_id, "routed_experts": _routes(given)})
    read: Callable[[str], Any] = given.get if isinstance(given, Mapping) else partial(_attribute, given)
    fields = {name: value for name in _FIELDS if (value := read(name)) is not None and name != "rollout_id"}
    for name in _ARRAYS:
        if name in fields:
            fields[name] = _array(fields[name])
    if "routed_experts" in fields:
        fields["routed_experts"] = _narrow(decode_routes(fields["routed_experts"]))
    if "output_items" in fields:
        fields["output_items"] = [_item(item) for item in fields["output_items"]]
    fields["schema_version"] = _version(read("schema_version"), read("cum_len"), fields)
    entry = event_of(rollout_id, "token_entry", fields)
    assert isinstance(entry, TokenEntry)
    return entry


def _attribute(given: Any, name: str) -> Any:
    return getattr(given, name, None)


def _version(version: Any, cumulative_length: Any, fields: Mapping[str, Any]) -> Any:
    """Our version for a record of Gym's later ones, as far as its count of tokens proves that the prompt is whole."""
    if (
        type(version) is not int
        or not SCHEMA_VERSION < version <= GYM_SCHEMA_VERSION_MAX
        or cumulative_length is None
    ):
        return SCHEMA_VERSION if version is None else version
    held = sum(len(fields.get(name, ())) for name in _ARRAYS[:2])
    if held != cumulative_length:
        raise InputError(
            f"the entry's cum_len is {cumulative_length}, its prompt and generation hold {held} tokens: entries must "
            "carry the whole prompt (NeMo Gym: token_id_capture.delta_records: false); the sink shortens them itself"
        )
    return SCHEMA_VERSION


def _array(value: Any) -> Any:
    """Lists, packed objects and numpy arrays as they are; other sequences and libraries' arrays as one of these."""
    if isinstance(value, list | Mapping | np.ndarray):
        return value
    if hasattr(value, "__array__") or isinstance(value, memoryview):
        return np.asarray(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value


def _item(item: Any) -> Any:
    return item.model_dump(mode="json") if hasattr(item, "model_dump") else item


def _routes(entry: TokenEntry) -> Any:
    return _narrow(entry.routed_experts)


def _narrow(value: Any) -> Any:
    """An integer array in the smallest type that holds it: what an engine computes with is often eight times as large."""
    if not isinstance(value, np.ndarray):
        return value
    whole: AnyArray | None = integer_array(value, value.ndim)
    return value if whole is None else whole
