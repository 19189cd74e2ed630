"""Frozen logs for tests: short notation for calls, and the same log written in other ways."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import numpy as np
import xxhash

from freezepoint.core.frozen import FrozenLog
from freezepoint_schemas import codec
from freezepoint_schemas.events import PromptPrefix, RolloutCancelled, RolloutComplete, TokenEntry
from tests.events import complete, entry

ROLLOUT = "r"
_CALL = re.compile(r"(?P<id>[^:\s]+):\[(?P<prompt>[\d,]*)\]->\[(?P<generation>[\d,]*)\]")


def calls(notation: str, **fields: Any) -> list[TokenEntry]:
    """Entries in the notation ``a:[1,2]->[3] b:[1,2,3,4]->[5]``, created at 1, 2, 3, ..."""
    found = [match.groupdict() for match in _CALL.finditer(notation)]
    return [
        entry(
            ROLLOUT,
            call["id"],
            _ints(call["prompt"]),
            _ints(call["generation"]),
            **{"created_at": float(position), **fields},
        )
        for position, call in enumerate(found, 1)
    ]


def _ints(text: str) -> list[int]:
    return [int(token) for token in text.split(",") if token]


def frozen(
    entries: Iterable[TokenEntry], closing: RolloutComplete | RolloutCancelled | None = None, **fields: Any
) -> FrozenLog:
    """These entries, frozen at offset 99 of partition 0."""
    return FrozenLog(
        **{
            "rollout_id": ROLLOUT,
            "partition": 0,
            "first_offset": 0,
            "freeze_offset": 99,
            "closing": closing or complete(ROLLOUT),
            "entries": tuple(entries),
            **fields,
        }
    )


def cumulative(call: TokenEntry) -> list[int]:
    """A call's whole prompt and generation."""
    return [*call.prompt_token_ids.tolist(), *call.generation_token_ids.tolist()]


def digest(tokens: Sequence[int]) -> str:
    """What a prompt prefix says about its tokens."""
    return xxhash.xxh3_128_hexdigest(np.array(tokens, dtype="<i4").tobytes())


def referring(call: TokenEntry, target: TokenEntry, length: int | None = None, **wrong: Any) -> TokenEntry:
    """The call, the first ``length`` tokens of its prompt by reference to ``target`` (whose prompt is whole),
    by default all that both share. ``wrong`` replaces what the reference says."""
    prompt, known = call.prompt_token_ids.tolist(), cumulative(target)
    length = _shared(prompt, known) if length is None else length
    prefix = {"call_id": target.model_call_id, "length": length, "digest": digest(prompt[:length]), **wrong}
    return call.model_copy(
        update={"prompt_prefix": PromptPrefix(**prefix), "prompt_token_ids": call.prompt_token_ids[length:]}
    )


def by_reference(entries: Sequence[TokenEntry], random: Random) -> list[TokenEntry]:
    """The same calls, shuffled, most prompts by reference to some other call, at any length that is true."""
    order = list(entries)
    random.shuffle(order)
    written = [order[0]] if order else []
    for position in range(1, len(order)):
        target = order[random.randrange(position)]
        shared = _shared(order[position].prompt_token_ids.tolist(), cumulative(target))
        length = random.choice([shared, random.randint(0, shared)])
        written.append(
            referring(order[position], target, length) if random.random() < 0.8 else order[position]
        )
    random.shuffle(written)
    return written


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((position for position, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def recoded(call: TokenEntry, *, packed: bool) -> TokenEntry:
    """The call as it comes out of one encoding."""
    again = codec.decode_event(call.rollout_id, codec.encode_event(call, packed=packed))
    assert isinstance(again, TokenEntry)
    return again
