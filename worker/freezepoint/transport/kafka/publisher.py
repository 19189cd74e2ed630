"""The transactional producer of one partition: every publication is one transaction, and any doubt is its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import structlog
from aiokafka.conn import CloseReason
from aiokafka.errors import IllegalOperation, KafkaConnectionError
from aiokafka.protocol.transaction import (
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
)
from aiokafka.structs import TopicPartition

from freezepoint.core.records import OutputRecord
from freezepoint.errors import BrokerError, PublishError
from freezepoint.transport.kafka.cluster import Cluster
from freezepoint.transport.kafka.decisions import Decision
from freezepoint.transport.kafka.faults import CLIENT_ERRORS, translate, translate_publish
from freezepoint.transport.kafka.sending import in_parts, send_all
from freezepoint_schemas.topics import Topic

log = structlog.get_logger()

BATCH_BYTES = 1024 * 1024
"""A partition has one batch under way at a time, and a result is often a hundred kilobytes. However many partitions it goes to,
a transaction hands the client no more than ``WINDOW_BYTES`` at once."""
LOOK_S = 0.05
BRIEFLY_S = 0.3
"""How long the transactions of others are waited for. One that takes longer costs a few markers that end nothing."""
HOW_TO_FIND_IT = "kafka-transactions.sh find-hanging tells what is open there"
MARKERS_S = 2.0
"""How long markers may be on their way until they are believed to be lost."""


class Publisher:
    """Once started it is the only one of its transactional id that can publish.

    There is no abort: after an error, a timeout or a cancellation the client's state machine, or a request still on its
    way (EndTxn is sent in its version 0, without a sequence), could finish a later transaction of the same producer.
    So the producer is discarded, and whoever starts next settles what it left open.
    """

    def __init__(self, cluster: Cluster, transactional_id: str, ledger: TopicPartition) -> None:
        """``ledger``: which nobody else writes to, and every transaction does."""
        self._cluster = cluster
        self._transactional_id = transactional_id
        self._ledger = ledger
        self._turn = asyncio.Lock()
        self._producer: Any = None
        self._doubtful = False
        self._limit: asyncio.Timeout | None = None
        """Of the publication in hand."""
        self._cut_off = False
        """A connection broke: the coordinator may not have told the partitions what became of the last transaction."""
        self._last = Decision.FORGOTTEN
        """What became of the predecessor's last transaction, as asked before it was fenced for good."""
        self.ended = False
        """Discarded or closed: it publishes no more."""

    async def start(self) -> None:
        """Fence the predecessor and settle its transaction; returns once that is aborted or committed for good.

        The client asks again while the broker answers CONCURRENT_TRANSACTIONS, which is until every marker is written, or
        given up (see ``decisions``); then we write it.
        """
        await self._cluster.prepare()
        producer = self._cluster.clients.producer(
            batch_bytes=self._cluster.batch_bytes(BATCH_BYTES),
            record_bytes_max=self._cluster.request_bytes_max,
            linger_ms=0,
            transactional_id=self._transactional_id,
        )
        self._watch_requests(producer)
        self._watch_connections(producer)
        await self._cluster.clients.start(producer, f"starting the producer {self._transactional_id}")
        self._producer = producer
        if self.ended:
            self.discard()
        else:
            await self._mend(producer)

    async def _ask(self) -> None:
        """How the predecessor's transaction stands, before each request that may fence it: once one has, the answer is final.

        What was open before the request that was granted was committed in between: an open one is aborted first, and the
        request is not granted but to be repeated.
        """
        asked = await self._cluster.decision(self._transactional_id)
        if asked is not Decision.FORGOTTEN:
            self._last = asked

    def _watch_requests(self, producer: Any) -> None:
        """Notice a commit that broke off. The client repeats it without a word, and the repetition is answered rightly;
        but the first one may still be on its way, and would commit half of this producer's next transaction.

        And begin no transaction on a new connection before it is known that the one before is decided.
        """
        send = producer.client.send

        async def watched(node_id: int, request: Any, **options: Any) -> Any:
            if isinstance(request, InitProducerIdRequest):
                await self._ask()
            if self._cut_off and self._limit is not None and isinstance(request, AddPartitionsToTxnRequest):
                self._give_up(self._limit)
                raise KafkaConnectionError("a connection broke while the transaction began")
            try:
                return await send(node_id, request, **options)
            except BaseException:
                self._doubtful |= isinstance(request, EndTxnRequest)
                raise

        producer.client.send = watched

    @staticmethod
    def _give_up(limit: asyncio.Timeout) -> None:
        """End the publication in hand, now: the client would try again for ever."""
        if not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time())

    def _watch_connections(self, producer: Any) -> None:
        closed = producer.client._on_connection_closed  # noqa: SLF001 - the client tells nobody else

        def noted(connection: Any, reason: CloseReason) -> None:
            self._cut_off |= reason not in (CloseReason.IDLE_DROP, CloseReason.SHUTDOWN)
            closed(connection, reason)

        producer.client._on_connection_closed = noted  # noqa: SLF001 - as above

    async def _mend(self, producer: Any) -> None:
        """Tell the partitions what was decided, where the coordinator has not. What is undecided may be another producer's:
        then it ends nothing.

        :raises BrokerError: nothing helped.
        """
        is_aborted = self._last is Decision.ABORT
        if is_aborted:
            await self._abort_again(producer)
        written = await self._written()
        if await self._is_decided(written, BRIEFLY_S):
            return
        if not await self._is_decided([self._ledger], 0):
            self._warn()
        await self._tell(producer, written, aborted=is_aborted)
        if not await self._is_decided([self._ledger], self._deadline_s):
            raise PublishError(
                f"{self._ledger.topic}[{self._ledger.partition}] stays undecided: {HOW_TO_FIND_IT}"
            )

    async def _abort_again(self, producer: Any) -> None:
        """The coordinator has forgotten an abort as this producer started, and would have a commit told by whoever starts
        next, should the mending fail. So it is given one to remember first, before anything that needs more than it."""
        with suppress(BrokerError, TimeoutError):  # it is only to be told of
            async with asyncio.timeout(2 * BRIEFLY_S):
                if not await self._is_decided([self._ledger], BRIEFLY_S):
                    self._warn()
        await self._tell(producer, [self._ledger], aborted=True)

    def _warn(self) -> None:
        log.warning(
            "transaction_left_undecided",
            transactional_id=self._transactional_id,
            decided="abort" if self._last is Decision.ABORT else "commit",
        )

    async def _tell(self, producer: Any, sources: Sequence[TopicPartition], *, aborted: bool) -> None:
        """A transaction without a record, whose markers end the one before.

        :raises BrokerError: it failed, or a request to end it may be on its way still and would end the next one.
        """
        doing = f"settling {self._transactional_id}"
        try:
            async with asyncio.timeout(self._deadline_s):
                await producer.begin_transaction()
                for source in sources:
                    producer._txn_manager.maybe_add_partition_to_txn(source)  # noqa: SLF001 - else only a record adds it
                await (producer.abort_transaction() if aborted else producer.commit_transaction())
        except CLIENT_ERRORS as error:
            raise translate(error, doing) from error
        if self._doubtful:
            raise PublishError(f"a connection broke while {doing}")

    async def _is_decided(self, sources: Sequence[TopicPartition], within_s: float) -> bool:
        """Whether everything that is stored there now is decided soon."""
        give_up_at = asyncio.get_running_loop().time() + within_s
        decided = await self._cluster.ends(sources)
        stored = await self._cluster.stored_ends(sources)
        while any(decided[source] < stored[source] for source in sources):
            if asyncio.get_running_loop().time() > give_up_at:
                return False
            await asyncio.sleep(LOOK_S)
            decided = await self._cluster.ends(sources)
        return True

    async def _written(self) -> list[TopicPartition]:
        """All that its transactions may write to."""
        outputs = [
            TopicPartition(self._cluster.names[topic], partition)
            for topic in (Topic.TRAJECTORIES, Topic.DEAD_LETTERS)
            for partition in range(await self._cluster.partitions(topic))
        ]
        return [self._ledger, *outputs]

    async def publish(self, records: Sequence[OutputRecord]) -> None:
        """All records or none.

        :raises FencedError: another one of this transactional id started.
        :raises PublishError: failed, or not known to have succeeded.
        :raises ConfigurationError: a topic or a right is missing; nothing was written.
        """
        if not records:
            return  # an empty commit asks nothing of the broker: it would neither write nor prove anything
        async with self._turn:
            if self._producer is None:
                raise PublishError(f"{self._transactional_id} publishes no more: acquire the partition anew")
            parts = in_parts(records, self._cluster)
            try:
                async with asyncio.timeout(self._deadline_s) as self._limit:
                    await self._require_decided()
                    await self._transact(self._producer, parts)
            except BaseException as error:
                self.discard()
                self._cluster.forget()
                if isinstance(error, (*CLIENT_ERRORS, BrokerError)):
                    raise translate_publish(error, f"publishing as {self._transactional_id}") from error
                raise
            finally:
                self._limit = None
            if self._doubtful:
                self.discard()  # this transaction has landed; there must be no other of the same epoch

    @property
    def _deadline_s(self) -> float:
        """Beyond the transaction timeout the broker has aborted it, so that waiting on is in vain."""
        settings = self._cluster.clients.settings
        return min(settings.transaction_timeout_ms, 2 * settings.request_timeout_ms) / 1000

    async def _require_decided(self) -> None:
        """Another transaction could decide the one before otherwise than it was decided.

        :raises PublishError: it is still undecided.
        """
        if not self._cut_off:
            return
        self._cut_off = False
        if not await self._is_decided(await self._written(), MARKERS_S):
            raise PublishError(f"the last transaction of {self._transactional_id} is left undecided")

    async def _transact(self, producer: Any, parts: Iterable[OutputRecord]) -> None:
        await producer.begin_transaction()
        try:
            await send_all(producer, parts, self._cluster)
            await producer.commit_transaction()
        except (IllegalOperation, AssertionError) as error:
            reason = _broken_by(producer)
            if reason is None:
                raise
            raise reason from error

    def discard(self) -> None:
        """Let go of the producer without sending or ending anything."""
        self.ended = True
        if self._producer is not None:
            producer, self._producer = self._producer, None
            self._cluster.clients.dispose(producer, unflushed=True)

    async def close(self) -> None:
        """Wait for the publication in hand, then free the producer."""
        async with self._turn:
            self.ended = True
            if self._producer is not None:
                producer, self._producer = self._producer, None
                await self._cluster.clients.close(producer)


def _broken_by(producer: Any) -> BaseException | None:
    """What ended the transaction between two sends, of which the next one only says that there is none any more."""
    ended = producer._txn_manager.wait_for_transaction_end()  # noqa: SLF001 - the client tells it on a commit alone
    return ended.exception() if ended is not None and ended.done() and not ended.cancelled() else None
