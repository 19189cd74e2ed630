"""What holds a worker's event loop: the cycle collector, as ``freezepoint run`` has it and as Python does, and builds."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from freezepoint.collector import young_collections
from freezepoint.core.digests import tokens_digest
from freezepoint.core.frozen import FrozenLog
from freezepoint.core.partition import PartitionCore
from freezepoint.core.rollout import RolloutLog
from freezepoint.outbox import build, is_quick
from freezepoint.settings import WorkerSettings
from freezepoint_schemas.events import PromptPrefix, RolloutComplete, TokenEntry
from freezepoint_schemas.parts import PartAssembler
from tests.benchmarks.growth import config, open_waves
from tests.benchmarks.measuring import Figure, Row, milliseconds, seconds
from tests.benchmarks.rollouts import LIMITS, RECORD_BYTES_MAX

CALLS = 10


def pause_rows(rounds: int, *, quick: bool) -> list[Row]:
    opened = 200 if quick else 10_000
    records = [record for wave in open_waves(opened, CALLS) for record in wave]
    taken: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(max(1, rounds // 2)):
        for is_ours, longest in taken.items():
            longest.append(_longest(records, is_ours=is_ours))
    ratios = [ours / pythons for ours, pythons in zip(taken[True], taken[False], strict=True)]
    notes = [
        f"{name} {1000 * Figure.of(taken[is_ours]).median:.3g} ms"
        for is_ours, name in ((True, "worker"), (False, "default"))
    ]
    return [
        Row("pauses", f"longest collection, {opened:,} open rollouts of {CALLS} calls", "Python's default",
            Figure.of(ratios), note=", ".join(notes)),
    ]  # fmt: skip


def _longest(records: list[Any], *, is_ours: bool) -> float:
    gc.freeze()
    gc.collect()  # so that only what comes now counts
    core = PartitionCore(config(0, 1))
    pauses = [0.0]
    try:
        with _timed(pauses):
            if is_ours:
                with young_collections():
                    _feed(core, records)
            else:
                _feed(core, records)
    finally:
        gc.unfreeze()
    return max(pauses)


def _feed(core: PartitionCore, records: list[Any]) -> None:
    for offset, record in enumerate(records):
        core.feed(record._replace(offset=offset))


@contextmanager
def _timed(pauses: list[float]) -> Iterator[None]:
    began = [0.0]

    def note(phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            began[0] = time.perf_counter()
        else:
            pauses.append(time.perf_counter() - began[0])

    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)


def build_rows(rounds: int) -> list[Row]:
    """The dearest logs that are still built on the event loop, to encoded results."""
    settings = WorkerSettings()
    shapes = {"branches of a long stem": _branches(300_000, 9), "many short calls": _chain(500)}
    taken: list[float] = []
    notes = []
    for name, log in shapes.items():
        if not is_quick(log, settings):
            raise AssertionError(f"{name}: this log is built on a thread")
        times = [seconds(partial(build, log, settings), time.process_time) for _ in range(rounds + 1)][1:]
        taken.append(max(times))
        notes.append(f"{name} {milliseconds(times)}")
    return [
        Row("pauses", "longest build on the event loop", "–", Figure.of([1000 * max(taken)]), 50, unit="ms",
            note=", ".join(notes)),
    ]  # fmt: skip


def _branches(tokens: int, calls: int) -> FrozenLog:
    """Calls that go on from one long prompt, each with a trace of its own that holds all of it."""
    stem = np.arange(tokens, dtype=np.int32)
    digest = tokens_digest(np.append(stem, 1).astype(np.int32)).hex()
    prefix = PromptPrefix(call_id="c0", length=tokens + 1, digest=digest)
    others = [_call(number, [number], prefix) for number in range(1, calls)]
    return _frozen([_call(0, stem, None), *others])


def _chain(calls: int) -> FrozenLog:
    log = [_call(0, np.arange(10, dtype=np.int32), None)]
    written = [*range(10), 1]
    for number in range(1, calls):
        digest = tokens_digest(np.array(written, dtype=np.int32)).hex()
        prefix = PromptPrefix(call_id=f"c{number - 1}", length=len(written), digest=digest)
        log.append(_call(number, [number], prefix))
        written += [number, 1]
    return _frozen(log)


def _call(number: int, prompt: Any, prefix: PromptPrefix | None) -> TokenEntry:
    return TokenEntry(
        rollout_id="r",
        model_call_id=f"c{number}",
        prompt_token_ids=np.asarray(prompt, dtype=np.int32),
        prompt_prefix=prefix,
        generation_token_ids=np.array([1], dtype=np.int32),
        generation_log_probs=np.array([-0.5]),
        output_items=[{"type": "message", "content": [{"type": "output_text", "text": "x" * 200}]}],
    )


def _frozen(entries: Sequence[TokenEntry]) -> FrozenLog:
    log = RolloutLog("r", 0, LIMITS, PartAssembler(RECORD_BYTES_MAX))
    for entry in entries:
        log.write(entry, 1_000)
    closing = RolloutComplete(rollout_id="r", n_calls=len(entries), delivery="all_traces")
    return log.freeze(closing, partition=0, offset=len(entries))
