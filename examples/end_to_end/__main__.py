"""Model server, agents, worker and trainer together. ``FREEZEPOINT_BROKER`` names another broker than a temporary file."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.end_to_end.agent import Plan, run_rollout
from examples.end_to_end.model_server import ModelServer
from examples.end_to_end.serving import serving
from examples.end_to_end.trainer import step
from freezepoint.capture import CaptureMiddleware
from freezepoint.reader import TrajectoryReader
from freezepoint.sink import TokenSink

GROUPS, GROUP_SIZE = 3, 4


def plan_of(attempt: int) -> Plan:
    """The second attempt of each group loses a stream, and so is masked; the others go wrong in ways that do no harm."""
    return Plan(
        turns=5,
        resampled=frozenset({2}) if attempt == 0 else frozenset(),
        streamed=frozenset({1, 3}),
        killed=frozenset({2}) if attempt == 1 else frozenset(),
    )


async def collect(url: str, collector: TokenSink) -> None:
    """All rollouts side by side; each ends with its complete event."""

    async def one(task: int, attempt: int) -> None:
        rollout_id = f"{task}-{attempt}"
        reward = await run_rollout(url, rollout_id, plan_of(attempt))
        await collector.complete(rollout_id, reward=reward, group_id=f"group-{task}", group_size=GROUP_SIZE)

    await asyncio.gather(*(one(task, attempt) for task in range(GROUPS) for attempt in range(GROUP_SIZE)))


async def main(broker: str) -> None:
    model = ModelServer(refusals=2)
    app = CaptureMiddleware(model, sink=TokenSink(broker=broker, run="demo"))
    async with serving(app) as url, TokenSink(broker=broker, run="demo") as collector:
        await collect(url, collector)
    async with TrajectoryReader(broker, run="demo") as reader:
        async for group in reader.groups(deadline=60):
            reasons = {lost.rollout_id: [reason.value for reason in lost.reasons] for lost in group.masked}
            print(group.group_id, step(group), reasons or "")
            reader.ack(group)
            if reader.counts.groups == GROUPS:
                break


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        url = os.environ.get("FREEZEPOINT_BROKER") or f"sqlite:///{Path(folder) / 'freezepoint.db'}"
        environment = {**os.environ, "FREEZEPOINT_BROKER": url}
        with subprocess.Popen([sys.executable, "-m", "freezepoint", "run"], env=environment) as worker:
            try:
                asyncio.run(main(url))
            finally:
                worker.terminate()
