"""The standard rollout, and the forms in which it is measured.

100 calls, a first prompt of 8,000 tokens, 400 generated and 600 tool tokens a turn, ids uniform below 150,000, one
message item of 200 characters a call: 108,000 tokens, 5.8 million of them received where prompts are sent whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from freezepoint.core.frozen import FrozenLog
from freezepoint.core.rollout import LogLimits, RolloutLog
from freezepoint_schemas import codec
from freezepoint_schemas.events import RolloutComplete, TokenEntry
from freezepoint_schemas.parts import PartAssembler
from tests.memory_transport import memory_sink

VOCABULARY = 150_000
LIMITS = LogLimits(bytes_max=1 << 34, entries_max=1 << 20)
RECORD_BYTES_MAX = 1 << 28


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a rollout is: calls, tokens of the first prompt, and generated and tool tokens of each turn."""

    calls: int = 100
    first_prompt: int = 8_000
    generated: int = 400
    tool: int = 600


STANDARD = Shape()


def rollout(shape: Shape = STANDARD, rollout_id: str = "standard", seed: int = 20) -> Iterator[TokenEntry]:
    """Its log probabilities are doubles that float32 does not hold: the dearer case."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCABULARY, shape.first_prompt, dtype=np.int32)
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x" * 200}]}
    for number in range(shape.calls):
        generation = rng.integers(0, VOCABULARY, shape.generated, dtype=np.int32)
        yield TokenEntry(
            rollout_id=rollout_id,
            model_call_id=f"{number:032x}",
            model="model",
            prompt_token_ids=prompt,
            generation_token_ids=generation,
            generation_log_probs=-rng.exponential(0.5, shape.generated),
            output_items=[item],
            token_item_index=0,
            created_at=1_700_000_000.125 + number,
        )
        tool = rng.integers(0, VOCABULARY, shape.tool, dtype=np.int32)
        prompt = np.concatenate([prompt, generation, tool])


def plain(entries: Iterable[TokenEntry]) -> list[bytes]:
    """As JSON arrays with whole prompts."""
    return [codec.encode_event(entry) for entry in entries]


def by_reference(entries: Iterable[TokenEntry]) -> list[bytes]:
    """As the sink writes them by default: packed, prompts by reference."""

    async def put_all() -> list[bytes]:
        with memory_sink() as (sink, broker):
            for entry in entries:
                await sink.put(entry)
            return [record.value for record in broker.sent if record.value is not None]

    return asyncio.run(put_all())


def folded(rollout_id: str, values: Sequence[bytes]) -> FrozenLog:
    """Decoded, recorded and frozen."""
    log = RolloutLog(rollout_id, 0, LIMITS, PartAssembler(RECORD_BYTES_MAX))
    for value in values:
        event = codec.decode_event(rollout_id, value, log.prompts)
        assert isinstance(event, TokenEntry)
        log.write(event, len(value))
    closing = RolloutComplete(rollout_id=rollout_id, n_calls=len(values))
    return log.freeze(closing, partition=0, offset=len(values))
