"""JSON that can be read but not written again never gets past the codec."""

from __future__ import annotations

import pytest

from freezepoint.core.build import build_result
from freezepoint_schemas import codec
from freezepoint_schemas.errors import DecodeError
from freezepoint_schemas.events import RolloutComplete, TokenEntry
from freezepoint_schemas.reasons import Reason
from tests.frozen_logs import frozen

_ENTRY = b"""{"model_call_id": "c", "prompt_token_ids": [1], "generation_token_ids": [2],
    "generation_log_probs": [-1], "output_items": [%s]}"""
_COMPLETE = b'{"event": "rollout_complete", "metadata": %s}'


def _nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize("template", [_ENTRY, _COMPLETE])
def test_too_deep_is_an_invalid_entry(template: bytes) -> None:
    with pytest.raises(DecodeError) as raised:
        codec.decode_event("r", template % _nested(300))
    assert raised.value.reason is Reason.INVALID_ENTRY


def test_what_passes_can_be_written_inside_a_result() -> None:
    entry = codec.decode_event("r", _ENTRY % _nested(230))
    complete = codec.decode_event("r", _COMPLETE % _nested(230))
    assert isinstance(entry, TokenEntry)
    assert isinstance(complete, RolloutComplete)
    assert codec.encode_result(build_result(frozen([entry], complete)))
