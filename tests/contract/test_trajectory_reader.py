"""The trainer's reader on both transports. Results are published without a worker; restarts are new readers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import pytest

from freezepoint.core.records import OutputRecord
from freezepoint.errors import ConfigurationError
from freezepoint.reader import RolloutGroup, Trajectory, TrajectoryReader
from freezepoint.settings import ReaderSettings
from freezepoint.transport.ports import Transport
from freezepoint_schemas.results import Result
from freezepoint_schemas.topics import Topic, partition_for
from tests.contract.driving import PARTITIONS, WAIT_S, Cluster
from tests.polling import poll_until, poll_until_async
from tests.results import publish_results, result

T = TypeVar("T")


def reader_of(
    cluster: Cluster, *, limits: dict[str, Any] | None = None, patient: bool = False, **options: Any
) -> TrajectoryReader:
    """``patient``: no member is taken for dead within a test's time, however busy the machine is."""
    settings = cluster.settings()
    if patient:
        longer = {"session_timeout_ms": int(2_000 * WAIT_S)}
        clients = {name: getattr(settings, name).model_copy(update=longer) for name in ("sqlite", "kafka")}
        settings = settings.model_copy(update=clients)
    reader = ReaderSettings(commit_interval_ms=50, poll_timeout_ms=50, **(limits or {}))
    options.setdefault("group", cluster.group)
    return TrajectoryReader(settings=settings.model_copy(update={"reader": reader}), **options)


async def take(items: AsyncIterator[T], count: int) -> list[T]:
    """The next items."""
    found: list[T] = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < count:
            found.append(await anext(items))
    return found


async def until_read(reader: TrajectoryReader, count: int) -> None:
    """Wait until it has read so many results, handed out or not."""

    async def so_many() -> bool:
        return reader.counts.read >= count

    await poll_until_async(so_many, WAIT_S, f"{count} results are read")


async def everything(reader: TrajectoryReader) -> list[Trajectory]:
    """To the end of what is there, of a reader that does not follow."""
    async with asyncio.timeout(WAIT_S):
        return [trajectory async for trajectory in reader]


async def left(cluster: Cluster, **options: Any) -> list[str]:
    """The rollouts that a restart would read, without acknowledging them."""
    async with reader_of(cluster, follow=False, **options) as reader:
        return names(await everything(reader))


def names(trajectories: Iterable[Trajectory]) -> list[str]:
    return sorted(trajectory.rollout_id for trajectory in trajectories)


def names_of(count: int) -> list[str]:
    return [f"r{number:02}" for number in range(count)]


def many(count: int, **fields: Any) -> list[Result]:
    return [result(f"r{number:02}", freeze_offset=number, **fields) for number in range(count)]


@asynccontextmanager
async def filled(
    cluster: Cluster,
    results: Iterable[Result],
    *,
    partition: int | None = None,
    record_bytes_max: int | None = None,
) -> AsyncIterator[Transport]:
    transport = await cluster.with_topics(record_bytes_max=record_bytes_max)
    await publish_results(transport, results, partition=partition)
    yield transport


async def test_results_come_and_after_their_acks_never_again(cluster: Cluster) -> None:
    async with filled(cluster, many(20)), reader_of(cluster, follow=False) as reader:
        found = await everything(reader)
        assert names(found) == names_of(20)
        assert found[0].to_arrays().loss_mask.tolist() == [False, True, True]
        assert found[0].to_response()["rollout_id"] == found[0].rollout_id
        for trajectory in found:
            reader.ack(trajectory)
        await reader.commit()
        assert (reader.counts.read, reader.counts.delivered, reader.counts.acked) == (20, 20, 20)
    assert await left(cluster) == []


async def test_a_restart_begins_at_the_lowest_result_not_acknowledged(cluster: Cluster) -> None:
    async with filled(cluster, many(6), partition=1), reader_of(cluster, follow=False) as reader:
        found = await everything(reader)
        for index in (5, 0, 1, 3):
            reader.ack(found[index])
            reader.ack(found[index])
    assert reader.counts.acked == 4
    assert await left(cluster) == ["r02", "r03", "r04", "r05"]


