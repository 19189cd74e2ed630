"""The group coordinator: eager rebalances, generations, sessions that time out, offsets committed by generation."""

from __future__ import annotations

import asyncio
import contextvars
from dataclasses import dataclass
from typing import NamedTuple

from freezepoint.errors import BrokerError

SESSION_S = 10.0
REBALANCE_S = 10.0
GATHER_S = 0.2
"""How long the first members of an empty group wait for others."""


class UnknownMemberError(BrokerError):
    """The group does not know this member (any more)."""


class IllegalGenerationError(BrokerError):
    """The group has moved on."""


class Stored(NamedTuple):
    """The group's offset of a partition, and what was said with it of how far the ledger had come."""

    offset: int | None = None
    recorded: int | None = None


class Assignment(NamedTuple):
    """What a member is given in a generation."""

    generation: int
    partitions: frozenset[int]


@dataclass(slots=True, eq=False)
class _Member:
    seen_at: float
    joining: asyncio.Future[Assignment] | None = None


class GroupCoordinator:
    """One group over one topic."""

    def __init__(self, partitions: int) -> None:
        self.generation = 0
        self.offsets: dict[int, Stored] = {}
        self._partitions = partitions
        self._members: dict[str, _Member] = {}
        self._assigned: dict[str, list[int]] = {}
        self._rebalancing = False
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.Context()

    async def join(self, member_id: str) -> Assignment:
        """Ask for a share. Everybody else has to ask anew, too; the answer comes when all have, or after a while."""
        member = self._members.get(member_id)
        if member is None:
            member = self._members[member_id] = _Member(self._loop.time())
            self._loop.call_later(SESSION_S, self._expire, member_id, member, context=self._context)
        member.seen_at = self._loop.time()
        if member.joining is not None and not member.joining.done():
            member.joining.cancel()  # the request was repeated: nobody waits for the first answer
        member.joining = self._loop.create_future()
        self._rebalance()
        return await member.joining

    def heartbeat(self, member_id: str, generation: int) -> bool:
        """Whether the member's assignment stands; it has to join again otherwise.

        :raises UnknownMemberError: its session has ended.
        """
        member = self._member(member_id)
        member.seen_at = self._loop.time()
        return not self._rebalancing and generation == self.generation

    def leave(self, member_id: str) -> None:
        member = self._members.pop(member_id, None)
        if member is None:
            return
        if member.joining is not None:
            member.joining.cancel()
        self._rebalance()

    def commit(self, member_id: str, generation: int, partition: int, stored: Stored) -> None:
        """Any member of the current generation may commit any partition, as with Kafka.

        :raises BrokerError: unknown, or of an old generation.
        """
        self._member(member_id)
        if generation != self.generation:
            raise IllegalGenerationError(f"the group is at generation {self.generation}, not {generation}")
        self.offsets[partition] = stored

    def owns(self, member_id: str, partition: int) -> bool:
        """Whether the partition is that member's in the current generation."""
        return partition in self._assigned.get(member_id, ())

    def _member(self, member_id: str) -> _Member:
        member = self._members.get(member_id)
        if member is None:
            raise UnknownMemberError(f"no member {member_id}")
        return member

    def _rebalance(self) -> None:
        if not self._rebalancing:
            self._rebalancing = True
            self._loop.call_later(REBALANCE_S, self._finish, self.generation, context=self._context)
        if self._is_whole:
            self._loop.call_later(GATHER_S, self._finish_whole, self.generation, context=self._context)

    @property
    def _is_whole(self) -> bool:
        return all(member.joining is not None for member in self._members.values())

    def _finish_whole(self, generation: int) -> None:
        if self._is_whole:
            self._finish(generation)

    def _finish(self, generation: int) -> None:
        """A new generation of those who have joined; the others are out."""
        if not self._rebalancing or generation != self.generation:
            return
        self._rebalancing = False
        self.generation += 1
        self._members = {name: member for name, member in self._members.items() if member.joining is not None}
        self._assigned = shares = self._shares(sorted(self._members))
        for name, member in self._members.items():
            joining, member.joining = member.joining, None
            member.seen_at = self._loop.time()
            if joining is not None and not joining.done():
                joining.set_result(Assignment(self.generation, frozenset(shares[name])))

    def _shares(self, names: list[str]) -> dict[str, list[int]]:
        """Ranges, as equal as can be."""
        shares: dict[str, list[int]] = {}
        first = 0
        for index, name in enumerate(names):
            count = self._partitions // len(names) + (index < self._partitions % len(names))
            shares[name] = list(range(first, first + count))
            first += count
        return shares

    def _expire(self, member_id: str, member: _Member) -> None:
        if self._members.get(member_id) is not member:
            return
        left_s = member.seen_at + SESSION_S - self._loop.time()
        if member.joining is not None:
            left_s = SESSION_S  # it waits for us
        if left_s > 0:
            self._loop.call_later(left_s, self._expire, member_id, member, context=self._context)
        else:
            del self._members[member_id]
            self._rebalance()
