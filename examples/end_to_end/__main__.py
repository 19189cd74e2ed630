"""Model server, agents, worker and trainer together. ``FREEZEPOINT_BROKER`` names another broker than a temporary file: topics
and groups of the run's own are created there, and stay."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from examples.end_to_end.agent import Plan, run_rollout
from examples.end_to_end.model_server import ModelServer
from examples.end_to_end.serving import serving
from examples.end_to_end.trainer import step
from freezepoint.capture import CaptureMiddleware
from freezepoint.cli.common import load_settings
from freezepoint.demo import apart
from freezepoint.errors import BrokerError, FreezepointError
from freezepoint.reader import TrajectoryReader
from freezepoint.settings import Settings
from freezepoint.sink import TokenSink
from freezepoint.transport.connect import connect
from freezepoint_schemas.topics import topic_specs

PARTITIONS = 4
DEADLINE_S = 180.0
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


async def main(settings: Settings, deadline_s: float = DEADLINE_S) -> None:
    """All of it once, in topics of that name only.

    :raises FreezepointError: the broker or the worker failed, or not everything was there in time.
    """
    async with connect(settings) as transport:
        await transport.admin().apply(topic_specs(settings.topics, PARTITIONS))
    async with worker_process(settings) as worker:
        work, ended = asyncio.create_task(serve_and_train(settings)), asyncio.create_task(worker.wait())
        await asyncio.wait({work, ended}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
            why = f"exit code {worker.returncode}" if ended.done() else f"still at it after {deadline_s:g} s"
            raise BrokerError(f"the worker did not bring all {GROUPS} groups: {why}")
        await work


async def serve_and_train(settings: Settings) -> None:
    """Serve every rollout's calls, then train on each group that comes back."""
    where: dict[str, Any] = {"broker": settings.broker, "topic_prefix": settings.topic_prefix, "run": "demo"}
    app = CaptureMiddleware(ModelServer(refusals=2), sink=TokenSink(**where))
    async with serving(app) as url, TokenSink(**where) as collector:
        await collect(url, collector)
    async with TrajectoryReader(
        settings=settings, group=f"{settings.worker.group}-trainer", run="demo"
    ) as reader:
        async for group in reader.groups(deadline=60):
            reasons = {lost.rollout_id: [reason.value for reason in lost.reasons] for lost in group.masked}
            print(group.group_id, step(group), reasons or "")
            reader.ack(group)
            if reader.counts.groups == GROUPS:
                break


@asynccontextmanager
async def worker_process(settings: Settings) -> AsyncIterator[Process]:
    """``freezepoint run`` as a process of its own."""
    own = {
        "FREEZEPOINT_BROKER": settings.broker,
        "FREEZEPOINT_TOPIC_PREFIX": settings.topic_prefix,
        "FREEZEPOINT_WORKER__GROUP": settings.worker.group,
    }
    command = (sys.executable, "-m", "freezepoint", "run")
    worker = await asyncio.create_subprocess_exec(*command, env={**os.environ, **own})
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.terminate()
        await worker.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            broker = os.environ.get("FREEZEPOINT_BROKER") or f"sqlite:///{Path(folder) / 'freezepoint.db'}"
            own = apart(load_settings(broker), f"example-{time.time_ns():x}")
            print(f"topics {own.topic_prefix}* on {own.broker}", file=sys.stderr)
            asyncio.run(main(own))
        except FreezepointError as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            sys.exit(130)
