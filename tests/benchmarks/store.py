"""A put of the local store against a bare write and fsync of the same bytes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from freezepoint.store import TokenStore
from tests.benchmarks.measuring import Row, in_turns, milliseconds, ratio
from tests.benchmarks.rollouts import Shape, rollout

PUTS = 20


def store_rows(rounds: int) -> list[Row]:
    entries = iter(list(rollout(Shape((rounds + 1) * PUTS + 1, 2_000, 400, 0))))
    with tempfile.TemporaryDirectory() as folder:
        store = TokenStore(Path(folder) / "store")
        store.put_now(next(entries))
        line = max(
            (Path(folder) / "store").rglob("*.jsonl"), key=lambda file: file.stat().st_size
        ).read_bytes()
        descriptor = os.open(Path(folder) / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def put() -> None:
            for _ in range(PUTS):
                store.put_now(next(entries))

        def write() -> None:
            for _ in range(PUTS):
                os.write(descriptor, line)
                os.fsync(descriptor)

        taken = in_turns({"put": put, "write": write}, rounds)
        os.close(descriptor)
    each = {name: milliseconds([second / PUTS for second in values]) for name, values in taken.items()}
    return [
        Row("store", "local store `put`, fsync each", "bare write and fsync", ratio(taken["put"], taken["write"]), 1.3,
            note=f"put {each['put']}, bare {each['write']}"),
    ]  # fmt: skip
