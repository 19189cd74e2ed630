"""What a frozen rollout looks like to who reads it from memory: entries as plain objects, and the snapshot of them.

The names are NeMo Gym's, so that its own finalizer takes these snapshots for its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from freezepoint.core.frozen import FrozenLog
from freezepoint.core.snapshot import take_snapshot
from freezepoint.errors import DecodeError
from freezepoint_schemas import codec
from freezepoint_schemas.events import SCHEMA_VERSION, TokenEntry
from freezepoint_schemas.reasons import Reason

_GYM_SCHEMA_VERSIONS = (2, 3)


class CapturedEntry(BaseModel):
    """A token entry with lists for arrays, as JSON would hold it.

    ``prompt_token_ids`` is the whole prompt, unless ``prompt_prefix`` is set: a reference that leads nowhere.
    """

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    schema_version: int = 1
    rollout_id: str
    model_call_id: str
    model: str = ""
    prompt_token_ids: list[int]
    prompt_prefix: dict[str, Any] | None = None
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    routed_experts: Any = None
    output_items: list[dict[str, Any]] = []
    token_item_index: int | None = None
    created_at: float = 0.0
    parent_call_id: str | None = None
    policy_version: int | str | None = None
    finish_reason: str | None = None
    response_id: str | None = None


@dataclass(frozen=True)
class CaptureSnapshot:
    """A rollout's log, frozen.

    ``snapshot_id`` and ``version`` name what was read, for a conditional drop. ``incomplete``: something of the rollout
    was lost or contradicts itself; it must not be trained on. ``log``: the same for the builder, linear in its tokens.
    """

    rollout_id: str
    snapshot_id: str
    version: int
    incomplete: bool
    log: FrozenLog = field(repr=False, compare=False)

    @cached_property
    def entries(self) -> tuple[CapturedEntry, ...]:
        """One entry per call, in order of arrival, which means nothing. Prompts are whole: quadratic in the turns."""
        prompts: dict[str, list[int]] = {}
        if any(entry.prompt_prefix is not None for entry in self.log.entries):
            snapshot = take_snapshot(self.log)
            prompts = {
                call.call_id: snapshot.tree.tokens(call.prompt_node).tolist() for call in snapshot.calls
            }
        return tuple(self._captured(entry, prompts) for entry in self.log.entries)

    def _captured(self, entry: TokenEntry, prompts: Mapping[str, list[int]]) -> CapturedEntry:
        fields = {name: _plain(getattr(entry, name)) for name in TokenEntry.model_fields if name != "event"}
        fields["rollout_id"] = self.rollout_id
        if entry.prompt_prefix is not None and entry.model_call_id in prompts:
            fields |= {"prompt_prefix": None, "prompt_token_ids": prompts[entry.model_call_id]}
        return CapturedEntry.model_construct(**fields)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.model_dump() if isinstance(value, BaseModel) else value


def entry_fields(value: object) -> dict[str, Any]:
    """A token entry's fields from a mapping, a model, or any object that has them as attributes; null ones left out."""
    if isinstance(value, Mapping):
        body = dict(value)
    elif isinstance(value, BaseModel) and not isinstance(value, TokenEntry):
        body = value.model_dump()
    else:
        body = {name: getattr(value, name) for name in TokenEntry.model_fields if hasattr(value, name)}
    return {name: field for name, field in body.items() if field is not None}


def _contract_version(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields under our version, where NeMo Gym's count of tokens proves that a record of its later ones (2 added the
    parent, 3 how it was found) holds the whole prompt."""
    body = dict(fields)
    if body.get("schema_version") in _GYM_SCHEMA_VERSIONS:
        try:
            held = len(body["prompt_token_ids"]) + len(body["generation_token_ids"])
        except (KeyError, TypeError):
            return body
        if body.get("cum_len") == held:
            body["schema_version"] = SCHEMA_VERSION
    return body


def token_entry(rollout_id: str, fields: Mapping[str, Any]) -> TokenEntry:
    """The checked entry of these fields.

    :raises DecodeError: they are none, or name another rollout.
    """
    event = codec.event_from_object(rollout_id, _contract_version(fields))
    if not isinstance(event, TokenEntry):
        raise DecodeError(Reason.INVALID_ENTRY, f"a {event.event} event, not a token entry")
    return event
