"""What a transport must offer. The worker cannot tell which one it has; one contract suite runs on all of them.

Five roles, five ports: ``Producer`` (durable publication of input), ``GroupMember`` (which partitions are mine, and
their records), ``Lease`` (exclusive ownership of one partition and atomic publication under it), ``Subscription``
(committed records of a topic, shared out among the consumers of a group) and ``Reader`` (all of them, without a group).
``TopicAdmin`` creates and verifies topics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint_schemas.topics import Topic, TopicNames, TopicSpec


@dataclass(frozen=True, slots=True)
class Position:
    """Where a record lies in its topic. ``offset`` is -1 where the broker did not say: it knew the record already."""

    partition: int
    offset: int


class Producer(Protocol):
    """Publishes input events at least once, in order per key."""

    async def send(self, records: Sequence[OutputRecord]) -> Sequence[Position]:
        """Return once every record is durable; records above the topic's limit are split.

        :returns: where each of the records lies; of a split one, its last part.

        :raises BrokerUnavailableError: not acknowledged within the deadline; a retry may repeat records.
        :raises MissingTopicError: the topic does not exist.
        """
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Poll:
    """What one poll returned.

    ``generation`` grows with every (re)assignment, 0 is before the first one; ``assigned`` are the partitions this member has in it.
    ``records``: by partition, in offset order, only of partitions whose lease was started in this generation.
    """

    generation: int
    assigned: frozenset[int]
    records: Mapping[int, Sequence[InputRecord]] = field(default_factory=dict)


class PartitionFacts(Protocol):
    """What is known of one token partition when its fold is made from the ledger."""

    @property
    def partition(self) -> int: ...

    @property
    def partition_count(self) -> int:
        """Partitions of the tokens topic."""
        ...

    @property
    def log_start(self) -> int:
        """The first offset the tokens partition still has."""
        ...

    @property
    def log_end(self) -> int:
        """The offset after the last committed record of the tokens partition."""
        ...

    @property
    def committed(self) -> int | None:
        """The group's committed offset: a hint where to replay from."""
        ...

    @property
    def recorded(self) -> int | None:
        """What that commit says of the ledger: it had recorded by then that every record below this offset was applied. None
        where it says nothing, as those by hand or of older releases."""
        ...

    @property
    def ledger(self) -> Sequence[InputRecord]:
        """The ledger partition read to its end, the latest record of each key."""
        ...

    async def record_at(self, offset: int) -> InputRecord | None:
        """The tokens record at that offset, None where there is none any more."""
        ...

    async def first(self) -> int:
        """The first offset the tokens partition has by now: retention goes on."""
        ...


class Lease(PartitionFacts, Protocol):
    """Exclusive ownership of one token partition, proved when it was acquired; its facts are of that moment, the ledger's
    after fencing.

    Every method that publishes raises :class:`PublishError` where the outcome is unknown; the lease is then dead:
    close it, acquire anew, and let the ledger say what landed.
    """

    async def start(self, offset: int) -> None:
        """Deliver records from that offset on in the member's polls.

        :raises OwnershipLostError: the generation in which it was acquired has passed.
        """
        ...

    async def publish(self, records: Sequence[OutputRecord]) -> None:
        """Write all the records, or none: one transaction, split where above the limit.

        A cancellation ends the lease as a failure does: the outcome is unknown. No records publish nothing.

        :raises FencedError: another owner started.
        :raises PublishError: failed or unknown; the lease is dead.
        :raises StorageFullError: nothing was written, and the lease is dead.
        :raises ConfigurationError: a topic or a right is missing; nothing was written, and the lease is dead.
        :raises RecordTooLargeError: a record cannot be split; nothing was written, and the lease lives on.
        """
        ...

    async def renew(self, generation: int, offset: int, records: Sequence[OutputRecord]) -> None:
        """Keep the lease in a new assignment that gave the partition back: publish (a progress record at least) under it
        and deliver from ``offset`` on.

        :raises FencedError: somebody owned it in between.
        :raises OwnershipLostError: the generation has passed, by now or meanwhile; the lease lives on.
        """
        ...

    async def commit_hint(self, offset: int, recorded: int) -> bool:
        """Commit the group's offset. Best effort: losing it costs replay, never a result. Whether it is known to be committed.

        :param recorded: up to where the ledger has recorded that records were applied, in a transaction that has landed:
            for whoever comes next and finds a ledger that knows of nothing.
        """
        ...

    async def caught_up(self) -> bool:
        """Whether everything that is committed in the partition now has been delivered."""
        ...

    async def end(self) -> int:
        """The offset after the last committed record of the tokens partition now."""
        ...

    def pause(self) -> None:
        """Deliver nothing until :meth:`resume`."""
        ...

    def resume(self) -> None: ...

    async def close(self) -> None:
        """Give the lease up: stop delivering and free its producer. Aborts nothing that was published."""
        ...


