"""A put of the local store against a bare write and fsync of the same bytes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from freezepoint.store import TokenStore
from freezepoint_schemas.events import TokenEntry
from tests.benchmarks.measuring import Row, blockwise, milliseconds, ratio, seconds
from tests.benchmarks.rollouts import Shape, rollout

PUTS = 20


def store_rows(rounds: int) -> list[Row]:
    """One put, one bare write, and so on: a disk's mood changes from one second to the next."""
    entries = list(rollout(Shape((rounds + 1) * PUTS, 2_000, 400, 0)))
    put: list[float] = []
    bare: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        lines = _lines(Path(folder) / "before", entries)
        store = TokenStore(Path(folder) / "store")
        descriptor = os.open(Path(folder) / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for entry, line in zip(entries, lines, strict=True):
            put.append(seconds(partial(store.put_now, entry), collect=False))
            bare.append(seconds(partial(_write, descriptor, line), collect=False))
        os.close(descriptor)
    medians = [blockwise(taken[PUTS:], PUTS) for taken in (put, bare)]  # the first round is not counted
    note = f"put {milliseconds(medians[0])}, bare {milliseconds(medians[1])}"
    return [
        Row("store", "local store `put`, fsync each", "bare write and fsync of the same bytes", ratio(*medians), 1.3, note=note),
    ]  # fmt: skip


def _write(descriptor: int, line: bytes) -> None:
    os.write(descriptor, line)
    os.fsync(descriptor)


def _lines(directory: Path, entries: Iterable[TokenEntry]) -> list[bytes]:
    """What a store writes of these entries: the bytes that the bare write has to write as well."""
    store = TokenStore(directory)
    for entry in entries:
        store.put_now(entry)
    return next(directory.glob("*.jsonl")).read_bytes().splitlines(keepends=True)
