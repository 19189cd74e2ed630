"""The broker under fire: a local one with two doors (one through the proxy), and what an operator can do to its topics."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.admin import DeleteGroupsRequest
from aiokafka.structs import TopicPartition

from freezepoint.transport.kafka.wire import SetTopicConfigs
from kafka_local import LocalKafka
from tests.chaos.proxy import Proxy
from tests.polling import poll_until_async

ADMIN_WAIT_S = 60.0


class ChaosBroker:
    """One broker for all scenarios. ``direct``: where the load and the checker connect, ``proxied``: where workers that
    are to be cut off do; both are known before it starts, and kept over restarts. ``more``: properties of its own."""

    def __init__(self, more: Mapping[str, str] | None = None) -> None:
        ports = _ports(4)
        self.direct = f"127.0.0.1:{ports[0]}"
        self.proxied = f"127.0.0.1:{ports[2]}"
        self._behind_proxy, self._proxy_port = ports[1], ports[2]
        listeners = f"PLAINTEXT://{self.direct},PROXIED://127.0.0.1:{ports[1]}"
        controller = f"127.0.0.1:{ports[3]}"
        self.kafka = LocalKafka(
            port=ports[0],
            extra_properties={
                "listeners": f"{listeners},CONTROLLER://{controller}",
                "advertised.listeners": f"PLAINTEXT://{self.direct},PROXIED://{self.proxied}",
                "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT",
                "controller.quorum.voters": f"1@{controller}",
                "group.min.session.timeout.ms": "1000",
                "log.segment.delete.delay.ms": "1000",
                "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
            }
            | dict(more or {}),
        )

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.kafka.start)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.kafka.stop)

    async def crash(self) -> None:
        """SIGKILL, and up again on the same data."""
        await asyncio.to_thread(self.kafka.kill)

    def send(self, how: signal.Signals) -> None:
        """A signal to the running broker."""
        assert self.kafka.pid is not None, "the broker does not run"
        os.kill(self.kafka.pid, how)

    async def restart(self) -> float:
        """Start again, in good order if it runs; the seconds until it answered."""
        began = time.monotonic()
        await asyncio.to_thread(self.kafka.restart)
        return time.monotonic() - began

    def proxy(self) -> Proxy:
        """The proxied door; workers reach the broker there while it is open."""
        return Proxy(self._proxy_port, self._behind_proxy)

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[Any]:
        client = AIOKafkaAdminClient(bootstrap_servers=self.direct, request_timeout_ms=20_000)
        await client.start()
        try:
            yield client
        finally:
            await client.close()

    async def create_topic(self, name: str, partitions: int, config: Mapping[str, str]) -> None:
        """Create it, also right after it was deleted, and wait until it is there."""

        async def created() -> bool:
            async with self.admin() as client:
                topic = NewTopic(name, partitions, 1, topic_configs=dict(config))
                response = await client.create_topics([topic])
                known = {entry["topic"]: entry for entry in await client.describe_topics([name])}
            codes = {code for _, code, *_ in response.topic_errors}
            return codes <= {0, 36} and len(known[name]["partitions"]) == partitions

        await poll_until_async(created, ADMIN_WAIT_S, f"topic {name} is created")

    async def delete_topic(self, name: str) -> None:
        async with self.admin() as client:
            response = await client.delete_topics([name])
            _raise_for({code for _, code in response.topic_error_codes})

            async def gone() -> bool:
                return name not in await client.list_topics()

            await poll_until_async(gone, ADMIN_WAIT_S, f"topic {name} is gone")

    async def add_partitions(self, name: str, total: int) -> None:
        async with self.admin() as client:
            await client.create_partitions({name: NewPartitions(total)})

    async def set_config(self, name: str, values: Mapping[str, str]) -> None:
        async with self.admin() as client:
            response = await client._send_request(SetTopicConfigs(name, values))
            _raise_for({code for code, *_ in response.responses})

    async def delete_records(self, name: str, before: Mapping[int, int]) -> None:
        """Truncate the log: of each partition everything below an offset."""
        async with self.admin() as client:
            await client.delete_records(
                {TopicPartition(name, number): RecordsToDelete(offset) for number, offset in before.items()}
            )

    async def committed(self, group: str, name: str, partitions: Iterable[int]) -> dict[int, int]:
        """The group's offsets."""
        async with self.admin() as client:
            sources = [TopicPartition(name, number) for number in partitions]
            found = await client.list_consumer_group_offsets(group, partitions=sources)
        return {source.partition: held.offset for source, held in found.items()}

    async def delete_group(self, group: str) -> None:
        """Delete the group with its offsets, once it has no members any more."""

        async def deleted() -> bool:
            async with self.admin() as client:
                coordinator = await client.find_coordinator(group)
                response = await client._send_request(DeleteGroupsRequest([group]), coordinator)
            ((_, code),) = response.results
            return bool(code == 0)

        await poll_until_async(deleted, ADMIN_WAIT_S, f"group {group} is deleted")


def _raise_for(codes: Iterable[int]) -> None:
    for code in codes:
        if code:
            error: KafkaError = for_code(code)()
            raise error


def _ports(count: int) -> list[int]:
    """Free ports, each another one."""
    found: set[int] = set()
    while len(found) < count:
        found.add(LocalKafka().port)
    return list(found)
