"""Producers at work: each sends one record after the other, again and again until it is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from freezepoint.core.records import OutputRecord
from freezepoint.errors import BrokerUnavailableError
from tests.simulation.client import SimTransport

RETRY_S = 0.3
RECORD_BYTES_MAX = 1_600
"""Records above are split."""

_Waiting = tuple[OutputRecord, asyncio.Future[None]]


class Publishing:
    """Several producers with a queue each."""

    def __init__(self, transports: Sequence[SimTransport]) -> None:
        self._queues: list[asyncio.Queue[_Waiting]] = [asyncio.Queue() for _ in transports]
        self._workers = [
            transport.process.start(self._work(transport, queue))
            for transport, queue in zip(transports, self._queues, strict=True)
        ]

    async def send(self, producer: int, record: OutputRecord) -> None:
        """Returns once the record is acknowledged; what was handed to this producer before has been by then."""
        acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues[producer].put_nowait((record, acknowledged))
        await acknowledged

    async def close(self) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.wait(self._workers)

    @staticmethod
    async def _work(transport: SimTransport, queue: asyncio.Queue[_Waiting]) -> None:
        producer = await transport.producer()
        while True:
            record, acknowledged = await queue.get()
            while not acknowledged.done():
                try:
                    await producer.send([record])
                except BrokerUnavailableError:
                    await asyncio.sleep(RETRY_S)
                else:
                    acknowledged.set_result(None)
