"""Programs that tests run as processes of their own on a store's directory: ``python store_programs.py NAME DIR …``.

Each prints a line for everything that was acknowledged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from freezepoint.errors import FrozenRolloutError
from freezepoint.store import TokenStore
from freezepoint_schemas.events import TokenEntry
from tests.events import entry

LARGE = 100_000


def say(line: object) -> None:
    print(line, flush=True)


def large(call_id: str) -> TokenEntry:
    """A line of half a megabyte: a kill can hit its write in the middle."""
    return entry("r", call_id, range(LARGE), [1])


def put(directory: str, writer: str, count: str) -> None:
    """Puts calls of its own, and ones that every other writer puts too."""
    store = TokenStore(directory)
    for number in range(int(count)):
        for call_id in (f"{writer}-{number}", f"shared-{number}"):
            store.put_now(entry("r", call_id, [1, 2], [3]))
            say(call_id)


def put_large(directory: str, writer: str) -> None:
    """Puts large calls until it is killed."""
    store = TokenStore(directory)
    number = 0
    while True:
        store.put_now(large(f"{writer}-{number}"))
        say(f"{writer}-{number}")
        number += 1


def put_until_frozen(directory: str, writer: str) -> None:
    """Puts until somebody freezes the rollout."""
    store = TokenStore(directory)
    number = 0
    try:
        while True:
            store.put_now(entry("r", f"{writer}-{number}", [1], [2]))
            say(f"{writer}-{number}")
            number += 1
    except FrozenRolloutError:
        pass


def live(directory: str) -> None:
    """Goes through whole lives of one rollout until it is killed."""
    store = TokenStore(directory)
    life = 0
    while True:
        store.delete("r")
        store.begin_call_now("r", f"call-{life}")
        store.put_now(entry("r", f"call-{life}", [1], [2]))
        store.mark_incomplete_now("r", f"mark-{life}")
        snapshot = store.freeze_now("r")
        assert store.drop_now("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        say(life)
        life += 1


PROGRAMS: dict[str, Callable[..., None]] = {
    "put": put,
    "put-large": put_large,
    "put-until-frozen": put_until_frozen,
    "live": live,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
