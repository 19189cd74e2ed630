"""What must not be worked on: refused, with the reason and an exit code that an operator notices."""

from __future__ import annotations

import re
import signal
import zlib

from freezepoint_schemas.topics import Topic, partition_for, topic_specs
from tests.chaos.checker import Claims
from tests.chaos.load import Sent, tiny
from tests.chaos.registry import scenario
from tests.chaos.stage import Stage
from tests.events import complete, entry

REFUSED = 2
CHECK_S = {"FREEZEPOINT_WORKER__TOPIC_CHECK_INTERVAL_S": "1"}
STRAYS = 60


async def _begin(stage: Stage, *, stop: bool = True) -> None:
    """Some results, by a worker that then stops or goes on."""
    stage.fleet.start("worker", supervised=False)
    await stage.publish(40)
    await stage.settle()
    if stop:
        assert await stage.fleet.stop("worker") == 0


async def _refused(stage: Stage, figure: str, reason: str, *, starting: bool = True, **options: str) -> None:
    """A worker, started now or running, ends with exit code 2 and says why."""
    if starting:
        stage.fleet.start("worker", *_flags(options), supervised=False)
    code = await stage.fleet.until_exit("worker")
    text = stage.fleet.workers["worker"].text
    found = re.search(reason, text)
    told = found[0] if found else text.strip().rpartition("\n")[2][-60:]
    ok = code == REFUSED and found is not None
    stage.report.holds(figure, f"exit {code}", f'= exit {REFUSED}, "{told}"', ok=ok)


def _flags(options: dict[str, str]) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name}", value)]


@scenario()
async def topic_recreated(stage: Stage) -> None:
    """tokens topic deleted and recreated."""
    await _begin(stage)
    await stage.conclude(stop=False)
    name = stage.names[Topic.TOKENS]
    (spec,) = [spec for spec in topic_specs(stage.names, stage.partitions) if spec.topic is Topic.TOKENS]
    await stage.broker.delete_topic(name)
    stage.fleet.start("worker", supervised=False)
    code = await stage.fleet.until_exit("worker")
    stage.report.holds("while it is gone", f"exit {code}", f"= exit {REFUSED}", ok=code == REFUSED)
    await stage.broker.create_topic(name, spec.partitions, spec.config)
    await _refused(stage, "recreated, empty", "was recreated")
    await stage.publish(400, tiny(stage.profile(run="again")))
    await _refused(stage, "recreated, filled beyond the watermark", "was recreated")
    stage.report.equal("results after all that", len(await stage.results()), 40)


@scenario(environment=CHECK_S)
async def topic_recreated_running(stage: Stage) -> None:
    """Beside the table: tokens topic deleted and recreated while a worker is up."""
    await _begin(stage, stop=False)
    await stage.conclude(stop=False)
    await _recreate(stage)
    await _refused(stage, "at work", "does not exist|was recreated", starting=False)
    await _refused(stage, "started again", "was recreated")


@scenario(environment=CHECK_S)
async def topic_recreated_asleep(stage: Stage) -> None:
    """Beside the table: tokens topic deleted, recreated and filled while the only worker sleeps."""
    await _begin(stage, stop=False)
    await stage.conclude(stop=False)
    worker = stage.fleet.workers["worker"]
    worker.send(signal.SIGSTOP)
    await _recreate(stage)
    await stage.publish(400, tiny(stage.profile(run="again")))
    worker.send(signal.SIGCONT)
    await _refused(stage, "awake, at the next look at the topics", "was recreated", starting=False)
    await _refused(stage, "started again", "was recreated")


async def _recreate(stage: Stage) -> None:
    (spec,) = [spec for spec in topic_specs(stage.names, stage.partitions) if spec.topic is Topic.TOKENS]
    await stage.broker.delete_topic(spec.name)
    await stage.broker.create_topic(spec.name, spec.partitions, spec.config)


@scenario()
async def second_group(stage: Stage) -> None:
    """second group started."""
    await _begin(stage)
    await _refused(stage, "worker of another group", "one ledger serves one group", group="another")
    stage.report.equal("results", len(await stage.results()), 40)
    await stage.conclude(stop=False)


@scenario(environment={"FREEZEPOINT_WORKER__DEAD_LETTER_WINDOW": "200"})
async def crc32_producer(stage: Stage) -> None:
    """crc32 producer."""
    stage.fleet.start("worker", supervised=False)
    strays = [_by_crc32(stage, number) for number in range(STRAYS)]
    for number, stray in enumerate(strays):
        await stage.publish(4)
        await stage.send(*stray)
        assert number >= 0
    moved = sum(_is_astray(stage, record) for stray in strays for record in stray)
    at_home = sum(not _is_astray(stage, stray[0]) for stray in strays)
    await stage.settle(stage.tally.closed + at_home, letters=moved)
    stage.report.equal("dead letters (= records on wrong partitions)", len(await stage.letters()), moved)
    await stage.conclude()
    await stage.send(*(record for number in range(2_000) for record in _by_crc32(stage, STRAYS + number)))
    await _refused(stage, "a flood of them", "cannot be used")


def _by_crc32(stage: Stage, number: int) -> list[Sent]:
    """A rollout of a producer with librdkafka's default partitioner."""
    name = f"crc-{number}"
    partition = zlib.crc32(name.encode()) % stage.partitions
    events = (entry(name, "c", [1], [2]), complete(name, n_calls=1))
    return [Sent(name.encode(), Sent.of(event).value, partition) for event in events]


def _is_astray(stage: Stage, record: Sent) -> bool:
    return record.partition != partition_for(record.key or b"", stage.partitions)


@scenario(environment=CHECK_S)
async def compaction(stage: Stage) -> None:
    """compaction switched on for the tokens topic, also at run time."""
    name = stage.names[Topic.TOKENS]
    await _begin(stage, stop=False)
    await stage.broker.set_config(name, {"cleanup.policy": "compact"})
    await _refused(stage, "switched on at run time", r"cleanup\.policy", starting=False)
    await _refused(stage, "before the start", r"cleanup\.policy")
    await stage.broker.set_config(name, {"cleanup.policy": "delete"})
    await _goes_on(stage)


@scenario(environment=CHECK_S)
async def partitions_added(stage: Stage) -> None:
    """partitions added, also at run time."""
    await _begin(stage, stop=False)
    await stage.broker.add_partitions(stage.names[Topic.TOKENS], stage.partitions + 1)
    await _refused(stage, "added at run time", "partitions", starting=False)
    await _refused(stage, "before the start", "partitions")
    stage.report.equal("results", len(await stage.results()), 40)
    await stage.conclude(Claims(truths=stage.tally.truths), stop=False)


async def _goes_on(stage: Stage) -> None:
    """Mended, the work goes on where it was."""
    stage.fleet.start("worker", supervised=False)
    await stage.publish(40)
    await stage.settle()
    await stage.conclude()
