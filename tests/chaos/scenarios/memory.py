"""More open than fits into memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from freezepoint_schemas.events import TokenEntry
from tests.chaos.load import Author, Script, Sent
from tests.chaos.registry import scenario
from tests.chaos.stage import Stage
from tests.events import complete

MB = 1024 * 1024
BUDGET_MB = 64
OVERHEAD_MB = 200
ROLLOUT_MB = 8
CALLS = 16
ROLLOUTS = 200
SETTLE_S = 600.0
BYTES_PER_TOKEN = 20
"""Of a call on the wire, packed: 4 of a prompt's token, 4 and 8 of a generated one, in base64."""

SMALL = {
    "FREEZEPOINT_WORKER__MEMORY_BYTES_MAX": str(BUDGET_MB * MB),
    "FREEZEPOINT_WORKER__PENDING_BYTES_MAX": str(16 * MB),
    "FREEZEPOINT_WORKER__TRANSACTION_BYTES_MAX": str(8 * MB),
}


def heavy(seed: int, rollout_mb: int) -> Author:
    """Rollouts of so many megabytes on the wire; every call is a retry of the same turn but for the last, which goes on."""
    tokens = rollout_mb * MB // CALLS // BYTES_PER_TOKEN

    def write(number: int) -> Script:
        return Script(f"heavy-{number}", _calls(np.random.default_rng([seed, number]), number, tokens), None)

    return write


def _calls(rng: np.random.Generator, number: int, tokens: int) -> Iterator[Sent]:
    name = f"heavy-{number}"
    for index in range(CALLS):
        generation = rng.integers(0, 100_000, tokens, dtype=np.int32)
        yield Sent.of(
            TokenEntry(
                rollout_id=name,
                model_call_id=f"c{index}",
                prompt_token_ids=np.array([number, index], np.int32),
                generation_token_ids=generation,
                generation_log_probs=-rng.standard_exponential(tokens),
                created_at=float(index),
            ),
            packed=True,
        )
    yield Sent.of(complete(name, n_calls=CALLS))


@scenario(environment=SMALL)
async def memory_budget(stage: Stage) -> None:
    """200 x 8 MB rollouts against a small memory budget."""
    count = max(20, math.ceil(ROLLOUTS * min(1.0, stage.seconds / 60)))
    worker = stage.fleet.start("worker", supervised=False)
    await stage.fleet.until_acquired(stage.partitions)
    idle_mb = worker.peak_rss_mb()
    await stage.publish(count, heavy(stage.seed, ROLLOUT_MB), concurrency=count)
    await stage.settle(timeout_s=SETTLE_S)
    stage.report.tell("open at once", count, f"x {ROLLOUT_MB} MB")
    stage.report.tell("RSS before", idle_mb, "MB")
    stage.report.at_most("peak RSS", worker.peak_rss_mb(), BUDGET_MB + OVERHEAD_MB, "MB")
    await stage.conclude()
