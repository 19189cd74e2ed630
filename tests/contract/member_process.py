"""A program: join the group given, own every partition assigned, publish what standard input says.

Prints ``owning <count>`` when that changes. A line ``<partition> <value>`` publishes a token record under that
partition's lease, the last one it got, and prints ``published`` or the error's name.
"""

from __future__ import annotations

import asyncio
import sys

from freezepoint.core.records import OutputRecord
from freezepoint.errors import BrokerError, PublishError
from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from freezepoint.transport.ports import GroupMember, Lease, Poll
from freezepoint_schemas.topics import Topic


def say(line: str) -> None:
    print(line, flush=True)


async def own(member: GroupMember, leases: dict[int, Lease]) -> None:
    """Poll for ever; acquire what is newly assigned."""
    polled = Poll(0, frozenset())
    owned: frozenset[int] = frozenset()
    while True:
        polled = await member.poll(0.05, 100)
        for partition in polled.assigned - owned:
            try:
                leases[partition] = await member.acquire(partition)
            except BrokerError:
                continue  # the assignment moved; the next poll tells
            owned |= {partition}
            say(f"owning {len(owned)}")
        owned &= polled.assigned


async def obey(leases: dict[int, Lease]) -> None:
    """Publish line by line until the input ends."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        partition, value = line.rstrip("\n").split(" ", 1)
        try:
            await leases[int(partition)].publish([OutputRecord(Topic.TOKENS, b"r", value.encode())])
        except PublishError as error:
            say(type(error).__name__)
        else:
            say("published")


async def main(group: str) -> None:
    async with connect(Settings()) as transport:
        leases: dict[int, Lease] = {}
        owning = asyncio.create_task(own(await transport.join(group), leases))
        await obey(leases)
        owning.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
