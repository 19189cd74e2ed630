"""The sink on both transports: durable, bounded in time and in record size, and what the worker makes of it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freezepoint.errors import BrokerUnavailableError, MissingTopicError
from freezepoint.sink import TokenSink
from freezepoint_schemas import codec
from freezepoint_schemas.events import TokenEntry
from freezepoint_schemas.headers import PART, header
from freezepoint_schemas.topics import Topic
from kafka_local import LocalKafka
from tests.contract.driving import Cluster, read_all
from tests.events import entry
from tests.integration.workers import by_rollout, read_results, run_until_idle
from tests.polling import poll_until_async

PUT_IN_ANOTHER_PROCESS = """
import asyncio, os, signal, sys
from freezepoint.sink import TokenSink
async def main(url, prefix):
    sink = TokenSink(broker=url, topic_prefix=prefix)
    await sink.put({"rollout_id": "a", "model_call_id": "c", "prompt_token_ids": [1], "generation_token_ids": [2],
                    "generation_log_probs": [-1.0]})
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main(*sys.argv[1:]))
"""


def sink_of(cluster: Cluster, **options: Any) -> TokenSink:
    return TokenSink(broker=cluster.url, topic_prefix=cluster.names.prefix, **options)


async def test_what_put_returned_for_outlives_the_process(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PUT_IN_ANOTHER_PROCESS, cluster.url, cluster.names.prefix, env=os.environ
    )
    assert await process.wait() == -9
    (record,) = await read_all(transport, Topic.TOKENS)
    assert record.key == b"a"


async def test_a_rollout_of_many_calls_is_one_trace(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics()
    rng = np.random.default_rng(7)

    async def rollout(sink: TokenSink, rollout_id: str) -> list[int]:
        tokens: list[int] = []
        prompt: list[int] = rng.integers(0, 150_000, 2_000).tolist()
        for number in range(20):
            generation = rng.integers(0, 150_000, 50).tolist()
            await sink.begin_call(rollout_id, f"c{number}")
            await sink.put(entry(rollout_id, f"c{number}", prompt, generation))
            tokens = prompt + generation
            prompt = tokens + rng.integers(0, 150_000, 100).tolist()
        await sink.complete(rollout_id, n_calls=20, reward=1.0)
        return tokens

    async with sink_of(cluster, run="run1") as sink:
        ids = [f"{number}-0" for number in range(8)]
        expected = dict(zip(ids, await asyncio.gather(*(rollout(sink, name) for name in ids)), strict=True))
    run_until_idle(cluster.environment(), tmp_path / "worker.log")
    results = by_rollout(await read_results(transport))
    assert {name: body["mask_sample"] for name, body in results.items()} == {
        f"run1.{name}": False for name in ids
    }
    for name in ids:
        assert results[f"run1.{name}"]["traces"][0]["token_ids"] == expected[name]
    records = await read_all(transport, Topic.TOKENS)
    assert max(len(record.value or b"") for record in records) < 20_000


@pytest.mark.slow
async def test_full_context_routes_pass_a_default_broker(cluster: Cluster, tmp_path: Path) -> None:
    """39 MB: 48 layers, 8 experts, 100,000 tokens; as a server holds them, in int64."""
    transport = await cluster.with_topics()
    routes = np.random.default_rng(1).integers(0, 128, (100_000, 48, 8))
    async with sink_of(cluster, deadline_s=60) as sink:
        given = entry("a", "c", range(99_000), range(1_000), created_at=1.0)
        await sink.put({**given.model_dump(), "routed_experts": routes})
        await sink.complete("a")
    parts = [header(record.headers, PART) for record in await read_all(transport, Topic.TOKENS)]
    if not cluster.is_sqlite:  # which takes 64 MiB at once
        assert len(parts) > 50
        assert None not in parts[:-1]
    run_until_idle(cluster.environment(), tmp_path / "worker.log")
    (result,) = await read_results(transport)
    assert not result.mask_sample
    assert np.array_equal(np.asarray(result.traces[0].routed_experts), routes)


async def test_large_prompts_are_split_and_put_together(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics(record_bytes_max=20_000)
    sqlite = {"record_bytes_max": 20_000}
    async with sink_of(cluster, sqlite=sqlite) as sink:
        await sink.put(entry("a", "c", range(128_000), [1, 2, 3]))
        await sink.put(entry("a", "d", [*range(128_000), 1, 2, 3, 4], [5]))
        await sink.complete("a", n_calls=2)
    run_until_idle(cluster.environment(), tmp_path / "worker.log")
    (result,) = await read_results(transport)
    assert not result.mask_sample
    assert np.asarray(result.traces[0].token_ids).tolist() == [*range(128_000), 1, 2, 3, 4, 5]


async def test_concurrent_puts_all_arrive(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    async with sink_of(cluster) as sink:
        await asyncio.gather(*(sink.put(entry(f"r{n % 50}", f"c{n}", [n], [n])) for n in range(1_000)))
    records = await read_all(transport, Topic.TOKENS)
    events = [codec.decode_event((record.key or b"").decode(), record.value) for record in records]
    calls = {event.model_call_id for event in events if isinstance(event, TokenEntry)}
    assert len(records) == len(calls) == 1_000


async def test_missing_topics_say_what_to_do(cluster: Cluster) -> None:
    if cluster.is_sqlite:
        await cluster.with_topics()
    sink = TokenSink(broker=cluster.url, topic_prefix="nowhere.")
    with pytest.raises(MissingTopicError, match="freezepoint topics apply"):
        await sink.begin_call("a", "c")
    await sink.close()


async def test_a_second_life_of_an_id(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics()
    async with sink_of(cluster) as sink:
        await sink.put(entry("a", "c1", [1, 2], [3]))
        await sink.clear("a")
        await sink.put(entry("a", "c2", [1, 2, 3, 4], [5]))
        await sink.complete("a")
    run_until_idle(cluster.environment(), tmp_path / "worker.log")
    (result,) = await read_results(transport)
    assert (result.mask_sample, result.metrics["n_calls"]) == (False, 1)


async def test_no_broker_at_all() -> None:
    sink = TokenSink(broker="kafka://127.0.0.1:1", deadline_s=2)
    began = time.monotonic()
    with pytest.raises(BrokerUnavailableError):
        await sink.put(entry("a", "c", [1], [2]))
    assert time.monotonic() - began < 3
    await sink.close()


def test_a_broker_that_goes_down_and_comes_back(local_kafka: LocalKafka, unique_prefix: str) -> None:
    asyncio.run(_down_and_back(local_kafka, unique_prefix))


async def _down_and_back(kafka: LocalKafka, prefix: str) -> None:
    async with Cluster(f"kafka://{kafka.bootstrap}", f"{prefix}.") as cluster:
        await cluster.with_topics(partitions=1)
        async with sink_of(cluster, deadline_s=2) as sink:
            await sink.put(entry("a", "c1", [1], [2]))
            await asyncio.to_thread(kafka.kill)
            began = time.monotonic()
            with pytest.raises(BrokerUnavailableError):
                await sink.put(entry("a", "c2", [1, 2, 3], [4]))
            with pytest.raises(BrokerUnavailableError):
                await sink.mark_incomplete("a", "c2")
            assert time.monotonic() - began < 6
            await asyncio.to_thread(kafka.restart)
            transport = cluster.transport()

            async def marked() -> bool:
                return len(await read_all(transport, Topic.TOKENS)) > 1

            await poll_until_async(marked, 30, "the mark arrives by itself")
            await sink.put(entry("a", "c3", [1, 2, 3, 4, 5], [6]))
        events = [codec.decode_event("a", record.value) for record in await read_all(transport, Topic.TOKENS)]
        names = [event.event for event in events]
        assert "capture_incomplete" in names
        assert names[-1] == "token_entry"
