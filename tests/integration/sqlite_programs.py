"""Programs that the process tests run, kill and stop: ``python sqlite_programs.py <name> <file> <arguments>``.

Each says on standard output what was acknowledged to it, after that and not before.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

from freezepoint.core.records import OutputRecord
from freezepoint.settings import SqliteSettings
from freezepoint.transport.sqlite import SqliteTransport
from freezepoint_schemas.topics import Topic, TopicNames

SETTINGS = SqliteSettings(session_timeout_ms=1_500, heartbeat_interval_ms=100)
VALUE = b"x" * 20_000


def say(line: str) -> None:
    print(line, flush=True)


async def write(path: str, writer: str) -> None:
    """Send numbered batches of 1 to 7 records for ever; say each that was acknowledged."""
    async with SqliteTransport(Path(path), TopicNames(), SETTINGS) as transport:
        producer = await transport.producer()
        for number in itertools.count():
            keys = [f"{writer}.{number}.{index}".encode() for index in range(number % 7 + 1)]
            await producer.send([OutputRecord(Topic.TOKENS, key, VALUE) for key in keys])
            say(str(number))


async def publish(path: str, partition: str) -> None:
    """Own a partition and publish numbered results with their ledger records; say each that was acknowledged."""
    async with SqliteTransport(Path(path), TopicNames(), SETTINGS) as transport:
        member = await transport.join("group")
        while int(partition) not in (await member.poll(0.1, 1)).assigned:
            pass  # a killed predecessor keeps it until its session ends
        lease = await member.acquire(int(partition))
        start = len(lease.ledger)
        for number in itertools.count(start):
            key = f"{partition}.{number}".encode()
            records = [
                OutputRecord(topic, key, VALUE, partition=int(partition) if topic is Topic.LEDGER else None)
                for topic in (Topic.TRAJECTORIES, Topic.LEDGER, Topic.DEAD_LETTERS)
            ]
            await lease.publish(records)
            say(str(number))


async def create(*_: str) -> None:
    """For each file named on standard input: make it or find it made, and write one record."""
    say("ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        async with SqliteTransport(Path(line.rstrip("\n")), TopicNames(), SETTINGS) as transport:
            producer = await transport.producer()
            await producer.send([OutputRecord(Topic.TOKENS, b"r", b"v")])
        say("written")


if __name__ == "__main__":
    programs: dict[str, Callable[..., Coroutine[None, None, None]]] = {
        "write": write,
        "publish": publish,
        "create": create,
    }
    asyncio.run(programs[sys.argv[1]](*sys.argv[2:]))