async def test_a_result_that_is_seen_is_skipped(cluster: Cluster) -> None:
    """With what the trainer remembers of its own, nothing is used twice."""
    async with filled(cluster, many(4), partition=0), reader_of(cluster, follow=False) as reader:
        found = await everything(reader)
        reader.ack(found[2])
    durable = {found[2].delivery_id}
    async with reader_of(cluster, follow=False, seen=durable.__contains__) as again:
        assert names(await everything(again)) == ["r00", "r01", "r03"]
        assert again.counts.skipped == {"repeated": 1}


async def test_masked_results_are_counted_and_skipped_unless_asked_for(cluster: Cluster) -> None:
    results = [
        result("good"),
        result("lost", reasons=["capture_incomplete"]),
        result("both", reasons=["capture_incomplete", "multiple_roots"]),
        result("forked", reasons=["multiple_chains"]),
    ]
    async with filled(cluster, results):
        async with reader_of(
            cluster, follow=False, group=f"{cluster.group}-all", yield_masked=True
        ) as reader:
            found = {trajectory.rollout_id: trajectory.masked for trajectory in await everything(reader)}
            assert found == {"good": False, "lost": True, "both": True, "forked": True}
        async with reader_of(
            cluster, follow=False, group=f"{cluster.group}-traces", delivery="all_traces"
        ) as reader:
            assert names(await everything(reader)) == ["forked", "good"]
        async with reader_of(cluster, follow=False) as reader:
            (good,) = await everything(reader)
            reader.ack(good)
        counts = reader.counts
    assert (counts.read, counts.delivered, counts.masked, counts.skipped) == (4, 1, 3, {"masked": 3})
    assert counts.masked_by_reason == {"capture_incomplete": 2, "multiple_roots": 1, "multiple_chains": 1}
    assert await left(cluster, yield_masked=True) == [], "the reader acknowledged them itself"


async def test_split_results_are_read_again_from_their_first_part(cluster: Cluster) -> None:
    results = [result(f"big{n}", metadata={"text": f"{n}" * 40_000}, freeze_offset=n) for n in range(3)]
    async with filled(cluster, results, partition=0, record_bytes_max=10_000) as transport:
        raw = await transport.reader(Topic.TRAJECTORIES)
        assert len(await raw.poll(1.0, 500)) > 10
        await raw.close()
        async with reader_of(cluster, follow=False) as reader:
            first, second, third = await everything(reader)
            assert third.metadata == {"text": "2" * 40_000}
            reader.ack(first)
            reader.ack(third)
        assert await left(cluster) == ["big1", "big2"]
        async with reader_of(cluster, follow=False) as reader:
            for trajectory in await everything(reader):
                reader.ack(trajectory)
        assert await left(cluster) == []
    assert second.offset > first.offset


async def test_a_repeat_in_the_topic_is_handed_out_once(cluster: Cluster) -> None:
    twice = [result("r", freeze_offset=4), result("r", freeze_offset=4), result("r", freeze_offset=9)]
    async with filled(cluster, twice, partition=0):
        async with reader_of(cluster, follow=False) as reader:
            found = await everything(reader)
            assert [trajectory.delivery_id.freeze_offset for trajectory in found] == [4, 9]
            assert reader.counts.skipped == {"repeated": 1}
            reader.ack(found[1])
        async with reader_of(cluster, follow=False) as reader:
            again = await everything(reader)
            assert [trajectory.delivery_id.freeze_offset for trajectory in again] == [4, 9]
            for trajectory in again:
                reader.ack(trajectory)
    assert await left(cluster) == []


async def test_only_one_run(cluster: Cluster) -> None:
    results = [result("run7.1-0"), result("run70.1-0"), result("1-0")]
    async with filled(cluster, results), reader_of(cluster, follow=False, run="run7") as reader:
        assert names(await everything(reader)) == ["run7.1-0"]
        assert reader.counts.skipped == {"other_run": 2}


async def test_what_is_no_result_is_counted_and_passed(cluster: Cluster) -> None:
    async with filled(cluster, [result("a")], partition=0) as transport:
        producer = await transport.producer()
        await producer.send([OutputRecord(Topic.TRAJECTORIES, b"x", b"garbage", partition=0)])
        await publish_results(transport, [result("b")], partition=0)
        async with reader_of(cluster, follow=False) as reader:
            for trajectory in await everything(reader):
                reader.ack(trajectory)
            await reader.commit()
            assert (reader.counts.undecodable, reader.counts.acked) == (1, 2)
    assert await left(cluster) == []


