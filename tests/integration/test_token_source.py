"""TokenSource on both transports: what it freezes and reads is what a worker beside it publishes."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from freezepoint.consumer import trajectories_from_source
from freezepoint.core.projection import response_form
from freezepoint.core.records import OutputRecord
from freezepoint.errors import (
    BrokerError,
    BrokerUnavailableError,
    ConfigurationError,
    InputError,
    InvalidRolloutIdError,
    MissingTopicError,
)
from freezepoint.source import TokenSource
from freezepoint.transport.ports import Transport
from freezepoint_schemas import codec
from freezepoint_schemas.events import InputEvent, TokenEntry
from freezepoint_schemas.results import Result
from freezepoint_schemas.topics import Topic
from tests.contract.driving import Cluster
from tests.events import cancelled, cancelled_call, clear, complete, entry, incomplete, intent
from tests.frozen_logs import referring
from tests.integration.workers import publish, publish_raw, read_results, run_until_idle, worker
from tests.polling import poll_until_async

RECORD_BYTES_MAX = 20_000
WAIT_S = 60.0


def source_of(cluster: Cluster, **more: Any) -> TokenSource:
    settings = cluster.settings(RECORD_BYTES_MAX)
    return TokenSource(
        broker=cluster.url,
        topic_prefix=cluster.names.prefix,
        kafka=settings.kafka.model_dump(),
        sqlite=settings.sqlite.model_dump(),
        **more,
    )


def calls(rollout_id: str, count: int = 3) -> list[TokenEntry]:
    """A chain, by reference but for its first call."""
    chain = [entry(rollout_id, "c1", [1, 2], [3], created_at=1.0)]
    while len(chain) < count:
        last = chain[-1]
        tokens = [*last.prompt_token_ids.tolist(), *last.generation_token_ids.tolist()]
        chain.append(entry(rollout_id, f"c{len(chain) + 1}", [*tokens, 7], [8, 9], created_at=2.0))
    return [chain[0], *(referring(call, before) for before, call in pairwise(chain))]


def unfinished() -> dict[str, list[InputEvent]]:
    """Rollouts as they are before their complete event, by id."""
    large = entry("large", "c1", range(8_000), [1])
    return {
        "chain": [*calls("chain")],
        "backwards": [*reversed(calls("backwards"))],
        "large": [large, large],
        "nothing": [],
        "marked": [*calls("marked"), incomplete("marked", "c9")],
        "lost": [*calls("lost"), intent("lost", "c9")],
        "withdrawn": [intent("withdrawn", "c9"), *calls("withdrawn"), cancelled_call("withdrawn", "c9")],
        "conflict": [*calls("conflict"), entry("conflict", "c1", [1, 2], [4])],
        "dangling-prefix": [*calls("dangling-prefix")[1:]],
        "roots": [*calls("roots"), entry("roots", "other", [90], [91])],
        "cleared": [entry("cleared", "c0", [50], [51]), clear("cleared"), *calls("cleared")],
        "again": [*calls("again"), complete("again"), clear("again"), *calls("again", 2)],
        "grouped": [clear("grouped", group_id="g", group_size=2), *calls("grouped")],
    }


def finished() -> dict[str, list[InputEvent]]:
    """Rollouts that somebody ended before, by id."""
    return {
        "done": [*calls("done"), complete("done", reward=1.0)],
        "late": [*calls("late", 2), complete("late"), calls("late")[2]],
        "miscounted": [*calls("miscounted"), complete("miscounted", n_calls=7)],
        "given-up": [*calls("given-up"), cancelled("given-up")],
    }


async def started(cluster: Cluster) -> Transport:
    return await cluster.with_topics(record_bytes_max=RECORD_BYTES_MAX)


async def results_of(transport: Transport, rollout_ids: set[str]) -> dict[str, Result]:
    """The latest result of each of these, once all have one."""

    async def found() -> dict[str, Result] | None:
        results = {result.rollout_id: result for result in await read_results(transport)}
        return results if rollout_ids <= results.keys() else None

    results = await poll_until_async(found, WAIT_S, "all results published")
    assert results is not None
    return results


def assert_agrees(built: dict[str, Any], result: Result) -> None:
    """The source's dictionary is the worker's result in the reference's form."""
    snapshot = built.pop("_capture_snapshot")
    assert snapshot == {"snapshot_id": result.snapshot.id, "version": result.snapshot.version}
    assert built == response_form(result)


