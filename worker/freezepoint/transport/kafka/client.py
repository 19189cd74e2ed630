"""Clients of the cluster: how they are configured, started and, whatever became of them, closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.conn import collect_hosts
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import KafkaConnectionError, ProducerClosed, SaslAuthenticationFailed

from freezepoint.errors import BrokerUnavailableError, ConfigurationError, FreezepointError
from freezepoint.settings import KafkaSettings
from freezepoint.transport.kafka.bearer import BearerProvider, BearerSource
from freezepoint.transport.kafka.credentials import credentials, refused_token
from freezepoint.transport.kafka.faults import CLIENT_ERRORS, translate
from freezepoint.transport.kafka.marks import watch_answers
from freezepoint.transport.kafka.sessions import AskingConnection, Sessions
from freezepoint.transport.kafka.tls import Certificates, tls_context, tls_refusal

log = logging.getLogger(__name__)

METADATA_MAX_AGE_MS = 60_000
"""How late a new leader or a grown topic is noticed without any error."""

RETRY_BACKOFF_MS = 50
"""Also how soon a fencing producer asks again while its predecessor's transaction is being aborted."""

CONNECTION_KEYS = frozenset({
    "client_id", "request_timeout_ms", "security_protocol", "ssl_context", "sasl_mechanism", "sasl_plain_username",
    "sasl_plain_password", "sasl_oauth_token_provider",
})  # fmt: skip
IDLE_CONNECTION_MS = 540_000
FETCH_WAIT_MS = 500
CLOSE_GRACE_S = 5.0
SILENT_GRACE_S = 0.3
"""The same when the broker is known not to answer."""
SEVER_GRACE_S = 1.0
PROBE_S = 2.0


def connection_arguments(bootstrap: str, settings: KafkaSettings) -> dict[str, Any]:
    """What every client needs to reach the cluster.

    :raises ConfigurationError: credentials are missing or contradict each other, or a TLS file cannot be used.
    """
    arguments: dict[str, Any] = {
        "bootstrap_servers": bootstrap.split(","),
        "client_id": settings.client_id,
        "request_timeout_ms": settings.request_timeout_ms,
        "metadata_max_age_ms": METADATA_MAX_AGE_MS,
        "retry_backoff_ms": RETRY_BACKOFF_MS,
        "connections_max_idle_ms": IDLE_CONNECTION_MS,
        "security_protocol": settings.security_protocol,
    }
    arguments |= credentials(settings)
    if settings.security_protocol.endswith("SSL"):
        arguments["ssl_context"] = tls_context(settings)
    return arguments


