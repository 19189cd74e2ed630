"""Carrying an old open life forward: its log as chunks in the ledger, so that a replay need not go back to its start.

One rollout that never completes would otherwise hold the watermark, and every restart would read everything that came
since. What is carried is exactly what the log holds; a life that is loaded again goes on as if it had never left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from freezepoint.core.rollout import LogLimits, RolloutLog
from freezepoint_schemas import codec
from freezepoint_schemas.events import (
    CallCancelled,
    CallIntent,
    CaptureIncomplete,
    InputEvent,
    RolloutClear,
    TokenEntry,
)
from freezepoint_schemas.parts import PartAssembler
from freezepoint_schemas.reasons import Reason

CHUNK_BYTES = 512 * 1024
"""Below what an untouched broker takes in one record: ledger records are never split."""


def dump_life(life: RolloutLog, spilled: Iterable[TokenEntry]) -> list[bytes]:
    """An open life as chunks; ``spilled`` are its entries that are not in memory, in the order they were put away."""
    facts = life.facts()
    entries = [*spilled, *life.entries()]
    payload = orjson.dumps(
        {
            "first_offset": life.first_offset,
            "last_offset": life.last_offset,
            "opened_ms": life.opened_ms,
            "size_bytes": life.size_bytes,
            "oversized": life.oversized,
            "after_gap": life.after_gap,
            "dispatch": None if life.dispatch is None else orjson.Fragment(codec.encode_event(life.dispatch)),
            "faults": sorted(facts.faults),
            "intents": sorted(facts.intents),
            "cancelled": sorted(facts.cancelled),
            "marks": sorted(facts.marks),
            "entries": [orjson.Fragment(codec.encode_event(entry, packed=True)) for entry in entries],
            "parts": life.parts.dump(),
        }
    )
    return [payload[start : start + CHUNK_BYTES] for start in range(0, len(payload), CHUNK_BYTES)]


def load_life(
    rollout_id: str, chunks: Iterable[bytes], limits: LogLimits, record_bytes_max: int
) -> RolloutLog:
    """The life that :func:`dump_life` was given.

    :raises ValueError: the chunks are not that.
    """
    body: dict[str, Any] = orjson.loads(b"".join(chunks))
    life = RolloutLog(
        rollout_id,
        body["first_offset"],
        limits,
        PartAssembler.load(body["parts"], record_bytes_max),
        _event(rollout_id, body["dispatch"], RolloutClear) if body["dispatch"] else None,
    )
    for written in body["entries"]:
        life.write(_event(rollout_id, written, TokenEntry), 0)
    for call_id in body["intents"]:
        life.write(CallIntent(rollout_id=rollout_id, model_call_id=call_id), 0)
    for call_id in body["cancelled"]:
        life.write(CallCancelled(rollout_id=rollout_id, model_call_id=call_id), 0)
    for call_id, reason in body["marks"]:
        life.write(CaptureIncomplete(rollout_id=rollout_id, model_call_id=call_id, reason=reason), 0)
    for reason in body["faults"]:
        life.fault(Reason(reason))
    life.last_offset, life.size_bytes = body["last_offset"], body["size_bytes"]
    life.opened_ms, life.after_gap = body["opened_ms"], body.get("after_gap", False)
    return life


def _event(rollout_id: str, body: Any, kind: type[Any]) -> Any:
    event: InputEvent = codec.event_from_object(rollout_id, body)
    if isinstance(event, kind):
        return event
    raise ValueError(f"a carried {event.event} where a {kind.__name__} belongs")
