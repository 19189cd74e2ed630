"""The whole way in one process: simulated agents publish, a worker builds, and the results meet the truth."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from freezepoint.app import run_worker
from freezepoint.publishing import BatchPublisher, publish_simulated
from freezepoint.reader import ResultReader
from freezepoint.settings import Settings
from freezepoint.simulate import Profile, Truth, differences, simulate
from freezepoint.transport.connect import connect
from freezepoint.transport.ports import Transport
from freezepoint.wording import counted
from freezepoint_schemas.results import Result
from freezepoint_schemas.topics import Topic, topic_specs

PARTITIONS = 4
DEADLINE_S = 60.0


@dataclass(slots=True)
class DemoReport:
    """What came out. ``differences``: lines on what is otherwise than it should be; empty when all is well."""

    results: list[Result] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def demo_profiles(rollouts: int, agents: int, seed: int) -> list[Profile]:
    """What each agent runs: short rollouts, and enough trouble to see every kind of it."""
    share, more = divmod(rollouts, agents)
    return [
        Profile(
            run=f"agent{agent}",
            seed=seed + agent,
            rollouts=share + (agent < more),
            turns=(2, 8),
            concurrency=4,
            unresolved=0.1,
            subagent=0.1,
            compaction=0.1,
            lost=0.1,
            cancelled=0.05,
        )
        for agent in range(agents)
    ]


@contextmanager
def embedded(settings: Settings) -> Iterator[Settings]:
    """The settings with a broker of their own in a temporary folder, which is removed afterwards."""
    with TemporaryDirectory(prefix="freezepoint-demo-") as folder:
        yield settings.model_copy(update={"broker": f"sqlite:///{Path(folder) / 'demo.db'}"})


def apart(settings: Settings, name: str) -> Settings:
    """The settings with topics and a group of that name, so that the demo meets nobody else on a shared broker."""
    worker = settings.worker.model_copy(update={"group": name})
    return settings.model_copy(update={"topic_prefix": f"{settings.topic_prefix}{name}.", "worker": worker})


async def run_demo(
    settings: Settings,
    profiles: list[Profile],
    *,
    on_result: Callable[[Result], None] | None = None,
    deadline_s: float = DEADLINE_S,
) -> DemoReport:
    """Apply the topics, let every profile's agent publish at once, build with a worker, compare with the truth.

    :raises FreezepointError: something failed; what differs is no error but in the report.
    """
    plain = {"builder": "prefix_merging", "delivery": "single_response"}  # what the truth is about
    settings = settings.model_copy(update={"worker": settings.worker.model_copy(update=plain)})
    async with connect(settings) as transport:
        await transport.admin().apply(topic_specs(settings.topics, PARTITIONS))
        stop = asyncio.Event()
        report, truths = DemoReport(), dict[str, Truth]()
        expected = sum(profile.rollouts for profile in profiles)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(run_worker(settings, stop=stop))
                for profile in profiles:
                    group.create_task(_publish(transport, profile, truths))
                await _collect(transport, report, expected, on_result, deadline_s)
                stop.set()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
    report.differences += _compare(truths, report.results)
    return report


async def _publish(transport: Transport, profile: Profile, truths: dict[str, Truth]) -> None:
    producer = await transport.producer()
    try:
        async with BatchPublisher(producer, records_max=20) as publisher:
            await publish_simulated(
                publisher, simulate(profile), on_truth=lambda truth: truths.update({truth.rollout_id: truth})
            )
    finally:
        await producer.close()


async def _collect(
    transport: Transport,
    report: DemoReport,
    expected: int,
    on_result: Callable[[Result], None] | None,
    deadline_s: float,
) -> None:
    reader = await transport.reader(Topic.TRAJECTORIES)
    try:
        async with asyncio.timeout(deadline_s):
            async with aclosing(ResultReader(reader).results(follow=True)) as results:
                while len(report.results) < expected:
                    read = await anext(results)
                    report.results.append(read.result)
                    if on_result is not None:
                        on_result(read.result)
    except TimeoutError:
        report.differences.append(
            f"{len(report.results)} of {counted(expected, 'result')} after {deadline_s:g} seconds"
        )
    finally:
        await reader.close()


def _compare(truths: dict[str, Truth], results: list[Result]) -> list[str]:
    lines: list[str] = []
    seen: set[str] = set()
    for result in results:
        truth = truths.get(result.rollout_id)
        if result.rollout_id in seen:
            lines.append(f"{result.rollout_id}: a second result")
        elif truth is None:
            lines.append(f"{result.rollout_id}: a result of a rollout that never ended")
        else:
            lines += [f"{result.rollout_id}: {difference}" for difference in differences(truth, result)]
        seen.add(result.rollout_id)
    return lines + [f"{rollout_id}: no result" for rollout_id in truths if rollout_id not in seen]


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong first, out of its groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
