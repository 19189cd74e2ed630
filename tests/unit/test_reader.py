"""The results reader on the embedded transport: whole, split and bad records; to the end, or on and on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from freezepoint.core.records import OutputRecord
from freezepoint.reader import BadResultError, ReadResult, ResultReader
from freezepoint.settings import SqliteSettings
from freezepoint.transport.ports import Transport
from freezepoint.transport.sqlite import SqliteTransport
from freezepoint_schemas import codec
from freezepoint_schemas.headers import PART
from freezepoint_schemas.parts import split
from freezepoint_schemas.results import Result
from freezepoint_schemas.topics import Topic, TopicNames
from tests.events import Bench, complete, entry, records_of


@pytest.fixture
async def transport(tmp_path: Path) -> AsyncIterator[Transport]:
    async with SqliteTransport(tmp_path / "test.db", TopicNames(), SqliteSettings()) as opened:
        yield opened


def result_of(rollout_id: str) -> Result:
    return Bench().run(records_of([entry(rollout_id, "c1", [1, 2], [3]), complete(rollout_id)]))[0]


def whole(rollout_id: str, partition: int = 0) -> OutputRecord:
    value = codec.encode_result(result_of(rollout_id))
    return OutputRecord(Topic.TRAJECTORIES, rollout_id.encode(), value, partition=partition)


def parts(rollout_id: str, size: int) -> list[OutputRecord]:
    record = whole(rollout_id)
    assert record.value is not None
    return [
        OutputRecord(Topic.TRAJECTORIES, record.key, part, ((PART, header.encode()),), 0)
        for header, part in split(record.value, size)
    ]


async def write(transport: Transport, records: Sequence[OutputRecord]) -> None:
    producer = await transport.producer()
    await producer.send(records)
    await producer.close()


async def read(transport: Transport, heard: list[str] | None = None) -> list[ReadResult]:
    reader = await transport.reader(Topic.TRAJECTORIES)
    on_bad = None if heard is None else lambda error: heard.append(str(error))
    results = [item async for item in ResultReader(reader, on_bad).results()]
    await reader.close()
    return results


async def test_all_results_in_order(transport: Transport) -> None:
    await write(transport, [whole("a"), whole("b", 1), whole("c")])
    results = await read(transport)
    assert sorted(item.result.rollout_id for item in results) == ["a", "b", "c"]
    assert [item.result.rollout_id for item in results if item.partition == 0] == ["a", "c"]
    assert [item.offset for item in results if item.partition == 0] == [0, 1]
    assert codec.encode_result(results[0].result) == codec.encode_result(
        result_of(results[0].result.rollout_id)
    )


async def test_nothing_is_nothing(transport: Transport) -> None:
    assert await read(transport) == []


async def test_split_results_are_put_together_though_they_interleave(transport: Transport) -> None:
    first, second = parts("a", 100), parts("b", 100)
    assert len(first) == len(second) > 2
    mixed = [record for pair in zip(first, second, strict=True) for record in pair]
    await write(transport, [*mixed, whole("c")])
    results = await read(transport)
    assert [item.result.rollout_id for item in results] == ["a", "b", "c"]
    assert results[0].offset == len(mixed) - 2


async def test_bad_records_are_raised_or_reported(transport: Transport) -> None:
    junk = OutputRecord(Topic.TRAJECTORIES, b"x", b"{}", partition=0)
    torn = OutputRecord(Topic.TRAJECTORIES, b"x", b"{}", ((PART, b"nonsense"),), 0)
    await write(transport, [whole("a"), junk, torn, whole("b")])
    heard: list[str] = []
    results = await read(transport, heard)
    assert [item.result.rollout_id for item in results] == ["a", "b"]
    assert [text.split(": ")[0] for text in heard] == [
        "record at partition 0, offset 1",
        "record at partition 0, offset 2",
    ]
    with pytest.raises(BadResultError, match="offset 1"):
        await read(transport)


async def test_following_sees_what_comes_later(transport: Transport) -> None:
    reader = await transport.reader(Topic.TRAJECTORIES)
    async with asyncio.timeout(30), aclosing(ResultReader(reader).results(follow=True)) as results:
        await write(transport, [whole("a")])
        assert (await anext(results)).result.rollout_id == "a"
        await write(transport, [whole("b")])
        assert (await anext(results)).result.rollout_id == "b"
    await reader.close()
