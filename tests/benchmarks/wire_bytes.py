"""How many bytes a rollout takes on the wire: JSON with whole prompts, packed, and by reference, all uncompressed.

    python -m tests.benchmarks.wire_bytes [FILE.jsonl[.gz] ...]

Files hold token entries, one a line, in the order in which they were made. Without one it prints the standard rollout
(see ``rollouts``) alone.
"""

from __future__ import annotations

import asyncio
import gzip
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson

from freezepoint_schemas import codec
from freezepoint_schemas.events import TokenEntry
from tests.benchmarks.rollouts import rollout
from tests.memory_transport import memory_sink

FORMS: dict[str, dict[str, Any]] = {
    "JSON, whole prompts": {"wire": "json", "by_reference": False},
    "packed, whole prompts": {"wire": "packed", "by_reference": False},
    "JSON, by reference": {"wire": "json", "by_reference": True},
    "packed, by reference": {"wire": "packed", "by_reference": True},
}


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
    report("standard rollout", measured(rollout()))


if __name__ == "__main__":
    main(sys.argv[1:])
