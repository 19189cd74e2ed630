"""The reader that trainers use: asynchronous, and blocking by its view."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Literal, Self

from freezepoint.reader.counts import ReaderCounts
from freezepoint.reader.groups import GroupRule, Late, Ungrouped
from freezepoint.reader.options import (
    CurrentVersion,
    ReadOptions,
    Start,
    checked_delivery,
    checked_group,
    run_prefix,
    staleness_rule,
    start_at,
)
from freezepoint.reader.session import AsyncItems, BlockingItems, Session
from freezepoint.reader.trajectory import DeliveryId, RolloutGroup, Trajectory
from freezepoint.settings import Settings, load
from freezepoint.training.delivery import DeliveryName
from freezepoint.transport.connect import connect


class TrajectoryReader:
    """Results for a trainer, at least once, as a member of a consumer group.

    ::

        async with TrajectoryReader("kafka://broker:9092", group="trainer") as reader:
            async for trajectory in reader:
                store(trajectory.to_arrays())
                reader.ack(trajectory)

    It reads on a thread of its own, so that a training step of minutes costs no membership, and connects on first use.
    One reader is read in one way: result by result, or in groups.

    A result stays the group's until it is acknowledged, in any order; the offset stored for a partition is that of its
    lowest result that is not. A restart, or another reader that takes the partition over, begins there: results after it
    come again, acknowledged or not, and are known by their ``delivery_id``.
    """

    def __init__(  # noqa: PLR0913 - keyword arguments are this class's interface
        self,
        broker: str | None = None,
        *,
        settings: Settings | None = None,
        topic_prefix: str | None = None,
        group: str | None = None,
        start: Start = "stored",
        ignore_stored: bool = False,
        run: str | None = None,
        delivery: DeliveryName | None = None,
        yield_masked: bool = False,
        auto_ack: bool = False,
        current_version: CurrentVersion = None,
        max_staleness: int | None = None,
        on_stale: Literal["tag", "skip"] = "tag",
        seen: Callable[[DeliveryId], bool] | None = None,
        follow: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is connected yet.

        :param broker: ``sqlite:///file`` or ``kafka://host:port,...``; by default what the settings say, as for
            ``topic_prefix`` and ``group`` (the consumer group). ``settings``: by default from the environment.
        :param start: where the consumer group begins in a partition for which it has stored nothing yet: ``earliest``
            (``stored`` says the same), ``latest``, a datetime with a time zone, or seconds since the epoch. A stored offset
            wins, so that a restart loses nothing, unless ``ignore_stored`` says to overwrite it.
        :param run: only rollouts whose id begins with this name and a dot. Without it, equal group ids of several runs are one
            group.
        :param delivery: read results as ``single_response``, ``all_traces`` or ``per_request`` (all traces, one for each call),
            whatever they were published as.
        :param yield_masked: hand out masked results too.
        :param auto_ack: acknowledge an item when the next one is asked for: the loop's body has then run to its end.
        :param current_version: the trainer's policy version, or a function that gives it (called on the reader's thread).
        :param max_staleness: the largest lag behind it that is not stale; ``on_stale``: ``tag`` or ``skip`` what is.
        :param seen: whether a result was made durable before, by its ``delivery_id``; it is then skipped. With it, results
            are used exactly once across restarts.
        :param follow: False: end when everything that is committed was read, here or by a member that lives, instead of
            waiting for more; what a killed one held comes a session timeout later.
        :param clock: for group deadlines, in seconds; it never goes back.
        :raises ConfigurationError: an argument is wrong; the message says how.
        """
        base = settings or load()
        given = {"broker": broker, "topic_prefix": topic_prefix}
        chosen = base.model_copy(update={name: value for name, value in given.items() if value is not None})
        options = ReadOptions(
            group=checked_group(base.reader.group if group is None else group),
            start=start_at(start, ignore_stored=ignore_stored),
            prefix=run_prefix(run),
            yield_masked=yield_masked,
            delivery=checked_delivery(delivery),
            current_version=current_version,
            staleness=staleness_rule(max_staleness, on_stale),
            seen=seen,
            follow=follow,
        )
        connect(chosen)  # says at once that the broker's URL is wrong; connects to nothing
        self._session = Session(chosen, options, clock, auto_ack=auto_ack)

    @property
    def counts(self) -> ReaderCounts:
        """What became of every result so far."""
        return self._session.counts

    # -------------------------------------------------------------------------------------------------------- reading

    def __aiter__(self) -> AsyncIterator[Trajectory]:
        return AsyncItems[Trajectory](self._session, None)

    def groups(
        self,
        size: int | None = None,
        deadline: float | None = None,
        *,
        late: Late = "drop",
        ungrouped: Ungrouped = "single",
    ) -> AsyncIterator[RolloutGroup]:
        """Prompt groups, each when all its rollouts have a result, or at its deadline.

        Needs every partition, and so no other reader in the consumer group. A group that was not acknowledged comes again
        after a restart, whole. One that was may come again in part, if it lies after one that was not: ``seen`` tells.

        :param size: rollouts a group; None: the ``group_size`` that results carry.
        :param deadline: seconds from a group's first result; None: wait until it is complete. Time that the reader pauses
            because the trainer has enough to do does not count.
        :param late: results of a group that this reader handed out incomplete: ``drop`` (counted, acknowledged) or
            ``yield``. After a restart they are a group of their own, with ``missing`` members.
        :param ungrouped: results without a group id: ``single`` (a group of one each) or ``drop``.
        :raises ConfigurationError: an argument is wrong, or a result names no size and there is neither size nor deadline.
        """
        return AsyncItems[RolloutGroup](self._session, GroupRule(size, deadline, late, ungrouped))

    def blocking(self) -> BlockingReader:
        """The same reader for code without an event loop (or in a notebook, beside one)."""
        return BlockingReader(self._session)

    # ------------------------------------------------------------------------------------------------ acknowledging

    def ack(self, item: Trajectory | RolloutGroup) -> None:
        """What was handed out is durable. Returns at once; it is stored soon, and at the latest by :meth:`commit` or
        :meth:`close`. Of a partition that has gone to another reader it is ignored, and counted."""
        self._session.ack(item)

    async def commit(self) -> None:
        """Return once all acknowledgements so far are stored.

        :raises BrokerError: they could not be; they will be tried again.
        """
        storing = self._session.commit()
        if storing is not None:
            await asyncio.wrap_future(storing)

    async def close(self) -> None:
        """Store what is acknowledged and leave the consumer group. What is not comes again. Idempotent."""
        closing = self._session.close()
        if closing is not None:
            await asyncio.shield(asyncio.wrap_future(closing))
            await asyncio.to_thread(self._session.stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class BlockingReader:
    """A :class:`TrajectoryReader` for plain loops: ``with TrajectoryReader(...).blocking() as reader: for t in reader: ...``.

    Waiting ends by Ctrl-C at once; what was about to be handed over is then the next item. Safe beside a running event
    loop. Make it in the process that reads: it does not survive a fork.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def counts(self) -> ReaderCounts:
        """What became of every result so far."""
        return self._session.counts

    def __iter__(self) -> Iterator[Trajectory]:
        return BlockingItems[Trajectory](self._session, None)

    def groups(
        self,
        size: int | None = None,
        deadline: float | None = None,
        *,
        late: Late = "drop",
        ungrouped: Ungrouped = "single",
    ) -> Iterator[RolloutGroup]:
        """See :meth:`TrajectoryReader.groups`."""
        return BlockingItems[RolloutGroup](self._session, GroupRule(size, deadline, late, ungrouped))

    def ack(self, item: Trajectory | RolloutGroup) -> None:
        """See :meth:`TrajectoryReader.ack`."""
        self._session.ack(item)

    def commit(self) -> None:
        """See :meth:`TrajectoryReader.commit`."""
        storing = self._session.commit()
        if storing is not None:
            storing.result()

    def close(self) -> None:
        """See :meth:`TrajectoryReader.close`."""
        closing = self._session.close()
        if closing is not None:
            closing.result()
            self._session.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
