"""The reader's place in its consumer group: one subscription at a time, taken anew where it broke."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from freezepoint.errors import BrokerError, ConfigurationError, StalledError
from freezepoint.reader.options import ReadOptions
from freezepoint.settings import ReaderSettings
from freezepoint.transport.ports import Feed, Subscription, Transport
from freezepoint_schemas.topics import Topic

LOOK_S = 5.0
"""How often a seat to which nothing comes asks whether there is something."""


class Seat:
    """``sole``: the reader needs every partition, and reads nothing before it has them: a group's rollouts lie on all."""

    def __init__(
        self, transport: Transport, options: ReadOptions, settings: ReaderSettings, *, sole: bool
    ) -> None:
        self.generation = 0
        self.assigned: frozenset[int] = frozenset()
        self.paused = False
        self._transport = transport
        self._options = options
        self._settings = settings
        self._sole = sole
        self._partition_count = 0
        self._subscription: Subscription | None = None
        self._lacking_since: float | None = None
        """Since when partitions are missing, of a reader that needs all; None while it has them."""
        self._fed_at = 0.0
        self._looked_at = 0.0

    async def take(self) -> None:
        """Join the group, leaving the place there was. :raises BrokerError: it cannot be done now."""
        if self._subscription is not None:
            left, self._subscription = self._subscription, None
            await left.close()
        if self._sole:
            self._partition_count = await self._transport.admin().partitions(Topic.TRAJECTORIES)
        self._subscription = await self._transport.subscribe(
            Topic.TRAJECTORIES, self._options.group, self._options.start
        )
        self.generation, self.assigned, self.paused = 0, frozenset(), False
        self._lacking_since = self._fed_at = self._looked_at = asyncio.get_running_loop().time()
        if self._sole:
            self.pause()

    async def poll(self, timeout_s: float, records_max: int) -> Feed:
        """:raises StalledError: there is something to read, and it has not come for far too long.
        :raises BrokerError: the membership cannot go on.
        """
        feed = await self._there().poll(timeout_s, records_max)
        now = asyncio.get_running_loop().time()
        if feed.records or self.paused or feed.generation != self.generation or not feed.assigned:
            self._fed_at = now
        elif now - max(self._fed_at, self._looked_at) > LOOK_S:
            self._looked_at = now
            await self._look(now)
        return feed

    async def _look(self, now: float) -> None:
        if await self._there().caught_up():
            self._fed_at = now
        elif now - self._fed_at > self._settings.stall_timeout_s:
            raise StalledError(
                f"group {self._options.group} has results to read, and none has come for {now - self._fed_at:.0f} s"
            )

    def follow(self, feed: Feed) -> frozenset[int]:
        """Take note of the assignment; what was lost by it."""
        lost = frozenset() if feed.generation == self.generation else self.assigned - feed.assigned
        self.generation, self.assigned = feed.generation, feed.assigned
        return lost

    def is_broken(self, feed: Feed) -> bool:
        """Whether a reader that needs every partition had them, and has lost some.

        :raises ConfigurationError: it does not get them, because another reader of the group stays.
        """
        if not self._sole:
            return False
        now = asyncio.get_running_loop().time()
        if len(feed.assigned) == self._partition_count:
            self._lacking_since = None
        elif self._lacking_since is None:
            return True
        elif now - self._lacking_since > self._settings.sole_reader_timeout_s:
            raise ConfigurationError(
                f"groups() needs every partition of the topic, and {len(feed.assigned)} of {self._partition_count} are "
                f"assigned here: another reader of consumer group {self._options.group!r} is running; give this one another "
                "group, or end the other"
            )
        return False

    def regulate(self, *, full: bool, room: bool) -> None:
        """Pause when there is enough, go on when there is room: a pause discards what was fetched ahead."""
        if self._sole and len(self.assigned) < self._partition_count:
            return
        if full:
            self.pause()
        elif room and self.paused and self._subscription is not None:
            self.paused = False
            self._subscription.resume()

    def pause(self) -> None:
        if not self.paused and self._subscription is not None:
            self.paused = True
            self._subscription.pause()

    async def at_end(self) -> bool:
        """Whether all that the group's other members do not read has been delivered here; they must live for that, since
        what a dead one held comes to us."""
        subscription = self._there()
        return subscription.shared_out() and await subscription.caught_up()

    async def commit(self, offsets: Mapping[int, int]) -> None:
        """:raises OwnershipLostError: the assignment has changed. :raises BrokerError: not acknowledged."""
        await self._there().commit(self.generation, offsets)

    def _there(self) -> Subscription:
        if self._subscription is None:
            raise BrokerError(f"not a member of group {self._options.group}")
        return self._subscription