class Clients:
    """Makes aiokafka's clients with every argument that matters set, since its defaults commit by themselves, reset to
    the latest record and read what was never committed. Whatever it starts it can also close, bounded in time, with
    or without a broker."""

    def __init__(self, bootstrap: str, settings: KafkaSettings) -> None:
        self.bootstrap = bootstrap
        self.settings = settings
        self.timeout_s = settings.request_timeout_ms / 1000
        self.silent = False
        """Whether the broker's last answer did not come: then none is waited for when clients are closed."""
        self._connection: dict[str, Any] | None = None
        self._sessions: Sessions | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._certificates = Certificates(settings)

    @property
    def connection(self) -> dict[str, Any]:
        if self._connection is None:
            self._connection = connection_arguments(self.bootstrap, self.settings)
        return self._connection

    @property
    def _bearers(self) -> BearerSource | None:
        found: BearerProvider | None = self.connection.get("sasl_oauth_token_provider")
        return None if found is None else found.source

    def _watched(self, client: Any) -> Any:
        """Connections that authenticate are renewed in time."""
        if self.settings.security_protocol.startswith("SASL_"):
            if self._sessions is None:
                self._sessions = Sessions(self._bearers)
            self._sessions.watch(_inner(client))
        return client

    @property
    def user(self) -> str | None:
        """Who we are to the broker, as far as we know: it may make another name of a token than its subject."""
        last = self._bearers.last if self._bearers is not None else None
        return last.subject if last is not None else self.settings.sasl_username

    def producer(
        self, *, batch_bytes: int, record_bytes_max: int, linger_ms: int, transactional_id: str | None = None
    ) -> Any:
        compression = self.settings.compression
        producer = AIOKafkaProducer(
            **self.connection,
            acks="all",
            enable_idempotence=True,
            compression_type=None if compression == "none" else compression,
            linger_ms=linger_ms,
            max_batch_size=batch_bytes,
            max_request_size=record_bytes_max,
            transactional_id=transactional_id,
            transaction_timeout_ms=self.settings.transaction_timeout_ms,
        )
        return self._watched(producer)

    def consumer(self, group: str | None = None, *, partition_fetch_bytes: int | None = None) -> Any:
        settings = self.settings
        consumer = AIOKafkaConsumer(
            **self.connection,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            check_crcs=True,
            # Exactly one, since aiokafka offers several wrongly; eager. Sticky keeps state on its class.
            partition_assignment_strategy=(RangePartitionAssignor,),
            session_timeout_ms=settings.session_timeout_ms,
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            # How long a rebalance waits for members that have not rejoined; ours do so in the background, within a
            # heartbeat. The broker may hold back the answer to a join for that long, and the client's request timeout
            # goes for this request too: at the same length, members would give up and join anew for ever.
            rebalance_timeout_ms=min(settings.session_timeout_ms, settings.request_timeout_ms * 3 // 4),
            max_poll_interval_ms=settings.max_poll_interval_ms,
            fetch_max_wait_ms=FETCH_WAIT_MS,
            fetch_min_bytes=1,
            fetch_max_bytes=settings.fetch_max_bytes,
            max_partition_fetch_bytes=partition_fetch_bytes or settings.partition_fetch_bytes,
        )
        return self._watched(consumer)

    def admin(self) -> Any:
        """It asks for the metadata of every topic of the cluster, and so seldom."""
        return self._watched(
            AIOKafkaAdminClient(**self.connection | {"metadata_max_age_ms": 10 * METADATA_MAX_AGE_MS})
        )

    async def start(self, client: Any, doing: str) -> None:
        """Start a client within the request timeout. One that fails to start is closed too: aiokafka leaves that to us.

        :raises BrokerUnavailableError: nothing answers, or there is no token yet to connect with.
        :raises ConfigurationError: the broker refuses us, or whoever gives tokens does.
        """
        self._certificates.renew(self.connection.get("ssl_context"))
        try:
            if self._bearers is not None:  # the client would only log why there is none
                await self._bearers.bearer()
            async with asyncio.timeout(self.timeout_s):
                await client.start()
            _require_brokers(client)
            if isinstance(client, AIOKafkaConsumer) and client._group_id is not None:  # noqa: SLF001 - as it was given
                watch_answers(client._coordinator)  # noqa: SLF001 - made by the start
                watch_commits(client._coordinator)  # noqa: SLF001 - as above
            self.silent = False
            if self._sessions is not None and not self._sessions.known:
                await self._learn_session(self._sessions)
        except CLIENT_ERRORS as error:
            self.silent = True
            self.dispose(client)
            where = f"{doing} at {self.bootstrap}"
            if isinstance(error, KafkaConnectionError):
                raise await self.refusal() or await self._unreached(where) from error
            raise translate(error, where) from error
        except BaseException:
            self.dispose(client)
            raise

    async def refusal(self) -> FreezepointError | None:
        """Whether we were refused, or given no token, rather than not answered. The client only logs why it could not
        connect, so that this asks once more, and only where there is something to refuse."""
        if self.settings.security_protocol == "PLAINTEXT":
            return None
        if self._bearers is not None:
            try:
                await self._bearers.bearer()
            except FreezepointError as error:
                return error
        self._certificates.renew(self.connection.get("ssl_context"))
        connection = self._asking()
        where = f"{connection.host}:{connection.port}"
        try:
            await connection.connect()
        except CLIENT_ERRORS as error:
            await connection.gone()
            refused_tls = tls_refusal(self.settings, error, where)
            if refused_tls is not None:
                return refused_tls
            if self._bearers is not None and isinstance(error, SaslAuthenticationFailed):
                return refused_token(self.settings)
            refused = translate(error, f"connecting at {where}")
            return refused if isinstance(refused, ConfigurationError) else None
        await connection.close()
        return None

    def _asking(self) -> AskingConnection:
        """To the first of the servers, not connected yet."""
        wanted = {key: value for key, value in self.connection.items() if key in CONNECTION_KEYS}
        host, port, _ = next(iter(collect_hosts(self.connection["bootstrap_servers"])))
        return AskingConnection(host, port, **wanted)

    async def _learn_session(self, sessions: Sessions) -> None:
        """A server that does not tell in time is asked when the next client starts."""
        connection = self._asking()
        with contextlib.suppress(*CLIENT_ERRORS):
            async with asyncio.timeout(PROBE_S):
                await connection.connect()
                sessions.learn(connection.lifetime_ms)
                await connection.close()

    async def _unreached(self, doing: str) -> BrokerUnavailableError:
        """The client's own message lists addresses as Python objects, and does not tell silence from another protocol."""
        if not await self._port_answers():
            return BrokerUnavailableError(
                f"no answer from the broker while {doing}: nothing listens there, or nobody knows that name"
            )
        spoken = self.settings.security_protocol
        return BrokerUnavailableError(
            f"no answer from the broker while {doing}: the port is open, but nothing there answers as {spoken} goes; it may be "
            "starting, or stuck; if it wants TLS or a password, set kafka.security_protocol and what belongs to it"
        )

    async def _port_answers(self) -> bool:
        host, port, _ = next(iter(collect_hosts(self.connection["bootstrap_servers"])))
        try:
            async with asyncio.timeout(PROBE_S):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    async def close(self, client: Any) -> None:
        """Close a client; one that is stuck is cut off after a grace. Cancelling this does not leave it open."""
        await asyncio.shield(self.dispose(client))

    def dispose(self, client: Any, *, unflushed: bool = False) -> asyncio.Task[None]:
        """Close a client in the background; :meth:`drain` waits for it. ``unflushed``: send nothing any more."""
        return self.background(_close(client, lambda: self.silent, unflushed=unflushed))

    def background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def drain(self) -> None:
        """Wait until everything that was disposed of is closed."""
        while self._closing:
            await asyncio.wait(set(self._closing))


def _require_brokers(client: Any) -> None:
    """A broker that is back from an outage may know of none, not even of itself; a client that is told so first, and then
    loses its only connection, never asks anybody again."""
    if not _inner(client).cluster.brokers():
        raise KafkaConnectionError("it does not know its cluster yet")


def _inner(client: Any) -> Any:
    return client.client if isinstance(client, AIOKafkaProducer) else client._client  # noqa: SLF001 - none says it publicly


async def _close(client: Any, is_silent: Callable[[], bool], *, unflushed: bool) -> None:
    if isinstance(client, AIOKafkaProducer):
        if unflushed:
            _drop_pending(client)
        await _bounded(client.stop(), client.client.close, is_silent)
    elif isinstance(client, AIOKafkaConsumer):
        await _bounded(client.stop(), client._client.close, is_silent)  # noqa: SLF001 - stop() itself may never get there
    else:
        await _bounded(client.close(), client._client.close, is_silent)  # noqa: SLF001 - as above


def _drop_pending(producer: Any) -> None:
    """Make the producer forget what it has not sent. Its ``stop`` flushes, and an idempotent producer retries for ever."""
    accumulator = producer._message_accumulator  # noqa: SLF001 - there is no public way to abandon records
    batches = [batch for queue in accumulator._batches.values() for batch in queue]  # noqa: SLF001
    accumulator.fail_all(ProducerClosed())
    for batch in batches:
        retrieve(batch._drain_waiter)  # noqa: SLF001 - failed too, and nobody may be waiting for it
    manager = producer._txn_manager  # noqa: SLF001
    if manager is not None and manager.wait_for_transaction_end() is not None:
        retrieve(manager.wait_for_transaction_end())


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark a future's exception as seen, now or when it comes, so that asyncio does not report it as lost."""

    def look(done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()

    future.add_done_callback(look)


def watch_commits(coordinator: Any) -> None:
    """Let a consumer's commit that nobody waits for any more fail without a word: the client goes on with it by itself, in a
    task that it shields and keeps no hold of."""
    commit = coordinator._do_commit_offsets  # noqa: SLF001 - see above

    def watched(assignment: Any, offsets: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(commit(assignment, offsets))
        retrieve(task)
        return task

    coordinator._do_commit_offsets = watched  # noqa: SLF001 - as above


async def _bounded(
    stop: Coroutine[Any, Any, None],
    sever: Callable[[], Coroutine[Any, Any, None]],
    is_silent: Callable[[], bool],
) -> None:
    """Run ``stop``; after a grace close the connections under it, which ends what it waits for, then cancel it.

    Without a broker ``stop`` hangs: the producer's on a flush, the consumer's on a rejoin or the leave request. It may
    also end early by an error or a cancellation of a task of its own, so that the connections are closed in any case.
    """
    task = asyncio.create_task(stop)
    done, _ = await asyncio.wait({task}, timeout=SILENT_GRACE_S)
    if not done and not is_silent():
        done, _ = await asyncio.wait({task}, timeout=CLOSE_GRACE_S - SILENT_GRACE_S)
    if not done:
        await _at_most(sever(), SEVER_GRACE_S)
        await _at_most(task, SEVER_GRACE_S)
    await _at_most(sever(), SEVER_GRACE_S)
    if task.done() and not task.cancelled() and task.exception() is not None:
        log.debug("a client closed with an error", exc_info=task.exception())


async def _at_most(work: Coroutine[Any, Any, None] | asyncio.Task[None], timeout_s: float) -> None:
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    if not done:
        task.cancel()
        await asyncio.wait({task}, timeout=timeout_s)
    if task.done():
        retrieve(task)