async def test_staleness_is_judged_when_a_result_is_handed_out(cluster: Cluster) -> None:
    results = [result("new", version=9), result("old", version=3), result("name", version="a")]
    async with filled(cluster, results, partition=0):
        version = 5
        async with reader_of(
            cluster,
            follow=False,
            group=f"{cluster.group}-tag",
            current_version=lambda: version,
            max_staleness=2,
        ) as reader:
            items = aiter(reader)
            (first,) = await take(items, 1)
            version = 9
            second, third = await take(items, 2)
            assert [(t.rollout_id, t.lag.versions, t.stale) for t in (first, second, third)] == [
                ("new", -4, False),
                ("old", 6, True),
                ("name", None, False),
            ]
            assert (reader.counts.stale, reader.counts.unknown_version) == (1, 1)
        async with reader_of(
            cluster, follow=False, current_version=9, max_staleness=2, on_stale="skip"
        ) as reader:
            assert names(await everything(reader)) == ["name", "new"]
            assert reader.counts.skipped == {"stale": 1}


async def test_auto_ack_when_the_body_has_run_to_its_end(cluster: Cluster) -> None:
    async with filled(cluster, many(3), partition=0):
        async with reader_of(cluster, auto_ack=True) as reader:
            await take(aiter(reader), 2)
        assert await left(cluster) == ["r01", "r02"], "the second one's body may not have ended"
        async with reader_of(cluster, follow=False, auto_ack=True) as reader:
            await everything(reader)
        assert await left(cluster) == []


async def test_where_a_new_group_begins(cluster: Cluster) -> None:
    async with filled(cluster, [result("old")], partition=0) as transport:
        seen = await transport.reader(Topic.TRAJECTORIES)
        (record,) = await seen.poll(5.0, 10)
        since = datetime.fromtimestamp((record.timestamp_ms + 1) / 1000, UTC)
        await poll_until_async(
            lambda: asyncio.sleep(0, time.time() > since.timestamp()), WAIT_S, "a later millisecond"
        )
        async with reader_of(
            cluster, group=f"{cluster.group}-latest", start="latest", follow=False
        ) as reader:
            assert await everything(reader) == []
        await publish_results(transport, [result("new")], partition=0)
        for start, expected in (("latest", ["new"]), (since, ["new"]), (since.timestamp(), ["new"])):
            name = f"{cluster.group}-{'latest' if start == 'latest' else type(start).__name__}"
            assert await left(cluster, group=name, start=start) == expected
        assert await left(cluster, start="earliest") == ["new", "old"]
        async with reader_of(cluster, follow=False) as reader:
            for trajectory in await everything(reader):
                reader.ack(trajectory)
        assert await left(cluster, start="earliest") == [], "stored offsets win"
        assert await left(cluster, start="earliest", ignore_stored=True) == ["new", "old"]


async def test_two_trainers_share_and_a_leaver_loses_nothing(cluster: Cluster) -> None:
    results = many(40)
    async with filled(cluster, []) as transport:
        one, two = reader_of(cluster, patient=True), reader_of(cluster, patient=True)
        got: dict[TrajectoryReader, list[Trajectory]] = {one: [], two: []}

        async def consume(reader: TrajectoryReader) -> None:
            async for trajectory in reader:
                got[reader].append(trajectory)

        tasks = [asyncio.create_task(consume(reader)) for reader in (one, two)]
        probes = iter(range(10_000))

        async def both_served() -> bool:
            number = next(probes)
            await publish_results(
                transport,
                [result(f"probe{number}-{p}", freeze_offset=number) for p in range(PARTITIONS)],
            )
            return all(got.values()) and _newest_shared(got)

        await poll_until_async(both_served, WAIT_S, "both trainers have partitions")
        await publish_results(transport, results)

        async def all_there() -> bool:
            return set(names_of(40)) <= {t.rollout_id for ts in got.values() for t in ts}

        await poll_until_async(all_there, WAIT_S, "all results at one of both")
        for reader in (one, two):
            for trajectory in got[reader]:
                if trajectory.rollout_id != "r07":
                    reader.ack(trajectory)
        await one.close()
        await two.close()
        await asyncio.gather(*tasks)
        assert all(any(t.rollout_id.startswith("r") for t in ts) for ts in got.values())
        assert "r07" in await left(cluster)


