"""A program: subscribe to the trajectories topic as the group given, commit what was read, one record at a time.

Prints ``assigned <count>`` when that changes, ``read <value>`` for each record, and ``committed <value>`` once everything
up to it is stored for the group, unless it was told to ``keep`` (its second argument): then it commits nothing.
"""

from __future__ import annotations

import asyncio
import sys

from freezepoint.errors import OwnershipLostError
from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from freezepoint_schemas.topics import Topic


def say(line: str) -> None:
    print(line, flush=True)


async def main(group: str, *, commits: bool) -> None:
    async with connect(Settings()) as transport:
        subscription = await transport.subscribe(Topic.TRAJECTORIES, group)
        assigned = 0
        while True:
            feed = await subscription.poll(0.05, 1)
            if len(feed.assigned) != assigned:
                assigned = len(feed.assigned)
                say(f"assigned {assigned}")
            for partition, records in feed.records.items():
                for record in records:
                    name = (record.value or b"").decode()
                    say(f"read {name}")
                    if commits:
                        try:
                            await subscription.commit(feed.generation, {partition: record.offset + 1})
                        except OwnershipLostError:
                            continue
                        say(f"committed {name}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], commits="keep" not in sys.argv))
