"""A worker on a real broker against a bare aiokafka consumer of the same bytes, with the same client settings."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from aiokafka import AIOKafkaProducer
from aiokafka.structs import TopicPartition

from freezepoint.allocator import give_memory_back
from freezepoint.collector import short_pauses
from freezepoint.core.build import build_result
from freezepoint.core.records import OutputRecord
from freezepoint.settings import KafkaSettings, WorkerSettings
from freezepoint.sink import TokenSink
from freezepoint.transport.kafka import KafkaTransport
from freezepoint.transport.kafka.client import Clients
from freezepoint.worker import Worker, WorkerSummary
from freezepoint_schemas import codec
from freezepoint_schemas.events import RolloutComplete, TokenEntry
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs
from tests.benchmarks.measuring import Figure, Row, blockwise, ratio
from tests.benchmarks.rollouts import Shape, by_reference, folded, plain, rollout

SERVERS_ENV = "KAFKA_BOOTSTRAP_SERVERS"
PARTITIONS = 4
ROUND_S_MAX = 60.0
WARM_UP = 200
"""Rollouts before those whose latency counts: a broker that has just started compiles itself first."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is prefilled: copies of one rollout under many ids. ``complete``: whether they end."""

    name: str
    values: Sequence[bytes]
    copies: int
    complete: bool = True

    @property
    def records(self) -> int:
        return self.copies * (len(self.values) + self.complete)

    @property
    def bytes(self) -> int:
        return self.copies * sum(map(len, self.values))

    def output(self) -> Iterator[OutputRecord]:
        """The model servers' order: all rollouts go on at the same time."""
        keys = [f"{self.name}-{number}" for number in range(self.copies)]
        for value in self.values:
            for key in keys:
                body = value.replace(b'"rollout_id":"standard"', b'"rollout_id":"' + key.encode() + b'"')
                yield OutputRecord(Topic.TOKENS, key.encode(), body)
        for key in keys if self.complete else ():
            event = RolloutComplete(rollout_id=key, n_calls=len(self.values))
            yield OutputRecord(Topic.TOKENS, key.encode(), codec.encode_event(event))


def whole_packed(entries: Sequence[TokenEntry]) -> list[bytes]:
    return [codec.encode_event(entry, packed=True) for entry in entries]


