"""A put of the local store against a bare write and fsync of the same bytes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from freezepoint.store import TokenStore
from freezepoint_schemas.events import TokenEntry
from tests.benchmarks.measuring import Row, in_turns, milliseconds, ratio
from tests.benchmarks.rollouts import Shape, rollout

PUTS = 20


def store_rows(rounds: int) -> list[Row]:
    entries = list(rollout(Shape((rounds + 1) * PUTS, 2_000, 400, 0)))
    with tempfile.TemporaryDirectory() as folder:
        lines = iter(_lines(Path(folder) / "before", entries))
        left = iter(entries)
        store = TokenStore(Path(folder) / "store")
        descriptor = os.open(Path(folder) / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def put() -> None:
            for entry in islice(left, PUTS):
                store.put_now(entry)

        def write() -> None:
            for line in islice(lines, PUTS):
                os.write(descriptor, line)
                os.fsync(descriptor)

        taken = in_turns({"put": put, "write": write}, rounds)
        os.close(descriptor)
    each = {name: milliseconds([second / PUTS for second in values]) for name, values in taken.items()}
    return [
        Row("store", "local store `put`, fsync each", "bare write and fsync of the same bytes", ratio(taken["put"], taken["write"]), 1.3,
            note=f"put {each['put']}, bare {each['write']}"),
    ]  # fmt: skip


def _lines(directory: Path, entries: Iterable[TokenEntry]) -> list[bytes]:
    """What a store writes of these entries: the bytes that the bare write has to write as well."""
    store = TokenStore(directory)
    for entry in entries:
        store.put_now(entry)
    return next(directory.glob("*.jsonl")).read_bytes().splitlines(keepends=True)