class GroupMember(Protocol):
    """One process in a consumer group over the tokens topic."""

    @property
    def session_timeout_s(self) -> float:
        """How long a member that died may go on holding its partitions."""
        ...

    async def poll(self, timeout_s: float, records_max: int) -> Poll:
        """Wait for records or a new assignment, at most that long. Must be called steadily: it keeps membership.

        :raises BrokerError: the membership cannot go on.
        """
        ...

    async def acquire(self, partition: int) -> Lease:
        """Fence the previous owner, prove ownership in the current generation and read the ledger.

        :raises OwnershipLostError: the assignment changed meanwhile.
        :raises BrokerError: the broker failed; try again.
        """
        ...

    async def leave(self) -> None:
        """Leave the group, so that others take over at once."""
        ...


@dataclass(frozen=True, slots=True)
class StartAt:
    """Where a consumer group begins in a partition for which it has stored no offset yet.

    ``position``: ``earliest``, ``latest`` (behind what is committed then) or a time in milliseconds since the epoch (the
    first record stamped then or later). With ``ignore_stored`` a stored offset is overwritten, once per partition: for
    a deliberate second reading, by a group's only consumer.
    """

    position: Literal["earliest", "latest"] | int = "earliest"
    ignore_stored: bool = False


FROM_THE_BEGINNING = StartAt()


@dataclass(frozen=True, slots=True)
class Started:
    """``offset``: the first one that is delivered; ``expired``: how many before it, not read by the group yet, retention
    has removed."""

    offset: int
    expired: int = 0


@dataclass(frozen=True, slots=True)
class Feed:
    """What one poll of a subscription returned.

    ``started``: partitions whose delivery begins anew. One that a consumer keeps from one assignment to the next goes
    on where it was and is not named, unless the group has stored an offset meanwhile that this consumer did not, or
    retention has removed what it would read next.
    ``records``: by partition, in offset order, of ``assigned`` partitions that were started.
    """

    generation: int
    assigned: frozenset[int]
    started: Mapping[int, Started] = field(default_factory=dict)
    records: Mapping[int, Sequence[InputRecord]] = field(default_factory=dict)


class Subscription(Protocol):
    """One consumer of a group over a topic: committed records, at least once, split records as they are stored.

    Each partition is one consumer's. A start that was not stored is stored at once, so that whoever takes over begins
    there and not where "latest" is by then.
    """

    async def poll(self, timeout_s: float, records_max: int) -> Feed:
        """Wait for records or a new assignment, at most that long. Must be called steadily: it keeps membership.

        :raises ConfigurationError: a stored offset lies beyond the partition's end.
        :raises BrokerError: the membership cannot go on; close it and subscribe anew.
        """
        ...

    async def commit(self, generation: int, offsets: Mapping[int, int]) -> None:
        """Store where the group goes on, by partition: the offset after the last one that need not be read again.

        :raises OwnershipLostError: a newer assignment came; the new owner goes on from what was stored before.
        :raises BrokerError: not acknowledged; it may or may not be stored.
        """
        ...

    async def caught_up(self) -> bool:
        """Whether something is assigned, and all that is committed in it now has been delivered."""
        ...

    def shared_out(self) -> bool:
        """Whether what is not assigned here is assigned to members that live, as far as can be known. False for a session
        timeout at most after somebody died."""
        ...

    def pause(self) -> None:
        """Deliver nothing until :meth:`resume`; polls go on keeping the membership."""
        ...

    def resume(self) -> None: ...

    async def close(self) -> None:
        """Leave the group, so that others take over at once. Stores nothing."""
        ...


