"""Continuous load with known truth: simulated rollouts side by side, spiced with what producers do wrong."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Self

from aiokafka import AIOKafkaProducer

from freezepoint.core.records import OutputRecord
from freezepoint.simulate import Profile, SimulatedRollout, Truth
from freezepoint.transport.splitting import split_record
from freezepoint_schemas import codec
from freezepoint_schemas.events import InputEvent
from freezepoint_schemas.headers import Headers
from freezepoint_schemas.topics import Topic, partition_for
from tests.events import clear, complete, entry

RECORD_BYTES_MAX = 1_000_000
TICK_S = 0.05
WINDOW = 2_000
ROLLOUTS_MAX = 1_000_000
SEND_TIMEOUT_MS = 120_000


@dataclass(frozen=True, slots=True)
class Sent:
    """One record to publish. Without ``partition`` the key decides."""

    key: bytes | None
    value: bytes | None
    partition: int | None = None
    timestamp_ms: int | None = None
    headers: Headers = ()

    @classmethod
    def of(cls, event: InputEvent, *, packed: bool = False) -> Sent:
        return cls(event.rollout_id.encode(), codec.encode_event(event, packed=packed))


Place = tuple[int, int]
"""Partition and offset."""


class Publisher:
    """An idempotent producer of plain aiokafka: in order, each record acknowledged, over outages."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._partitions = partitions
        self._producer: Any = None
        self.records = 0

    async def __aenter__(self) -> Self:
        self._producer = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            client_id="load",
            acks="all",
            enable_idempotence=True,
            linger_ms=2,
            max_batch_size=256 * 1024,
            max_request_size=4 * 1024 * 1024,
            request_timeout_ms=SEND_TIMEOUT_MS,
        )
        await self._producer.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._producer.stop()

    async def send(self, records: Iterable[Sent]) -> list[Place]:
        """Return once all of them are acknowledged: where they, and their parts, lie."""
        window: list[asyncio.Future[Any]] = []
        places: list[Place] = []
        for record in records:
            for part in _parts(record):
                window.append(await self._enqueue(part))
                self.records += 1
            if len(window) >= WINDOW:
                places += _places(await asyncio.gather(*window))
                window = []
        return places + _places(await asyncio.gather(*window))

    async def _enqueue(self, record: Sent) -> asyncio.Future[Any]:
        partition = record.partition
        if partition is None:
            partition = partition_for(record.key or b"", self._partitions)
        return await self._producer.send(  # type: ignore[no-any-return]
            self._topic,
            record.value,
            record.key,
            partition=partition,
            timestamp_ms=record.timestamp_ms,
            headers=list(record.headers),
        )


def _places(acknowledged: Iterable[Any]) -> list[Place]:
    return [(each.partition, each.offset) for each in acknowledged]


def _parts(record: Sent) -> Iterator[Sent]:
    whole = OutputRecord(Topic.TOKENS, record.key, record.value, record.headers)
    for part in split_record(whole, RECORD_BYTES_MAX):
        yield Sent(part.key, part.value, record.partition, record.timestamp_ms, part.headers)


@dataclass(slots=True)
class Script:
    """One life to publish: its records, and what must come of it (None where the script spoils it itself)."""

    rollout_id: str
    records: Iterator[Sent]
    truth: Truth | None
    closes: bool = True


Author = Callable[[int], Script]
"""Makes the script of the life of that number."""


def rollouts(profile: Profile, *, packed: bool = True) -> Author:
    """Simulated rollouts, each under its own id."""

    def write(number: int) -> Script:
        drawn = SimulatedRollout.draw(profile, number)
        events = [*(step.event for step in drawn.steps), drawn.closing.event]
        return Script(
            drawn.truth.rollout_id, (Sent.of(event, packed=packed) for event in events), drawn.truth
        )

    return write


def reused(profile: Profile, ids: int, rng: Random, *, abandoned: float = 0.2) -> Author:
    """Simulated rollouts under a few ids: each life begins with a clear or a tombstone, and some are given up in the
    middle without a word, so that the next clear finds them open."""

    def write(number: int) -> Script:
        drawn = SimulatedRollout.draw(profile, number)
        rollout_id = f"{profile.run}.again-{number % ids}"
        events: list[InputEvent] = [*(step.event for step in drawn.steps), drawn.closing.event]
        closes = rng.random() >= abandoned
        if not closes:
            del events[rng.randrange(len(events)) :]
        opening = [_opening(rollout_id, number, rng)]
        renamed = (
            Sent.of(event.model_copy(update={"rollout_id": rollout_id}), packed=True) for event in events
        )
        return Script(rollout_id, itertools.chain(opening, renamed), None, closes)

    return write