def loads(megabytes: int) -> dict[str, Load]:
    """Records of about 100 KB, plain and packed, and of about 1 KB, so many that each load has about these megabytes
    (a twelfth for the small ones, four times as many for the replay)."""
    large_json = plain(list(rollout(Shape(10, 12_000, 200, 300))))
    large_packed = whole_packed(list(rollout(Shape(10, 14_000, 400, 600))))
    small = by_reference(list(rollout(Shape(20, 40, 20, 20))))
    sizes = {"json-100k": large_json, "packed-100k": large_packed, "small-1k": small}
    made = {}
    for name, values in sizes.items():
        wanted = megabytes * 1_000_000 // (12 if name == "small-1k" else 1)
        made[name] = Load(name, values, max(PARTITIONS, wanted // sum(map(len, values))))
    replay = max(PARTITIONS, 4 * megabytes * 1_000_000 // sum(map(len, large_packed)))
    return made | {"replay": Load("replay", large_packed, replay, complete=False)}


@dataclass(frozen=True)
class _Round(TopicNames):
    """The tokens topic of a load, and all other topics anew: each round is a group of its own, and a ledger has one."""

    tokens: str = ""

    def __getitem__(self, topic: Topic) -> str:
        return self.tokens if topic is Topic.TOKENS else super().__getitem__(topic)


@dataclass(frozen=True, slots=True)
class _Case:
    """A load's row. ``floor``: seconds a record of what any worker has to do at the least, where the goal is beyond it."""

    what: str
    against: str
    goal: float
    bare_work: Callable[[bytes], Any] | None = None
    floor: Callable[[Bench, str, Load], Awaitable[float]] | None = None
    floor_what: str = ""


class Bench:
    """Everything on one broker under one unique prefix."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.prefix = f"bench-{uuid.uuid4().hex[:8]}-"
        self.settings = KafkaSettings()

    def transport(self, names: TopicNames) -> KafkaTransport:
        return KafkaTransport(self.bootstrap, names, self.settings)

    async def made(self, name: str) -> TopicNames:
        """Topics of that name, which are there from now on."""
        names = TopicNames(f"{self.prefix}{name}-")
        async with self.transport(names) as transport:
            await transport.admin().apply(topic_specs(names, PARTITIONS))
        return names

    async def prefill(self, load: Load) -> TopicNames:
        names = await self.made(load.name)
        async with self.transport(names) as transport:
            producer = await transport.producer()
            batch: list[OutputRecord] = []
            for record in load.output():
                batch.append(record)
                if len(batch) == 200:
                    await producer.send(batch)
                    batch = []
            await producer.send(batch)
        return names

    async def bare(self, topic: str, records: int, work: Callable[[bytes], Any] | None) -> float:
        """Seconds a record, from the first batch to the last."""
        consumer = Clients(self.bootstrap, self.settings).consumer()
        await consumer.start()
        try:
            sources = [TopicPartition(topic, number) for number in range(PARTITIONS)]
            consumer.assign(sources)
            for source in sources:
                consumer.seek(source, 0)
            pace = _Pace(records)
            while not pace.ended:
                batches = await consumer.getmany(timeout_ms=200, max_records=500)
                seen = 0
                for messages in batches.values():
                    seen += len(messages)
                    if work is not None:
                        for message in messages:
                            work(message.value)
                pace.seen(pace.count + seen)
            return pace.seconds
        finally:
            await consumer.stop()

    async def worker(self, tokens: str, load: Load) -> float:
        """Seconds a record, from the first batch until everything is folded in and every result is committed. The process
        is set up as ``freezepoint run`` does."""
        name = f"{self.prefix}{uuid.uuid4().hex[:6]}-"
        names = _Round(name, tokens)
        stop, pace = asyncio.Event(), _Pace(load.records)

        def progress(summary: WorkerSummary) -> None:
            published = summary.results == load.copies or not load.complete
            pace.seen(summary.records if published or summary.records < load.records else load.records - 1)
            if pace.ended:
                stop.set()

        async with short_pauses(), self.transport(names) as transport:
            await transport.admin().apply(
                [spec for spec in topic_specs(names, PARTITIONS) if spec.topic is not Topic.TOKENS]
            )
            worker = Worker(transport, WorkerSettings(group=name), progress)
            async with asyncio.timeout(ROUND_S_MAX):
                await worker.run(stop)
        return pace.seconds


class _Pace:
    """From the first sight of records to the last: what came at once with the first sight is not counted."""

    def __init__(self, records: int) -> None:
        self.count = 0
        self._records = records
        self._first: tuple[float, int] | None = None
        self._last = 0.0

    def seen(self, count: int) -> None:
        now = time.perf_counter()
        if count and self._first is None:
            self._first = (now, count)
        self.count, self._last = count, now

    @property
    def ended(self) -> bool:
        return self.count >= self._records

    @property
    def seconds(self) -> float:
        assert self._first is not None
        began, before = self._first
        return max(1e-9, self._last - began) / max(1, self._records - before)


async def _against_bare(bench: Bench, load: Load, rounds: int, case: _Case) -> list[Row]:
    """The worker, and where there is one its floor, against the bare consumer of the same topic."""
    names = await bench.prefill(load)
    topic = names[Topic.TOKENS]
    bare: list[float] = []
    ours: list[float] = []
    floor: list[float] = []
    for _ in range(rounds):
        bare.append(await bench.bare(topic, load.records, case.bare_work))
        ours.append(await bench.worker(topic, load))
        if case.floor is not None:
            floor.append(await case.floor(bench, topic, load))
    size = load.bytes / load.records

    def speed(name: str, taken: list[float]) -> str:
        median = statistics.median(taken)
        return f"{name} {1 / median:,.0f}/s, {size / median / 1e6:,.0f} MB/s"

    note = f"{speed('worker', ours)}; {speed('bare', bare)}; records of {size:,.0f} bytes"
    rows = [Row(load.name, case.what, case.against, ratio(bare, ours), case.goal, at_least=True, note=note)]
    if floor:
        rows.append(
            Row(load.name, case.floor_what, case.against, ratio(bare, floor), at_least=True,
                note=f"{speed('reader', floor)}: a floor of the row above")
        )  # fmt: skip
    return rows


def _rollout_of(value: bytes) -> str:
    name = b'"rollout_id":"'
    start = value.index(name) + len(name)
    return value[start : value.index(b'"', start)].decode()


async def _decoding(bench: Bench, topic: str, load: Load) -> float:
    """A bare consumer that makes an event of each record, with every check of the contract, and lets go of it."""
    return await bench.bare(topic, load.records, lambda value: codec.decode_event(_rollout_of(value), value))


async def _relaying(bench: Bench, topic: str, load: Load) -> float:
    """As above; and the results' bytes, handed to a bare producer all at once. Seconds a record that was read."""
    seconds = await _decoding(bench, topic, load)
    result = codec.encode_result(build_result(folded("standard", load.values)))
    producer = AIOKafkaProducer(
        bootstrap_servers=bench.bootstrap,
        acks="all",
        enable_idempotence=True,
        max_batch_size=1 << 20,
        max_request_size=1 << 24,
    )
    name = (await bench.made("floor"))[Topic.TRAJECTORIES]
    await producer.start()
    try:
        began = time.perf_counter()
        sent = [await producer.send(name, result, b"%d" % number) for number in range(load.copies)]
        await asyncio.gather(*sent)
        return seconds + (time.perf_counter() - began) / load.records
    finally:
        await producer.stop()


async def _sink_put(bench: Bench, rounds: int) -> Row:
    """The same bytes, in turns: a put, and a bare ``send_and_wait``."""
    names = await bench.made("put")
    entry = next(rollout(Shape(1, 2_000, 400, 0)))
    sink = TokenSink(broker=f"kafka://{bench.bootstrap}", topic_prefix=names.prefix)
    producer = AIOKafkaProducer(bootstrap_servers=bench.bootstrap, acks="all", enable_idempotence=True)
    await producer.start()
    put: list[float] = []
    bare: list[float] = []
    try:
        for number in range(rounds + 10):
            call = entry.model_copy(update={"rollout_id": f"put-{number}"})
            key, value = call.rollout_id.encode(), codec.encode_event(call, packed=True)
            bare.append(await _elapsed(producer.send_and_wait(names[Topic.TOKENS], value, key)))
            put.append(await _elapsed(sink.put(call)))
    finally:
        await producer.stop()
        await sink.close()
    put, bare = put[10:], bare[10:]  # connecting, and the first batches
    medians = [blockwise(taken, max(1, len(put) // 5)) for taken in (put, bare)]
    note = f"put {1000 * statistics.median(put):.2f} ms, bare {1000 * statistics.median(bare):.2f} ms"
    return Row(
        "sink", "sink `put` on Kafka", "`send_and_wait` of the same bytes", ratio(*medians), 1.3, note=note
    )


async def _elapsed(work: Awaitable[Any]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def _latency(bench: Bench, load: Load, rate: float) -> list[Row]:
    """From a complete event's acknowledgement to its result, read committed. Worker and client share one process here."""
    names = TopicNames(f"{bench.prefix}latency-")
    rollouts = load.copies
    done: dict[bytes, float] = {}
    taken: list[float] = []
    warm_up = min(WARM_UP, rollouts // 2)
    stop, joined = asyncio.Event(), asyncio.Event()

    def progress(summary: WorkerSummary) -> None:
        if summary.partitions == PARTITIONS:
            joined.set()

    async with short_pauses(), bench.transport(names) as transport, asyncio.timeout(ROUND_S_MAX):
        await transport.admin().apply(topic_specs(names, PARTITIONS))
        producer, reader = await transport.producer(), await transport.reader(Topic.TRAJECTORIES)
        worker = asyncio.create_task(
            Worker(transport, WorkerSettings(group=names.prefix), progress).run(stop)
        )
        records = list(load.output())
        await producer.send(records[:-rollouts])

        async def complete(record: OutputRecord) -> None:
            await producer.send([record])
            done[record.key or b""] = time.perf_counter()

        async def read() -> None:
            while len(taken) < rollouts:
                for record in await reader.poll(0.5, 500):
                    now = time.perf_counter()
                    taken.append(now - done.get(record.key or b"", now))

        reading = asyncio.create_task(read())
        await joined.wait()
        sends = []
        for record in records[-rollouts:]:
            sends.append(asyncio.create_task(complete(record)))
            await asyncio.sleep(1 / rate)
        await asyncio.gather(reading, *sends)
        stop.set()
        await worker
    del taken[:warm_up]
    taken.sort()
    note = f"{len(taken)} rollouts at {rate:g}/s, after {warm_up} to warm up"
    p50, p99 = (1000 * taken[min(len(taken) - 1, int(len(taken) * part))] for part in (0.5, 0.99))
    what = "complete acknowledged → result readable"
    return [
        Row("latency", f"{what}, p50", "–", Figure.of([p50]), 30, unit="ms", note=note),
        Row("latency", f"{what}, p99", "–", Figure.of([p99]), 150, unit="ms", note=note),
    ]


def servers() -> str | None:
    return os.environ.get(SERVERS_ENV)


def kafka_rows(bootstrap: str, rounds: int, wanted: Callable[[str], bool], *, quick: bool) -> list[Row]:
    made = loads(4 if quick else 250)
    latency = by_reference(list(rollout(Shape(2, 40, 20, 20))))
    load = Load("latency", latency, 20 if quick else 1_000 + WARM_UP)
    give_memory_back()  # as ``freezepoint run`` does
    return asyncio.run(_rows(Bench(bootstrap), rounds, wanted, made | {"latency": load}))


async def _rows(bench: Bench, rounds: int, wanted: Callable[[str], bool], made: dict[str, Load]) -> list[Row]:
    nothing = "a bare consumer that does nothing"
    cases = {
        "json-100k": _Case(
            "worker on Kafka, 100 KB records, plain JSON",
            "a bare consumer that calls `orjson.loads`",
            0.7,
            bare_work=orjson.loads,
        ),
        "packed-100k": _Case(
            "worker on Kafka, 100 KB records, packed",
            nothing,
            0.7,
            floor=_relaying,
            floor_what="decoding and checking each record, and a bare producer of as many result bytes",
        ),
        "small-1k": _Case(
            "worker on Kafka, 1 KB records",
            nothing,
            0.4,
            floor=_decoding,
            floor_what="decoding and checking each record alone",
        ),
        "replay": _Case("restart: replay of open rollouts", "a bare consumer over the same range", 0.5),
    }
    rows: list[Row] = []
    for name, case in cases.items():
        if wanted(name):
            rows += await _against_bare(bench, made[name], rounds, case)
    if wanted("sink"):
        rows.append(await _sink_put(bench, 40 * rounds))
    if wanted("latency"):
        rows += await _latency(bench, made["latency"], 200)
    return rows