class Reader(Protocol):
    """Reads committed records of one topic, of all or some partitions, split records as they are stored."""

    async def poll(self, timeout_s: float, records_max: int) -> Sequence[InputRecord]:
        """The next records, in offset order per partition; empty at the timeout."""
        ...

    async def at_end(self) -> bool:
        """Whether everything that was committed when this was called has been returned."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Extent:
    """What there is of a partition: ``first`` is the first offset it still has, ``end`` the one after the last
    committed record."""

    first: int
    end: int


Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of an examination: ``mend`` is the command, or else the deed, that sets right what is not ``ok``."""

    subject: str
    verdict: Verdict
    message: str
    mend: str | None = None


@dataclass(frozen=True, slots=True)
class Examined:
    """``usable``: whether topics can be looked at; else the broker is out of reach, or there is nothing yet."""

    checks: Sequence[Check]
    usable: bool = True


@dataclass(frozen=True, slots=True)
class Retention:
    """A record stays for ``milliseconds`` at least (None: for ever), unless its partition grows beyond ``partition_bytes``
    (None: however large that is)."""

    milliseconds: int | None = None
    partition_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TopicFinding:
    """One line of a check: what was expected of a topic, what is there, and the command that mends it.

    ``spoils``: a worker must not run like this, results would be lost or wrong. ``warns``: it is allowed, and may not be
    what is wanted.
    """

    topic: str
    ok: bool
    message: str
    spoils: bool = False
    warns: bool = False


class TopicAdmin(Protocol):
    """Creates and verifies topics."""

    async def apply(self, specs: Sequence[TopicSpec]) -> list[TopicFinding]:
        """Create what is missing and set what differs; never deletes, shrinks or re-partitions a topic."""
        ...

    async def check(self, specs: Sequence[TopicSpec]) -> list[TopicFinding]:
        """Compare; changes nothing."""
        ...

    async def partitions(self, topic: Topic) -> int:
        """:raises MissingTopicError: the topic does not exist."""
        ...

    async def identity(self, topic: Topic) -> str | None:
        """What tells the topic from one of its name before or after it; None where the broker does not say."""
        ...

    async def retention(self, topic: Topic) -> Retention:
        """How long records stay.

        :raises MissingTopicError: the topic does not exist.
        """
        ...


class Transport(Protocol):
    """A broker, reached. Made by ``freezepoint.transport.connect``."""

    names: TopicNames

    async def producer(self) -> Producer: ...

    async def join(self, group: str) -> GroupMember:
        """Join a consumer group over the tokens topic."""
        ...

    async def subscribe(self, topic: Topic, group: str, start: StartAt = FROM_THE_BEGINNING) -> Subscription:
        """Read a topic together with the group's other consumers."""
        ...

    async def reader(
        self, topic: Topic, *, partitions: Sequence[int] | None = None, start: Mapping[int, int] | None = None
    ) -> Reader:
        """Read a topic from its beginning, or from the given offsets by partition."""
        ...

    async def extents(self, topic: Topic) -> Mapping[int, Extent]:
        """What there is of each partition now.

        :raises MissingTopicError: the topic does not exist.
        """
        ...

    def admin(self) -> TopicAdmin: ...

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...


@dataclass(frozen=True, slots=True)
class GroupOffset:
    """For both, see ``committed`` and ``recorded`` of ``PartitionFacts``."""

    committed: int
    recorded: int | None = None


class Broker(Transport, Protocol):
    """A transport that can also be looked at by people who operate it."""

    async def examine(self, group: str) -> Examined:
        """What a worker of this group needs of the broker itself, topics and ledger aside. Writes no record.

        Does not raise for what it finds: that the broker cannot be reached is its only check then.
        """
        ...

    async def offsets(self, group: str) -> Mapping[int, GroupOffset]:
        """What the group has committed of the tokens topic, by partition.

        :raises ConfigurationError: a right is missing.
        """
        ...

    async def clock_ahead_s(self) -> tuple[float, float]:
        """By how much the broker's clock is ahead of ours, and how far that may be wrong.

        :raises ConfigurationError: a right is missing that only this takes.
        """
        ...
