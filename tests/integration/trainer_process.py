"""A program: a trainer that reads results, or groups with ``groups``, as the consumer group given.

Prints ``read <name>`` for each one (a group's name is its id) and then, told so by its arguments, does one of these:
``ack``: acknowledges and goes on; ``hold``: goes on without; ``forget``: ends after the first one without closing anything.
"""

from __future__ import annotations

import sys

from freezepoint.reader import RolloutGroup, TrajectoryReader


def say(line: str) -> None:
    print(line, flush=True)


def main(group: str, *options: str) -> None:
    reader = TrajectoryReader(group=group).blocking()
    say("begun")
    for item in reader.groups(deadline=60) if "groups" in options else reader:
        say(f"read {item.group_id if isinstance(item, RolloutGroup) else item.rollout_id}")
        if "ack" in options:
            reader.ack(item)
        if "forget" in options:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
