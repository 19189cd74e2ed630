"""What a scenario plays on: its own topics on the broker, its workers, its load, and the check at the end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import orjson
from aiokafka.errors import KafkaError

from freezepoint.simulate import Profile
from freezepoint.simulate.profile import ROLLOUTS_MAX
from freezepoint_schemas import codec
from freezepoint_schemas.ledger import PROGRESS_KEY, ProgressRecord
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs
from tests.chaos.broker import ChaosBroker
from tests.chaos.checker import Claims, Evidence, Verdict, check
from tests.chaos.figures import RESULTS, Report
from tests.chaos.fleet import Fleet
from tests.chaos.load import Author, Load, Publisher, Sent, Spoiler, Tally, rollouts
from tests.chaos.tails import Line, Tail, open_transactions
from tests.polling import poll_until_async

PARTITIONS = 4
SETTLE_S = 240.0
SESSION_S = 6.0
TAKEOVER_SLACK_S = 5.0
ENVIRONMENT = {
    "FREEZEPOINT_KAFKA__SESSION_TIMEOUT_MS": str(int(SESSION_S * 1000)),
    "FREEZEPOINT_KAFKA__HEARTBEAT_INTERVAL_MS": "500",
    "FREEZEPOINT_KAFKA__REQUEST_TIMEOUT_MS": "10000",
    "FREEZEPOINT_KAFKA__TRANSACTION_TIMEOUT_MS": "20000",
    "FREEZEPOINT_WORKER__PROGRESS_INTERVAL_MS": "1000",
}


@dataclass
class Stage:
    """One scenario's stage. ``seconds``: how long its load is meant to last, which its number of faults follows."""

    broker: ChaosBroker
    names: TopicNames
    group: str
    seed: int
    seconds: float
    report: Report
    fleet: Fleet
    publisher: Publisher
    folder: Path
    rng: Random
    partitions: int
    tails: dict[Topic, Tail] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    def profile(self, **fields: Any) -> Profile:
        """Small rollouts of every kind."""
        return Profile(
            **{
                "seed": self.seed,
                "run": "load",
                "rollouts": ROLLOUTS_MAX,
                "turns": (1, 4),
                "prompt_tokens": (20, 80),
                "generation_tokens": (5, 30),
                "tool_tokens": (5, 20),
                **fields,
            }
        )

    @asynccontextmanager
    async def load(
        self,
        author: Author | None = None,
        *,
        rate: float = 200.0,
        concurrency: int = 16,
        spoil: Spoiler | None = None,
    ) -> AsyncIterator[Load]:
        """Load that goes on while the block does."""
        made = Load(
            self.publisher,
            author or rollouts(self.profile()),
            self.tally,
            self.seed,
            rate=rate,
            concurrency=concurrency,
            spoil=spoil,
        )
        stop = asyncio.Event()
        running = asyncio.create_task(made.run(stop))
        try:
            yield made
            stop.set()
            await running
        finally:
            running.cancel()
            await asyncio.wait({running})

    async def publish(self, count: int, author: Author | None = None, *, concurrency: int = 16) -> None:
        """So many lives, as fast as they are acknowledged."""
        made = Load(
            self.publisher,
            author or rollouts(self.profile()),
            self.tally,
            self.seed,
            rate=0,
            concurrency=concurrency,
            limit=count,
        )
        await made.run(asyncio.Event())

    async def send(self, *records: Sent) -> None:
        await self.publisher.send(records)

    async def results(self) -> list[Line]:
        """The committed records of the trajectories topic."""
        return await self.tails[Topic.TRAJECTORIES].pull()

    async def letters(self) -> list[Line]:
        return await self.tails[Topic.DEAD_LETTERS].pull()

    async def until_results(self, count: int, timeout_s: float = SETTLE_S) -> None:
        """Wait for so many result records."""

        async def there() -> bool:
            return len(await self.results()) >= count

        await poll_until_async(there, timeout_s, f"{count} results of {self.names[Topic.TRAJECTORIES]}")

    async def until_result_of(self, rollout_id: str, timeout_s: float = SETTLE_S) -> None:
        """Wait for the result of this one."""

        async def there() -> bool:
            return any(line.key == rollout_id.encode() for line in await self.results())

        await poll_until_async(there, timeout_s, f"the result of {rollout_id}")

    async def progress(self) -> dict[int, ProgressRecord]:
        """The latest progress record of each partition."""
        lines = await self.tails[Topic.LEDGER].pull()
        return {
            line.partition: codec.decode_progress(line.value)
            for line in lines
            if line.key == PROGRESS_KEY and line.value is not None
        }

    async def until_applied(self, timeout_s: float = SETTLE_S) -> None:
        """Wait until the workers have, by the ledger, read every record there is."""

        async def applied() -> bool:
            ends = await self.tails[Topic.TOKENS].ends()
            progress = await self.progress()
            return all(
                not end or (number in progress and progress[number].applied_offset >= end - 1)
                for number, end in ends.items()
            )

        await poll_until_async(applied, timeout_s, f"lag 0 on {self.names[Topic.TOKENS]}")

    async def settle(
        self, results: int | None = None, letters: int = 0, timeout_s: float = SETTLE_S
    ) -> float:
        """Wait until so many results (default: of all closed lives) and dead letters are committed and nothing is left to
        read; the seconds it took."""
        began = time.monotonic()
        with suppress(AssertionError):  # the check names what is missing
            await self.until_results(self.tally.closed if results is None else results, timeout_s)

            async def set_aside() -> bool:
                return len(await self.letters()) >= letters

            await poll_until_async(set_aside, timeout_s, f"{letters} dead letters")
            await self.until_applied(timeout_s)
        return time.monotonic() - began

    async def verdict(self, claims: Claims) -> Verdict:
        """Recompute everything from the tokens topic and compare."""
        lines = {topic: await self.tails[topic].pull() for topic in Topic}
        counts = {self.names[topic]: self.tails[topic].partitions for topic in Topic}
        evidence = Evidence(
            partitions=self.partitions,
            tokens=lines[Topic.TOKENS],
            results=lines[Topic.TRAJECTORIES],
            ledger=lines[Topic.LEDGER],
            letters=lines[Topic.DEAD_LETTERS],
            end_offsets=await self.tails[Topic.TOKENS].ends(),
            open_transactions=await open_transactions(self.broker.direct, counts),
        )
        return await asyncio.to_thread(check, evidence, claims)

    async def conclude(self, claims: Claims | None = None, *, stop: bool = True) -> Verdict:
        """Stop the workers in good order, check, and put the common figures into the report."""
        if stop:
            codes = await self.fleet.stop_all()
            self.report.equal("exit codes at the end", sorted(set(codes)), [0] if codes else [])
        verdict = await self.verdict(claims or Claims(truths=self.tally.truths))
        counts, report = verdict.counts, self.report
        report.tell("records", counts["records"])
        report.equal(RESULTS, counts["results"], counts["lives"])
        report.tell("masked", counts["masked"])
        for name in ("lost", "duplicates", "content", "untrue"):
            report.equal(name, counts[name], 0)
        report.tell("dead letters", counts["letters"])
        report.equal("open transactions", counts["open_transactions"], 0)
        report.equal("lag", counts["lag"], 0)
        if counts["open"]:
            report.tell("rollouts left open", counts["open"])
        if not verdict.ok:
            report.differences += verdict.summary().splitlines()
        return verdict

    def latencies_s(self) -> list[float]:
        """How long after its complete event each result was published, of those the tails have seen."""
        appended = {
            (line.partition, line.offset): line.timestamp_ms for line in self.tails[Topic.TOKENS].lines
        }
        found = []
        for line in self.tails[Topic.TRAJECTORIES].lines:
            snapshot = orjson.loads(line.value or b"")["snapshot"]
            frozen_ms = appended[snapshot["partition"], snapshot["freeze_offset"]]
            found.append(max(0, line.timestamp_ms - frozen_ms) / 1000)
        return sorted(found)

    def longest_silence_s(self) -> float:
        """The longest time in which a partition that was written to gave no result."""
        moments: dict[int, list[int]] = {}
        for line in self.tails[Topic.TRAJECTORIES].lines:
            moments.setdefault(line.partition, []).append(line.timestamp_ms)
        gaps = [
            later - earlier
            for times in moments.values()
            for earlier, later in itertools.pairwise(sorted(times))
        ]
        return max(gaps, default=0) / 1000

    def replay_sizes(self) -> list[int]:
        """Of each acquisition: how many offsets were read again before anything new."""
        return [
            line.fields["unread"].get(str(number), 0)
            for line in self.fleet.lines("acquired")
            for number in line.partitions
        ]


