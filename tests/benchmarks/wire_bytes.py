"""How many bytes a rollout takes on the wire: JSON with whole prompts, packed, and by reference, all uncompressed.

    python -m tests.benchmarks.wire_bytes [FILE.jsonl[.gz] ...]

Files hold token entries, one a line, in the order in which they were made. Without one it prints the standard rollout
alone: 100 calls, a first prompt of 8,000 tokens, 400 generated and 600 tool tokens a turn, ids uniform below 150,000,
and one message item of 200 characters a call.
"""

from __future__ import annotations

import asyncio
import gzip
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from freezepoint_schemas import codec
from freezepoint_schemas.events import TokenEntry
from tests.memory_transport import memory_sink

CALLS, FIRST_PROMPT, GENERATED, TOOL, VOCABULARY = 100, 8_000, 400, 600, 150_000
FORMS: dict[str, dict[str, Any]] = {
    "JSON, whole prompts": {"wire": "json", "by_reference": False},
    "packed, whole prompts": {"wire": "packed", "by_reference": False},
    "JSON, by reference": {"wire": "json", "by_reference": True},
    "packed, by reference": {"wire": "packed", "by_reference": True},
}


def standard_rollout() -> Iterator[TokenEntry]:
    """Its log probabilities are doubles that float32 does not hold: the dearer case."""
    rng = np.random.default_rng(20)
    prompt = rng.integers(0, VOCABULARY, FIRST_PROMPT, dtype=np.int32)
    for number in range(CALLS):
        generation = rng.integers(0, VOCABULARY, GENERATED, dtype=np.int32)
        item = {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "x" * 200}],
        }
        yield TokenEntry(
            rollout_id="standard",
            model_call_id=f"{number:032x}",
            model="model",
            prompt_token_ids=prompt,
            generation_token_ids=generation,
            generation_log_probs=-rng.exponential(0.5, GENERATED),
            output_items=[item],
            token_item_index=0,
            created_at=1_700_000_000.125 + number,
        )
        prompt = np.concatenate([prompt, generation, rng.integers(0, VOCABULARY, TOOL, dtype=np.int32)])


def entries_of(path: Path) -> Iterator[TokenEntry]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for line in lines:
            body = orjson.loads(line)
            entry = codec.event_from_object(body["rollout_id"], body)
            if isinstance(entry, TokenEntry):
                yield entry


def measured(entries: Iterable[TokenEntry]) -> dict[str, int]:
    """Bytes of keys and values by form."""

    async def put_all() -> dict[str, int]:
        totals = dict.fromkeys(FORMS, 0)
        with ExitStack() as stack:
            sinks = {form: stack.enter_context(memory_sink(**options)) for form, options in FORMS.items()}
            for entry in entries:
                for form, (sink, broker) in sinks.items():
                    await sink.put(entry)
                    totals[form] += sum(record.size for record in broker.sent)
                    broker.sent.clear()
        return totals

    return asyncio.run(put_all())


def report(name: str, totals: dict[str, int]) -> None:
    full = totals["JSON, whole prompts"]
    print(name)
    for form, size in totals.items():
        print(f"  {form:<24}{size:>14,} bytes   1/{full / size:.1f}")


def main(paths: list[str]) -> None:
    for path in paths:
        report(Path(path).name, measured(entries_of(Path(path))))
    report("standard rollout", measured(standard_rollout()))


if __name__ == "__main__":
    main(sys.argv[1:])