async def test_a_worker_beside_it_publishes_the_same(cluster: Cluster, tmp_path: Path) -> None:
    transport = await started(cluster)
    rollouts = unfinished() | finished()
    await publish(transport, [event for events in rollouts.values() for event in events])
    async with source_of(cluster) as source:
        with worker(cluster.environment(), tmp_path / "worker.log") as running:
            running.until_acquired()
            names = list(rollouts)
            built = await asyncio.gather(*(build(source, name) for name in names))
            results = await results_of(transport, set(names))
            for name, form in zip(names, built, strict=True):
                assert_agrees(dict(form), results[name])
            # By now all are decided: asked again, it reads what the worker froze.
            for name, form in zip(names, built, strict=True):
                assert await build(source, name) == form
    assert {name for name, result in results.items() if not result.mask_sample} == {
        "again", "backwards", "chain", "cleared", "done", "grouped", "large", "late", "withdrawn",
    }  # fmt: skip


async def build(source: TokenSource, rollout_id: str) -> dict[str, Any]:
    """As the worker's result has its model: of the calls, which is none here."""
    return await trajectories_from_source(rollout_id, source)


async def test_what_a_worker_decided_before_is_read_from_the_beginning(
    cluster: Cluster, tmp_path: Path
) -> None:
    transport = await started(cluster)
    rollouts = {name: [*events, complete(name)] for name, events in unfinished().items()} | finished()
    await publish(transport, [event for events in rollouts.values() for event in events])
    run_until_idle(cluster.environment(), tmp_path / "worker.log")
    results = await results_of(transport, set(rollouts))
    async with source_of(cluster) as source:
        for name in rollouts:
            assert_agrees(await build(source, name), results[name])
        # A new life of a rollout that was decided lies behind the watermark.
        await publish(transport, [clear("done"), *calls("done", 2)])
        assert (await source.freeze("done")).version == 3
        # So does one that the ledger holds as open.
        await publish(transport, calls("open", 1))
        run_until_idle(cluster.environment(), tmp_path / "worker-2.log")
        await publish(transport, calls("open")[1:])
        built = await build(source, "open")
    run_until_idle(cluster.environment(), tmp_path / "worker-3.log")
    results = await results_of(transport, {*rollouts, "open"})
    assert_agrees(built, results["open"])
    assert not results["open"].mask_sample


async def test_a_rollout_that_a_worker_timed_out_is_masked_as_there(cluster: Cluster, tmp_path: Path) -> None:
    transport = await started(cluster)
    await publish(transport, calls("idle", 2))
    environment = {**cluster.environment(), "FREEZEPOINT_WORKER__ROLLOUT_TIMEOUT_S": "0.2"}
    with worker(environment, tmp_path / "worker.log"):
        results = await results_of(transport, {"idle"})
    await publish(transport, calls("idle")[2:])
    async with source_of(cluster) as source:
        snapshot = await source.freeze("idle")
        built = await build(source, "idle")
    assert snapshot.incomplete
    assert len(snapshot.entries) == 2
    assert_agrees(built, results["idle"])


async def test_without_any_worker(cluster: Cluster) -> None:
    transport = await started(cluster)
    whole = [entry("r", "c1", [1, 2], [3]), entry("r", "c2", [1, 2, 3, 4], [5, 6])]
    await publish(transport, [whole[0], referring(whole[1], whole[0])])
    async with source_of(cluster) as source:
        snapshot = await source.freeze("r", reward=0.5)
        assert [(item.model_call_id, item.prompt_token_ids) for item in snapshot.entries] == [
            ("c1", [1, 2]),
            ("c2", [1, 2, 3, 4]),
        ]
        assert snapshot.version == 3
        assert not snapshot.incomplete
        await publish(transport, [entry("r", "c3", [1, 2, 3, 4, 5, 6], [7])])
        again = await source.freeze("r")
        assert (again, again.entries) == (snapshot, snapshot.entries)
        assert await source.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        assert (await source.freeze("r")).snapshot_id == snapshot.snapshot_id
        empty = await source.freeze("unknown")
        assert (empty.entries, empty.version, empty.incomplete) == ((), 1, False)