@asynccontextmanager
async def stage(
    broker: ChaosBroker,
    report: Report,
    folder: Path,
    *,
    seed: int,
    seconds: float,
    partitions: int = PARTITIONS,
    environment: Mapping[str, str] | None = None,
    topic_config: Callable[[Topic], Mapping[str, str]] | None = None,
    through_proxy: bool = False,
) -> AsyncIterator[Stage]:
    """A scenario's topics and everything that works on them, gone afterwards but for the logs in ``folder``."""
    prefix = f"{report.scenario}-{time.time_ns():x}."
    names = TopicNames(prefix)
    group = (environment or {}).get("FREEZEPOINT_WORKER__GROUP", f"{prefix}group")
    for spec in topic_specs(names, partitions):
        more = {} if topic_config is None else topic_config(spec.topic)
        await broker.create_topic(spec.name, spec.partitions, {**spec.config, **more})
    settings = {
        **ENVIRONMENT,
        "FREEZEPOINT_BROKER": f"kafka://{broker.proxied if through_proxy else broker.direct}",
        "FREEZEPOINT_TOPIC_PREFIX": prefix,
        "FREEZEPOINT_WORKER__GROUP": group,
        **(environment or {}),
    }
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # load and checker ride through outages
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(Publisher(broker.direct, names[Topic.TOKENS], partitions))
        fleet = await stack.enter_async_context(Fleet(settings, folder))
        made = Stage(
            broker, names, group, seed, seconds, report, fleet, publisher, folder, Random(seed), partitions
        )
        for topic in Topic:
            tail = Tail(broker.direct, names[topic], partitions)
            made.tails[topic] = await stack.enter_async_context(tail)
        yield made
    for spec in topic_specs(names, partitions):  # what is kept, a broker that was killed has to look through
        with suppress(KafkaError):
            await broker.delete_topic(spec.name)