def _opening(rollout_id: str, number: int, rng: Random) -> Sent:
    kind = rng.randrange(3)
    if kind == 0:
        return Sent(rollout_id.encode(), None)
    fields = {} if kind == 1 else {"group_id": f"group-{number}", "group_size": 4}
    return Sent.of(clear(rollout_id, **fields))


def tiny(profile: Profile) -> Author:
    """One call and the end of its rollout, as small as they come; without the simulation's cost."""

    def write(number: int) -> Script:
        rollout_id = f"{profile.run}.tiny-{number}"
        call = entry(rollout_id, "c", [number % 1000, 1, 2], [3, 4])
        return Script(rollout_id, iter([Sent.of(call), Sent.of(complete(rollout_id, n_calls=1))]), None)

    return write


Spoiler = Callable[[Sent], list[Sent]]
"""What comes before a record, mostly nothing."""


@dataclass(slots=True)
class Tally:
    """What was published so far. ``truths``: of closed rollouts that nobody spoiled. ``closed``: lives that ended."""

    truths: dict[str, Truth] = field(default_factory=dict)
    closed: int = 0
    lives: int = 0


@dataclass
class Load:
    """Publishes scripts, ``concurrency`` of them side by side, ``rate`` records a second (0: as fast as they are
    acknowledged), until told to stop or ``limit`` lives have begun; what is open then is finished at once."""

    publisher: Publisher
    author: Author
    tally: Tally
    seed: int
    rate: float = 200.0
    concurrency: int = 16
    spoil: Spoiler | None = None
    limit: int = ROLLOUTS_MAX
    _open: dict[str, Script] = field(default_factory=dict)
    _held: Script | None = None
    _begun: int = 0
    _tainted: set[str] = field(default_factory=set)
    _rng: Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = Random(self.seed)

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop`` is set or the limit is reached; the open scripts to their end."""
        began, published = time.monotonic(), 0
        while not stop.is_set() and (self._begun < self.limit or self._open):
            due = int((time.monotonic() - began) * self.rate) - published if self.rate else WINDOW
            batch = [record for _ in range(min(due, WINDOW)) for record in self._step()]
            published += len(batch)
            await self.publisher.send(batch)
            if self.rate:
                await asyncio.sleep(TICK_S)
        while self._open:
            await self.publisher.send(record for _ in range(WINDOW) for record in self._step(starting=False))

    def _step(self, *, starting: bool = True) -> list[Sent]:
        """The next record of some open script, with what spoils it."""
        while starting and len(self._open) < self.concurrency and self._begun < self.limit and self._start():
            pass
        if not self._open:
            return []
        script = self._open[self._rng.choice(list(self._open))]
        record = next(script.records, None)
        if record is None:
            self._end(script)
            return []
        before = [] if self.spoil is None else self.spoil(record)
        if any(spoiler.key == record.key for spoiler in before):
            self._tainted.add(script.rollout_id)
        return [*before, record]

    def _start(self) -> bool:
        """Begin the next script, unless the life of its id before it still goes on."""
        script = self._held or self.author(self.tally.lives)
        self._held = script if script.rollout_id in self._open else None
        if self._held is not None:
            return False
        self._begun += 1
        self.tally.lives += 1
        self._open[script.rollout_id] = script
        return True

    def _end(self, script: Script) -> None:
        del self._open[script.rollout_id]
        self.tally.closed += script.closes
        if script.truth is not None and script.rollout_id not in self._tainted:
            self.tally.truths[script.rollout_id] = script.truth


class Garbage:
    """Before one record in ``one_in``: a record that cannot be read, of the same rollout or of none; counted by reason."""

    def __init__(self, one_in: int, seed: int, partitions: int) -> None:
        self._one_in = one_in
        self._rng = Random(seed)
        self._partitions = partitions
        self.injected: Counter[str] = Counter()
        self.rollouts: set[str] = set()

    def __call__(self, record: Sent) -> list[Sent]:
        if self._rng.randrange(self._one_in):
            return []
        partition = self._rng.randrange(self._partitions)
        keyed = [
            (b"{", "undecodable_record"),
            (b"[1]", "undecodable_record"),
            (b'{"event": "call_intent"}', "invalid_entry"),
        ]
        if self._rng.random() < 0.5:
            value, reason = self._rng.choice(keyed)
            assert record.key is not None
            self.rollouts.add(record.key.decode())
            self.injected[reason] += 1
            return [Sent(record.key, value)]
        self.injected["invalid_key"] += 1
        key = self._rng.choice([None, b"", b"no/id", b"\xff"])
        return [Sent(key, self._rng.randbytes(20), partition)]