def _newest_shared(got: dict[TrajectoryReader, list[Trajectory]]) -> bool:
    """Whether the two read different partitions by now."""
    newest = [{t.partition for t in trajectories[-6:]} for trajectories in got.values()]
    return newest[0].isdisjoint(newest[1])


DIES_READING = """
import os, signal, sys
from freezepoint.reader import TrajectoryReader
reader = TrajectoryReader(group=sys.argv[1]).blocking()
next(iter(reader))
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_reading_to_the_end_waits_for_what_a_killed_reader_held(cluster: Cluster) -> None:
    """Its partitions come to us a session timeout later."""
    async with filled(cluster, many(20)):
        program = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", DIES_READING, cluster.group),
            env={**os.environ, **cluster.environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        async with asyncio.timeout(WAIT_S):
            assert await program.wait() == -signal.SIGKILL
        async with reader_of(cluster, follow=False) as reader:
            found = await everything(reader)
            for trajectory in found:
                reader.ack(trajectory)
        assert set(names(found)) == set(names_of(20))
    assert await left(cluster) == []


async def test_reading_to_the_end_does_not_wait_for_a_reader_that_lives(cluster: Cluster) -> None:
    async with filled(cluster, many(20)), reader_of(cluster, patient=True) as staying:
        await take(aiter(staying), 20)
        async with reader_of(cluster, follow=False, patient=True) as reader:
            found = await everything(reader)
        assert 0 < len({trajectory.partition for trajectory in found}) < PARTITIONS


async def test_acks_of_a_partition_that_went_elsewhere_are_ignored(cluster: Cluster) -> None:
    async with filled(cluster, many(16)), reader_of(cluster) as one:
        held = await take(aiter(one), 16)
        async with reader_of(cluster) as two:
            items = aiter(two)
            theirs = {trajectory.rollout_id: trajectory for trajectory in await take(items, 1)}
            gone = next(iter(theirs.values())).partition

            async def too_late() -> bool:
                for trajectory in held:
                    if trajectory.partition == gone:
                        one.ack(trajectory)
                return one.counts.lost_acks > 0

            await poll_until_async(too_late, WAIT_S, "acks that came too late")
            assert set(theirs) <= set(names(held))


async def test_a_slow_trainer_keeps_its_partitions_and_a_bounded_buffer(cluster: Cluster) -> None:
    """Its event loop is blocked for longer than a session lasts; nobody takes over, and reading had paused."""
    limits = {"prefetch_results_max": 4, "poll_records_max": 2}
    async with filled(cluster, many(60)), reader_of(cluster, limits=limits) as reader:
        items = aiter(reader)
        (first,) = await take(items, 1)
        settings = cluster.settings()
        session_s = (settings.sqlite if cluster.is_sqlite else settings.kafka).session_timeout_ms / 1000
        until = time.monotonic() + session_s + 1
        poll_until(lambda: time.monotonic() > until, session_s + 5, "a training step")
        assert reader.counts.read <= 12
        rest = await take(items, 59)
        for trajectory in (first, *rest):
            reader.ack(trajectory)
        await reader.commit()
        assert (reader.counts.acked, reader.counts.lost_acks) == (60, 0)
    assert await left(cluster) == []


async def test_a_cancelled_wait_loses_nothing(cluster: Cluster) -> None:
    async with filled(cluster, []) as transport, reader_of(cluster) as reader:
        items = aiter(reader)
        got: list[Trajectory] = []
        for number in range(20):
            waiting = asyncio.ensure_future(anext(items))
            await publish_results(transport, [result(f"r{number:02}", freeze_offset=number)])
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
            got += [] if waiting.cancelled() else [waiting.result()]
        got += await take(items, 20 - len(got))
        assert names(got) == names_of(20)


def grouped(group: str, size: int, rollouts: str, **fields: Any) -> list[Result]:
    return [result(f"{group}-{name}", group_id=group, group_size=size, **fields) for name in rollouts]


def shape(group: RolloutGroup) -> tuple[str | None, list[str], int | None, bool]:
    return group.group_id, [member.rollout_id for member in group.members], group.missing, group.complete


async def test_groups_masked_rollouts_count(cluster: Cluster) -> None:
    results = [
        *grouped("g", 3, "ab"),
        *grouped("h", 2, "xy"),
        *grouped("g", 3, "c", reasons=["rollout_cancelled"]),
        result("alone"),
    ]
    async with filled(cluster, results), reader_of(cluster) as reader:
        groups = {group.group_id: group for group in await take(reader.groups(), 3)}
        assert shape(groups["g"]) == ("g", ["g-a", "g-b", "g-c"], 0, True)
        assert [member.rollout_id for member in groups["g"]] == ["g-a", "g-b"]
        assert [member.rollout_id for member in groups["g"].masked] == ["g-c"]
        assert shape(groups[None]) == (None, ["alone"], 0, True)
        for group in groups.values():
            reader.ack(group)
        await reader.commit()
        counts = reader.counts
        assert (counts.read, counts.delivered, counts.masked, counts.groups) == (6, 6, 1, 3)
    assert await left(cluster, yield_masked=True) == []


async def test_a_stuck_rollout_costs_its_group_the_deadline_and_no_more(cluster: Cluster) -> None:
    results = [*grouped("stuck", 3, "ab"), *grouped("fine", 2, "xy")]
    async with filled(cluster, results) as transport, reader_of(cluster) as reader:
        groups = reader.groups(deadline=1.5)
        fine, stuck = await take(groups, 2)
        assert shape(fine) == ("fine", ["fine-x", "fine-y"], 0, True)
        assert shape(stuck) == ("stuck", ["stuck-a", "stuck-b"], 1, False)
        reader.ack(fine)
        reader.ack(stuck)
        await publish_results(transport, [*grouped("stuck", 3, "c"), *grouped("next", 1, "a")])
        (after,) = await take(groups, 1)
        assert after.group_id == "next"
        await poll_until_async(
            lambda: asyncio.sleep(0, reader.counts.skipped["late"] == 1),
            WAIT_S,
            "the late one is counted",
        )
        assert reader.counts.incomplete_groups == 1
    assert await left(cluster) == ["next-a"]


async def test_late_results_as_groups_of_their_own(cluster: Cluster) -> None:
    async with filled(cluster, grouped("g", 2, "a")) as transport, reader_of(cluster) as reader:
        groups = reader.groups(deadline=0.2, late="yield")
        (first,) = await take(groups, 1)
        await publish_results(transport, grouped("g", 2, "b"))
        (late,) = await take(groups, 1)
        assert (shape(first), first.late) == (("g", ["g-a"], 1, False), False)
        assert (shape(late), late.late) == (("g", ["g-b"], 0, False), True)
        assert reader.counts.late_groups == 1


async def test_a_restart_in_the_middle_of_a_group_reads_it_again(cluster: Cluster) -> None:
    results = [*grouped("g", 4, "ab"), *grouped("done", 2, "xy")]
    async with filled(cluster, results) as transport:
        async with reader_of(cluster) as reader:
            (done,) = await take(reader.groups(), 1)
            durable = {member.delivery_id for member in done.members}
            reader.ack(done)
        await publish_results(transport, grouped("g", 4, "cd"))
        async with reader_of(cluster, seen=durable.__contains__) as reader:
            (group,) = await take(reader.groups(), 1)
            assert shape(group) == ("g", ["g-a", "g-b", "g-c", "g-d"], 0, True)
            reader.ack(group)
    assert await left(cluster, seen=durable.__contains__) == []


async def test_a_result_later_than_a_restart_comes_as_a_group_that_says_what_is_missing(
    cluster: Cluster,
) -> None:
    """Which groups were handed out incomplete is known to a reader, and not to the next one; the trainer can know it."""
    async with filled(cluster, grouped("g", 4, "abc")) as transport:
        async with reader_of(cluster) as reader:
            (first,) = await take(reader.groups(deadline=0.2), 1)
            assert shape(first) == ("g", ["g-a", "g-b", "g-c"], 1, False)
            reader.ack(first)
        await publish_results(transport, grouped("g", 4, "d"))
        async with reader_of(cluster) as reader:
            (leftover,) = await take(reader.groups(deadline=0.2), 1)
            assert shape(leftover) == ("g", ["g-d"], 3, False)
            assert not leftover.late
            assert first.group_id == leftover.group_id
            reader.ack(leftover)
    assert await left(cluster) == []


async def test_equal_group_ids_of_two_runs_are_one_group_unless_the_reader_has_a_run(
    cluster: Cluster,
) -> None:
    results = [
        result(f"{run}.0-{number}", group_id="0", group_size=2) for run in ("x", "y") for number in range(2)
    ]
    async with filled(cluster, results):
        for run in ("x", "y"):
            async with reader_of(cluster, group=f"{cluster.group}-{run}", run=run) as reader:
                (group,) = await take(reader.groups(), 1)
                assert shape(group) == ("0", [f"{run}.0-0", f"{run}.0-1"], 0, True)
        async with reader_of(cluster) as reader:
            pairs = await take(reader.groups(), 2)
            members = {member.rollout_id for pair in pairs for member in pair}
            assert members == {found.rollout_id for found in results}
            assert {pair.group_id for pair in pairs} == {"0"}


async def test_stale_rollouts_count_towards_their_group(cluster: Cluster) -> None:
    results = [*grouped("g", 2, "a", version=1), *grouped("g", 2, "b", version=9)]
    async with (
        filled(cluster, results),
        reader_of(cluster, current_version=10, max_staleness=3, on_stale="skip") as reader,
    ):
        (group,) = await take(reader.groups(), 1)
        assert [member.rollout_id for member in group] == ["g-b"]
        assert [member.lag.versions for member in group.stale] == [9]
        assert group.complete
        reader.ack(group)
        await reader.commit()
        assert reader.counts.acked == 2


async def test_everything_that_can_become_of_a_groups_results_is_counted_once(cluster: Cluster) -> None:
    """One fresh, one masked, one stale, one missing; handed out at the deadline, again after a restart, and then repeats,
    a later life and the missing one come."""
    fresh = grouped("g", 4, "a", version=9)
    results = [*fresh, *grouped("g", 4, "b", reasons=["timeout"]), *grouped("g", 4, "c", version=1)]
    stale: dict[str, Any] = {"current_version": 10, "max_staleness": 3, "on_stale": "skip"}

    def assert_whole(group: RolloutGroup) -> None:
        assert shape(group) == ("g", ["g-a", "g-b", "g-c"], 1, False)
        parts = [[member.rollout_id for member in part] for part in (group, group.masked, group.stale)]
        assert parts == [["g-a"], ["g-b"], ["g-c"]]

    async with filled(cluster, results) as transport:
        async with reader_of(cluster, **stale) as reader:
            (group,) = await take(reader.groups(deadline=1.5), 1)
            assert_whole(group)  # and is not acknowledged
        await publish_results(transport, fresh)
        async with reader_of(cluster, **stale) as reader:
            groups = reader.groups(deadline=1.5)
            (group,) = await take(groups, 1)
            assert_whole(group)
            reader.ack(group)
            later_life = result("g-b", group_id="g", group_size=4, freeze_offset=99)
            # One after the other, since partitions come in any order: the missing one ends what is late of its group.
            for late in ([later_life], fresh, grouped("g", 4, "d")):
                before = reader.counts.read
                await publish_results(transport, late)
                await until_read(reader, before + 1)
            await publish_results(transport, grouped("next", 1, "a"))
            (after,) = await take(groups, 1)
            assert shape(after) == ("next", ["next-a"], 0, True)
            reader.ack(after)

            # Partitions come in any order, and are looked at only while somebody asks for a group.
            asking = asyncio.create_task(take(groups, 1))

            async def all_read() -> bool:
                return reader.counts.read == 8 and reader.counts.skipped.total() == 4

            await poll_until_async(all_read, WAIT_S, "everything is read and counted")
            asking.cancel()
            await asyncio.wait({asking})
            counts = reader.counts
            assert +counts.skipped == {"repeated": 2, "late": 2}
            assert (counts.delivered, counts.masked, counts.stale) == (4, 1, 1)
            assert (counts.groups, counts.incomplete_groups, counts.late_groups) == (2, 1, 0)
            await reader.commit()
    assert await left(cluster, yield_masked=True) == []


async def test_what_does_not_end_in_time_comes_incomplete_where_nothing_follows(cluster: Cluster) -> None:
    async with filled(cluster, grouped("g", 3, "ab")), reader_of(cluster, follow=False) as reader:
        async with asyncio.timeout(WAIT_S):
            groups = [group async for group in reader.groups()]
        assert [shape(group) for group in groups] == [("g", ["g-a", "g-b"], 1, False)]


async def test_a_group_whose_size_nobody_knows_is_refused(cluster: Cluster) -> None:
    async with filled(cluster, [result("r", group_id="g")]), reader_of(cluster) as reader:
        with pytest.raises(ConfigurationError, match="whose size nobody names"):
            await take(reader.groups(), 1)
    assert await left(cluster) == ["r"]


async def test_two_readers_of_groups_in_one_consumer_group_are_refused(cluster: Cluster) -> None:
    """Each would see half of every group. Both say so, in time."""
    async with filled(cluster, grouped("g", 1, "a")):
        limits = {"sole_reader_timeout_s": 8.0}
        async with reader_of(cluster, limits=limits) as one, reader_of(cluster, limits=limits) as two:
            groups = one.groups()
            await take(groups, 1)
            with pytest.raises(ConfigurationError, match="another reader of consumer group"):
                await take(two.groups(), 1)


async def test_a_second_reader_that_comes_and_goes_breaks_no_group(cluster: Cluster) -> None:
    """What was not acknowledged is read again, and groups come whole."""
    results = [r for number in range(8) for r in grouped(f"g{number}", 4, "abcd")]
    async with filled(cluster, results), reader_of(cluster) as reader:
        groups = reader.groups()
        await take(groups, 8)
        async with reader_of(cluster, yield_masked=True) as other:
            await take(aiter(other), 1)
        again = await take(groups, 8)
        assert {shape(group)[0] for group in again} == {f"g{n}" for n in range(8)}
        assert all(group.complete for group in again)
        for group in again:
            reader.ack(group)
        await reader.commit()
    assert await left(cluster) == []


async def test_closing_ends_an_iteration_between_two_items_and_begins_no_other(cluster: Cluster) -> None:
    async with filled(cluster, many(3)):
        reader = reader_of(cluster)
        items = aiter(reader)
        await take(items, 1)
        await reader.close()
        assert await anext(items, None) is None
        with pytest.raises(ConfigurationError, match="the reader is closed"):
            await anext(aiter(reader))
        blocking = reader_of(cluster).blocking()
        plain = iter(blocking)
        first = await asyncio.to_thread(next, plain)
        assert first.rollout_id in names_of(3)
        await asyncio.to_thread(blocking.close)
        assert next(plain, None) is None
        with pytest.raises(ConfigurationError, match="the reader is closed"):
            next(iter(blocking))


async def test_one_reader_reads_in_one_way(cluster: Cluster) -> None:
    async with filled(cluster, [result("r")]), reader_of(cluster) as reader:
        await take(aiter(reader), 1)
        with pytest.raises(ConfigurationError, match="in one way"):
            await take(reader.groups(), 1)


async def test_a_missing_topic_is_said_to_whoever_asks(cluster: Cluster) -> None:
    await cluster.with_topics()
    async with reader_of(cluster, topic_prefix=f"{cluster.names.prefix}others.") as reader:
        with pytest.raises(ConfigurationError, match="freezepoint topics apply"):
            await take(aiter(reader), 1)


async def test_the_blocking_reader_beside_a_running_loop(cluster: Cluster) -> None:
    async with filled(cluster, many(5)):
        with reader_of(cluster, follow=False).blocking() as reader:
            found = []
            for trajectory in reader:
                found.append(trajectory)
                reader.ack(trajectory)
            reader.commit()
        assert names(found) == names_of(5)
        with reader_of(cluster, follow=False, group=f"{cluster.group}-groups").blocking() as reader:
            assert [group.complete for group in reader.groups()] == [True] * 5


async def test_closing_ends_a_blocking_wait_in_another_thread(cluster: Cluster) -> None:
    async with filled(cluster, [result("r")]):
        reader = reader_of(cluster).blocking()
        got: list[Trajectory] = []
        thread = threading.Thread(target=lambda: got.extend(reader))
        thread.start()
        await poll_until_async(
            lambda: asyncio.sleep(0, reader.counts.delivered == 1), WAIT_S, "the first result"
        )
        await asyncio.to_thread(reader.close)
        await asyncio.to_thread(thread.join, WAIT_S)
        assert names(got) == ["r"]


def test_keys_spread_over_the_partitions() -> None:
    """The tests above rely on it."""
    assert {partition_for(name.encode(), PARTITIONS) for name in names_of(16)} == set(range(PARTITIONS))
