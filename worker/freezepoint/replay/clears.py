"""Which records end a life."""

from __future__ import annotations

from freezepoint.core.records import InputRecord
from freezepoint_schemas import codec
from freezepoint_schemas.errors import DecodeError
from freezepoint_schemas.events import RolloutClear


def is_clear(rollout_id: str, record: InputRecord) -> bool:
    """Whether this record of that rollout is a clear."""
    try:
        return isinstance(codec.decode_event(rollout_id, record.value), RolloutClear)
    except DecodeError:
        return False
