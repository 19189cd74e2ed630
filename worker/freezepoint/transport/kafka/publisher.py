"""The transactional producer of one partition: every publication is one transaction, and any doubt is its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from aiokafka.errors import IllegalOperation
from aiokafka.protocol.transaction import EndTxnRequest

from freezepoint.core.records import OutputRecord
from freezepoint.errors import PublishError
from freezepoint.transport.kafka.cluster import Cluster
from freezepoint.transport.kafka.faults import CLIENT_ERRORS, translate_publish
from freezepoint.transport.kafka.sending import in_parts, send_all


class Publisher:
    """Once started it is the only one of its transactional id that can publish.

    There is no abort: after an error, a timeout or a cancellation the client's state machine, or a request still on its
    way (EndTxn is sent in its version 0, without a sequence), could finish a later transaction of the same producer.
    So the producer is discarded, and whoever starts next settles what it left open.
    """

    def __init__(self, cluster: Cluster, transactional_id: str) -> None:
        self._cluster = cluster
        self._transactional_id = transactional_id
        self._turn = asyncio.Lock()
        self._producer: Any = None
        self._doubtful = False
        self.ended = False
        """Discarded or closed: it publishes no more."""

    async def start(self) -> None:
        """Fence the predecessor and settle its transaction; returns once that is aborted or committed for good.

        The client asks again while the broker answers CONCURRENT_TRANSACTIONS, which is until every marker is written.
        """
        await self._cluster.prepare()
        producer = self._cluster.clients.producer(
            batch_bytes=self._cluster.batch_bytes,
            record_bytes_max=self._cluster.request_bytes_max,
            linger_ms=0,
            transactional_id=self._transactional_id,
        )
        self._watch_commits(producer)
        await self._cluster.clients.start(producer, f"starting the producer {self._transactional_id}")
        self._producer = producer
        if self.ended:
            self.discard()

    def _watch_commits(self, producer: Any) -> None:
        """Notice a commit that broke off. The client repeats it without a word, and the repetition is answered rightly;
        but the first one may still be on its way, and would commit half of this producer's next transaction."""
        send = producer.client.send

        async def watched(node_id: int, request: Any, **options: Any) -> Any:
            try:
                return await send(node_id, request, **options)
            except BaseException:
                self._doubtful |= isinstance(request, EndTxnRequest)
                raise

        producer.client.send = watched

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
                async with asyncio.timeout(self._deadline_s):
                    await self._transact(self._producer, parts)
            except BaseException as error:
                self.discard()
                self._cluster.forget()
                if isinstance(error, CLIENT_ERRORS):
                    raise translate_publish(error, f"publishing as {self._transactional_id}") from error
                raise
            if self._doubtful:
                self.discard()  # this transaction has landed; there must be no other of the same epoch

    @property
    def _deadline_s(self) -> float:
        """Beyond the transaction timeout the broker has aborted it, so that waiting on is in vain."""
        settings = self._cluster.clients.settings
        return min(settings.transaction_timeout_ms, 2 * settings.request_timeout_ms) / 1000

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