async def test_a_run_name_stands_before_every_id(cluster: Cluster) -> None:
    transport = await started(cluster)
    await publish(transport, [*calls("run7.0-0"), entry("0-0", "c1", [9], [9])])
    async with source_of(cluster, run="run7") as source:
        built = await build(source, "0-0")
        assert built["rollout_id"] == "0-0"
        assert built["rebuilt_response"]["id"] == "proj-0-0"
        assert built["metrics"]["n_calls"] == 3
        assert {item.rollout_id for item in (await source.freeze("0-0")).entries} == {"0-0"}
        with pytest.raises(InvalidRolloutIdError):
            await source.freeze("x" * 251)


async def test_many_at_once(cluster: Cluster) -> None:
    transport = await started(cluster)
    names = [f"r{number}" for number in range(40)]
    await publish(transport, [event for name in names for event in calls(name)])
    async with source_of(cluster) as source:
        snapshots = await asyncio.gather(*(source.freeze(name) for name in names + names))
    assert [snapshot.rollout_id for snapshot in snapshots] == names + names
    assert {snapshot.version for snapshot in snapshots} == {4}
    assert snapshots[:40] == snapshots[40:]


async def test_bad_records_count_as_they_do_for_a_worker(cluster: Cluster, tmp_path: Path) -> None:
    transport = await started(cluster)
    await publish(transport, [*calls("broken"), *calls("foreign")])
    bad = [(b"broken", b"{"), (b"foreign", codec.encode_event(calls("broken")[0]))]
    await publish_raw(transport, [OutputRecord(Topic.TOKENS, key, value) for key, value in bad])
    async with source_of(cluster) as source:
        built = {name: await build(source, name) for name in ("broken", "foreign")}
    run_until_idle(cluster.environment(), tmp_path / "worker.log")
    results = await results_of(transport, set(built))
    for name, form in built.items():
        assert form["mask_sample"]
        assert_agrees(form, results[name])


async def test_missing_topics_are_named(cluster: Cluster) -> None:
    await cluster.transport().admin().apply(cluster.specs()[:1])
    async with source_of(cluster) as source:
        with pytest.raises(MissingTopicError, match="topics apply"):
            await source.freeze("r")
        built = await build(source, "r")
    assert built["mask_sample"]
    assert built["error"].startswith("MissingTopicError")


@pytest.mark.parametrize("rollout_id", ["", "../x", "a/b", None])
async def test_what_is_no_rollout_id_is_refused(tmp_path: Path, rollout_id: Any) -> None:
    async with TokenSource(broker=f"sqlite:///{tmp_path / 'x.db'}") as source:
        with pytest.raises(InvalidRolloutIdError):
            await source.freeze(rollout_id)
        with pytest.raises(InputError, match="color"):
            await source.freeze("r", color="red")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"broker": "http://x"},
        {"run": "a/b"},
        {"deadline_s": 0},
        {"kafka": {"unknown": 1}},
        {"worker": {"rollout_bytes_max": -1}},
    ],
)
def test_what_cannot_be_set_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        TokenSource(**{"broker": "sqlite:///x.db", **arguments})


async def test_a_closed_source_freezes_nothing(tmp_path: Path) -> None:
    source = TokenSource(broker=f"sqlite:///{tmp_path / 'x.db'}")
    pending = asyncio.create_task(source.freeze("r"))
    await asyncio.sleep(0)
    await source.close()
    await source.close()
    with pytest.raises(BrokerError, match="closed"):
        await pending
    with pytest.raises(ConfigurationError, match="closed"):
        await source.freeze("r")


async def test_a_broker_that_is_not_there_is_an_error_in_time() -> None:
    async with TokenSource(broker="kafka://127.0.0.1:1", kafka={"request_timeout_ms": 1_000}) as source:
        with pytest.raises(BrokerUnavailableError):
            await source.freeze("r")
