"""Every code that says why: why a result is masked, why a record went to the dead letters."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")


class Reason(StrEnum):
    """Why a result is masked. The order here is the order in a result's ``reasons``.

    A code that is not among these is one of a newer release's: it reads as a reason like the others, named and valued so.
    """

    NO_RECORDS = "no_records"
    """The rollout was completed without any record."""
    CAPTURE_INCOMPLETE = "capture_incomplete"
    """A producer said that a call could not be captured, or a part of a split record never came."""
    DANGLING_INTENT = "dangling_intent"
    """A call was announced and neither recorded nor cancelled."""
    CALL_COUNT_MISMATCH = "call_count_mismatch"
    """The complete event's ``n_calls`` is not the number of distinct calls recorded."""
    CONFLICTING_ENTRY = "conflicting_entry"
    """Two different payloads came under one ``model_call_id``; the first was kept as evidence."""
    PREFIX_UNRESOLVED = "prefix_unresolved"
    """A prompt refers to a call that is not recorded, or to more tokens than it has."""
    PREFIX_MISMATCH = "prefix_mismatch"
    """A prompt refers to tokens whose digest differs."""
    UNSUPPORTED_SCHEMA = "unsupported_schema"
    """A record had a newer ``schema_version`` than this worker reads."""
    UNDECODABLE_RECORD = "undecodable_record"
    """A record was no JSON object or of no known event."""
    FOREIGN_RECORD = "foreign_record"
    """A record's body named another rollout than its key."""
    INVALID_ENTRY = "invalid_entry"
    """A record of a known event failed validation."""
    ROLLOUT_TOO_LARGE = "rollout_too_large"
    """A record or the whole rollout was above the worker's limits."""
    INPUT_EXPIRED = "input_expired"
    """The topic's retention removed records before they were read."""
    UNRESOLVED_RETRY = "unresolved_retry"
    """Calls with the same prompt and no later call that tells which one was kept."""
    MULTIPLE_ROOTS = "multiple_roots"
    """Not exactly one root call (single-response delivery)."""
    MULTIPLE_CHAINS = "multiple_chains"
    """Not exactly one chain (single-response delivery)."""
    NO_SAFE_CHAIN = "no_safe_chain"
    """Every path from a root to a leaf crosses a quarantined call."""
    NO_TRAINABLE_TOKENS = "no_trainable_tokens"
    """Every generation is empty."""
    ROUTES_MISMATCH = "routes_mismatch"
    """A call's routed experts are not one row per token (masks only where the worker is told so)."""
    BUILDER_NOT_DELIVERABLE = "builder_not_deliverable"
    """The builder can return several trajectories, the delivery takes one."""
    BUILDER_FAILED = "builder_failed"
    """The builder or delivery is unknown here, or the build raised."""
    ROLLOUT_TIMEOUT = "rollout_timeout"
    """The rollout was idle for longer than the worker waits."""
    ROLLOUT_CANCELLED = "rollout_cancelled"
    """The rollout was given up by its collector."""

    @classmethod
    def _missing_(cls, value: object) -> Reason | None:
        if not isinstance(value, str) or not _CODE.fullmatch(value):
            return None
        newer = str.__new__(cls, value)
        newer._name_, newer._value_ = value.upper(), value
        return newer

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        described: dict[str, Any] = handler.resolve_ref_schema(handler(schema))
        described["examples"] = described.pop("enum")
        described["pattern"] = f"^{_CODE.pattern}$"
        return described


REASON_ORDER = {reason: position for position, reason in enumerate(Reason)}


def ordered(reasons: set[Reason] | frozenset[Reason]) -> list[Reason]:
    """The reasons in their fixed order, so that equal results are equal bytes; a newer release's behind them."""
    return sorted(reasons, key=lambda reason: (REASON_ORDER.get(reason, len(REASON_ORDER)), reason))


class DeadLetterReason(StrEnum):
    """Why a record went to the dead letters: one of ``Reason``'s codes, or one of these."""

    INVALID_KEY = "invalid_key"
    """The key is missing or no valid rollout id, so no rollout can be told."""
    WRONG_PARTITION = "wrong_partition"
    """The record lies on another partition than its key's."""
    LATE_AFTER_FREEZE = "late_after_freeze"
    """The rollout was frozen before this record; its result stands."""


class NotDelivered(StrEnum):
    """Why the generated tokens of a recorded call are in no trace of a result."""

    AMBIGUOUS_PARENT = "ambiguous_parent"
    SUPERSEDED_RETRY = "superseded_retry"
    QUARANTINED_ANCESTOR = "quarantined_ancestor"
    AFTER_TERMINAL = "after_terminal"
    EMPTY_GENERATION = "empty_generation"
    PREFIX_UNRESOLVED = "prefix_unresolved"
    PREFIX_MISMATCH = "prefix_mismatch"
