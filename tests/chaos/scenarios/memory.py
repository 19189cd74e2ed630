"""More open than fits into memory."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import xxhash

from freezepoint_schemas.events import PromptPrefix, TokenEntry
from freezepoint_schemas.topics import Topic
from tests.chaos.figures import RESULTS
from tests.chaos.fleet import WorkerProcess
from tests.chaos.load import Author, Place, Script, Sent
from tests.chaos.registry import scenario
from tests.chaos.stage import Stage
from tests.chaos.streamed import Remade, compare
from tests.events import complete

MB = 1024 * 1024
OVERHEAD_MB = 200
SETTLE_S = 900.0
BYTES_PER_TOKEN = 16
"""Of a generated token on the wire, packed: 4 and 8 in base64."""

BUDGET_MB = 64
ROLLOUT_MB = 8
CALLS = 16
ROLLOUTS = 200

MANY = 5_000
MANY_BUDGET_MB = 256
MANY_CALLS = 4
ROUND = 50

GIANT_MB = 500
GIANT_CALLS = 250
GIANT = "giant"

SMALL = {
    "FREEZEPOINT_WORKER__MEMORY_BYTES_MAX": str(BUDGET_MB * MB),
    "FREEZEPOINT_WORKER__PENDING_BYTES_MAX": str(16 * MB),
    "FREEZEPOINT_WORKER__TRANSACTION_BYTES_MAX": str(8 * MB),
}
PATIENT = {
    "FREEZEPOINT_KAFKA__REQUEST_TIMEOUT_MS": "30000",
    "FREEZEPOINT_KAFKA__TRANSACTION_TIMEOUT_MS": "60000",
}
"""The defaults: half a gigabyte takes its time."""


def call(seed: int, number: int, index: int, tokens: int) -> TokenEntry:
    """A call of so many generated tokens, the same whenever it is made; all of a rollout are roots."""
    rng = np.random.default_rng([seed, number, index])
    return TokenEntry(
        rollout_id=f"heavy-{number}",
        model_call_id=f"c{index}",
        prompt_token_ids=np.array([number, index], np.int32),
        generation_token_ids=rng.integers(0, 100_000, tokens, dtype=np.int32),
        generation_log_probs=-rng.standard_exponential(tokens),
        created_at=float(index),
    )


def heavy(seed: int, rollout_mb: int) -> Author:
    """Rollouts of so many megabytes on the wire."""
    tokens = rollout_mb * MB // CALLS // BYTES_PER_TOKEN

    def records(number: int) -> Iterator[Sent]:
        for index in range(CALLS):
            yield Sent.of(call(seed, number, index, tokens), packed=True)
        yield Sent.of(complete(f"heavy-{number}", n_calls=CALLS))

    return lambda number: Script(f"heavy-{number}", records(number), None)


@scenario(environment=SMALL)
async def memory_budget(stage: Stage) -> None:
    """200 x 8 MB rollouts against a small memory budget."""
    count = max(20, math.ceil(ROLLOUTS * min(1.0, stage.seconds / 60)))
    worker = await _alone(stage)
    await stage.publish(count, heavy(stage.seed, ROLLOUT_MB), concurrency=count)
    await stage.settle(timeout_s=SETTLE_S)
    stage.report.tell("open at once", count, f"x {ROLLOUT_MB} MB")
    stage.report.at_most("peak RSS", worker.peak_rss_mb(), BUDGET_MB + OVERHEAD_MB, "MB")
    await stage.conclude()


async def _alone(stage: Stage) -> WorkerProcess:
    """A worker that nobody restarts; what it holds without any work."""
    worker = stage.fleet.start("worker", supervised=False)
    await stage.fleet.until_acquired(stage.partitions)
    stage.report.tell("RSS before", worker.peak_rss_mb(), "MB")
    return worker


@scenario(share=0.5, environment={"FREEZEPOINT_WORKER__MEMORY_BYTES_MAX": str(MANY_BUDGET_MB * MB)})
async def many_open(stage: Stage) -> None:
    """Beside the table: 5,000 open rollouts of 1 MB each, a budget of 256 MiB (half as many by default).

    All of them: ``--only many-open --duration 120``.
    """
    count = math.ceil(MANY * min(1.0, stage.seconds / 60))
    tokens = MB // MANY_CALLS // BYTES_PER_TOKEN
    worker = await _alone(stage)
    began = time.monotonic()
    begun: list[Place] = []
    for index in range(MANY_CALLS):
        for first in range(0, count, ROUND):
            numbers = range(first, min(first + ROUND, count))
            places = await stage.publisher.send(
                Sent.of(call(stage.seed, number, index, tokens), packed=True) for number in numbers
            )
            begun += places if index == 0 else []
    await stage.until_applied(SETTLE_S)
    stage.report.tell("open at once", count, "x 1 MB")
    stage.report.tell("read and spooled after", time.monotonic() - began, "s")
    stage.report.at_most("peak RSS, all open", worker.peak_rss_mb(), MANY_BUDGET_MB + OVERHEAD_MB, "MB")
    closings = [complete(f"heavy-{number}", n_calls=MANY_CALLS) for number in range(count)]
    ends = await stage.publisher.send(Sent.of(closing) for closing in closings)

    def remake(rollout_id: str) -> Remade:
        number = int(rollout_id.removeprefix("heavy-"))
        calls = [call(stage.seed, number, index, tokens) for index in range(MANY_CALLS)]
        return Remade(calls, closings[number], begun[number], ends[number])

    found = await compare(stage.tails[Topic.TRAJECTORIES], remake, count, SETTLE_S)
    stage.report.at_most("peak RSS", worker.peak_rss_mb(), MANY_BUDGET_MB + OVERHEAD_MB, "MB")
    stage.report.tell("all done after", time.monotonic() - began, "s")
    stage.report.equal("exit codes at the end", await stage.fleet.stop_all(), [0])
    found += await compare(stage.tails[Topic.TRAJECTORIES], remake, 0, SETTLE_S)
    _report(stage, found, count)


def _report(stage: Stage, found: Counter[str], lives: int) -> None:
    stage.report.equal(RESULTS, found["results"], lives)
    for name in ("duplicates", "content", "torn"):
        stage.report.equal(name, found[name], 0)


@scenario(environment=SMALL | PATIENT)
async def giant_rollout(stage: Stage) -> None:
    """Beside the table: one rollout of 500 MB, 64 MiB for open rollouts."""
    megabytes = math.ceil(GIANT_MB * min(1.0, stage.seconds / 60))
    worker = await _alone(stage)
    await stage.publisher.send(_conversation(stage.seed, megabytes))
    await stage.until_applied(SETTLE_S)
    stage.report.at_most("peak RSS, open", worker.peak_rss_mb(), BUDGET_MB + OVERHEAD_MB, "MB")
    began = time.monotonic()
    async with stage.load(rate=50):
        await stage.send(Sent.of(complete(GIANT, n_calls=GIANT_CALLS)))
        await stage.until_result_of(GIANT, SETTLE_S)
    stage.report.tell(f"{megabytes} MB frozen to published", time.monotonic() - began, "s")
    stage.report.tell("peak RSS", worker.peak_rss_mb(), "MB")
    await stage.settle(stage.tally.closed + 1, timeout_s=SETTLE_S)
    stage.report.equal("leases lost", len(stage.fleet.lines("lease_lost")), 0)
    await stage.conclude()


def _conversation(seed: int, megabytes: int) -> Iterator[Sent]:
    """One rollout whose every call goes on from the one before, by reference: its result has all of the tokens."""
    tokens = megabytes * MB // GIANT_CALLS // BYTES_PER_TOKEN
    digest, length, prefix = xxhash.xxh3_128(), 0, None
    for index in range(GIANT_CALLS):
        made = call(seed, 0, index, tokens)
        yield Sent.of(
            made.model_copy(update={"rollout_id": GIANT, "prompt_prefix": prefix}),
            packed=True,
        )
        for array in (made.prompt_token_ids, made.generation_token_ids):
            digest.update(array.astype("<i4").tobytes())
            length += len(array)
        prefix = PromptPrefix(call_id=made.model_call_id, length=length, digest=digest.hexdigest())
