"""Publishing: files verbatim and in order, ends after last lines, bad lines, single events, load."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import orjson
import pytest

from freezepoint.core.records import OutputRecord
from freezepoint.errors import BrokerUnavailableError, InputError
from freezepoint.lines import LineError, sources
from freezepoint.publishing import (
    BatchPublisher,
    Published,
    events_for,
    publish_events,
    publish_files,
    publish_simulated,
    record_of,
)
from freezepoint.settings import SqliteSettings
from freezepoint.simulate import Profile, Truth, simulate
from freezepoint.transport.ports import Position, Producer, Transport
from freezepoint.transport.sqlite import SqliteTransport
from freezepoint_schemas import codec
from freezepoint_schemas.events import RolloutClear, RolloutComplete
from freezepoint_schemas.topics import Topic, TopicNames
from tests.events import clear, complete, entry


class Recorder:
    """A producer that keeps what it is sent, one batch at a time, and may refuse the n-th batch."""

    def __init__(self, *, refuse_at: int | None = None) -> None:
        self.batches: list[list[OutputRecord]] = []
        self.in_flight = 0
        self.refuse_at = refuse_at

    async def send(self, records: Sequence[OutputRecord]) -> Sequence[Position]:
        assert self.in_flight == 0, "batches must not overtake each other"
        self.in_flight += 1
        await asyncio.sleep(0)
        self.in_flight -= 1
        if len(self.batches) == self.refuse_at:
            raise BrokerUnavailableError("gone")
        self.batches.append(list(records))
        return [Position(0, number) for number in range(len(records))]

    async def close(self) -> None:
        return None

    @property
    def records(self) -> list[OutputRecord]:
        return [record for batch in self.batches for record in batch]


def line(rollout_id: str, call_id: str = "c1") -> bytes:
    return b'{"rollout_id": "%s",  "model_call_id":"%s","prompt_token_ids":[1]}' % (
        rollout_id.encode(),
        call_id.encode(),
    )


def write(path: Path, *lines: bytes) -> str:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


async def publish_to(recorder: Recorder, names: list[str], *, complete: bool = False) -> Published:
    with sources(names) as files:
        async with BatchPublisher(recorder) as publisher:
            return await publish_files(publisher, files, complete=complete)


@pytest.fixture
async def transport(tmp_path: Path) -> AsyncIterator[Transport]:
    async with SqliteTransport(tmp_path / "test.db", TopicNames(), SqliteSettings()) as opened:
        yield opened


@pytest.fixture
async def producer(transport: Transport) -> AsyncIterator[Producer]:
    opened = await transport.producer()
    yield opened
    await opened.close()


async def values_in(transport: Transport) -> list[tuple[bytes | None, bytes | None]]:
    reader = await transport.reader(Topic.TOKENS)
    values: list[tuple[bytes | None, bytes | None]] = []
    while not await reader.at_end():
        values += [(record.key, record.value) for record in await reader.poll(0.1, 100)]
    await reader.close()
    return values


async def test_lines_are_published_verbatim_and_keyed_by_their_rollout(
    tmp_path: Path, transport: Transport
) -> None:
    name = write(tmp_path / "a.jsonl", line("r1"), b"", b"  " + line("r1", "c2") + b"\r")
    producer = await transport.producer()
    with sources([name]) as files:
        async with BatchPublisher(producer) as publisher:
            published = await publish_files(publisher, files)
    await producer.close()
    assert await values_in(transport) == [(b"r1", line("r1")), (b"r1", line("r1", "c2"))]
    size = 2 * len(b"r1") + len(line("r1")) + len(line("r1", "c2"))
    assert published == Published(records=2, rollouts=1, bytes=size, skipped=0)


async def test_gzip_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(gzip.compress(line("r1") + b"\n" + line("r2")))
    recorder = Recorder()
    await publish_to(recorder, [str(path)])
    assert [record.key for record in recorder.records] == [b"r1", b"r2"]


@pytest.mark.parametrize("cut", [slice(0, 30), slice(0, -4)])
async def test_a_damaged_gzip_file_is_an_input_error(tmp_path: Path, cut: slice) -> None:
    path = tmp_path / "events.gz"
    path.write_bytes(gzip.compress(line("r1") * 50)[cut])
    with pytest.raises(InputError, match="damaged gzip"):
        await publish_to(Recorder(), [str(path)])


async def test_complete_follows_the_last_line_over_all_files(tmp_path: Path) -> None:
    first = write(tmp_path / "1", line("a", "c1"), line("b", "c1"), line("a", "c2"))
    second = write(tmp_path / "2", line("c", "c1"), line("a", "c3"), line("c", "c2"))
    recorder = Recorder()
    published = await publish_to(recorder, [first, second], complete=True)
    values = [record.value for record in recorder.records]

    def end(rollout_id: str) -> bytes:
        return codec.encode_event(complete(rollout_id))

    assert values == [
        line("a", "c1"),
        line("b", "c1"),
        end("b"),
        line("a", "c2"),
        line("c", "c1"),
        line("a", "c3"),
        end("a"),
        line("c", "c2"),
        end("c"),
    ]
    assert (published.records, published.rollouts) == (9, 3)


async def test_complete_comes_after_a_late_mark_and_not_after_an_end_of_its_own(tmp_path: Path) -> None:
    mark = b'{"event":"capture_incomplete","rollout_id":"a"}'
    own_end = codec.encode_event(complete("b", reward=1.0))
    cleared = codec.encode_event(clear("c"))
    name = write(tmp_path / "1", line("a"), mark, line("b"), own_end, line("c"), cleared)
    recorder = Recorder()
    await publish_to(recorder, [name], complete=True)
    assert [record.value for record in recorder.records] == [
        line("a"),
        mark,
        codec.encode_event(complete("a")),
        line("b"),
        own_end,
        line("c"),
        cleared,
    ]


BAD_LINES = {
    b"{not json": "no JSON",
    b"[1]": "a JSON list, not an object",
    b"{}": "no rollout_id",
    b'{"rollout_id": null}': "no rollout_id",
    b'{"rollout_id": 7}': "7 is no valid rollout_id",
    b'{"rollout_id": "a/b"}': "'a/b' is no valid rollout_id",
}


@pytest.mark.parametrize("bad", BAD_LINES)
async def test_a_line_without_a_rollout_stops_after_everything_before_it(tmp_path: Path, bad: bytes) -> None:
    name = write(tmp_path / "x.jsonl", line("a"), line("b"), bad, line("c"))
    recorder = Recorder()
    with pytest.raises(LineError) as caught:
        await publish_to(recorder, [name], complete=True)
    assert str(caught.value).startswith(f"{name}:3: ")
    assert BAD_LINES[bad] in str(caught.value)
    assert {record.key for record in recorder.records} == {b"a", b"b"}


async def test_bad_lines_can_be_skipped_and_are_reported(tmp_path: Path) -> None:
    name = write(tmp_path / "x.jsonl", line("a"), *BAD_LINES, line("c"))
    recorder, heard = Recorder(), list[str]()
    with sources([name]) as files:
        async with BatchPublisher(recorder) as publisher:
            published = await publish_files(publisher, files, on_bad=lambda error: heard.append(str(error)))
    assert [record.key for record in recorder.records] == [b"a", b"c"]
    assert published.skipped == len(heard) == len(BAD_LINES)


async def test_what_a_skipped_line_may_belong_to_is_never_completed_as_whole(tmp_path: Path) -> None:
    """The damaged line may be a rollout's last call; where it still names one, that one is masked."""
    damaged = line("b", "c2")[:40]
    named = write(tmp_path / "named.jsonl", line("a"), line("b"), damaged, line("c"))
    nameless = write(tmp_path / "nameless.jsonl", line("d"), b'{"rollout_i', line("e"), line("f"))
    ended = orjson.dumps({"event": "rollout_complete", "rollout_id": "g", "n_calls": 0})
    other = write(tmp_path / "other.jsonl", line("f", "c2"), line("h"), ended)
    recorder = Recorder()
    with sources([named, nameless, other]) as files:
        async with BatchPublisher(recorder) as publisher:
            published = await publish_files(publisher, files, complete=True, on_bad=lambda _: None)
    sent = [(record.key, orjson.loads(record.value or b"")) for record in recorder.records]
    assert [key for key, body in sent if body.get("event") == "rollout_complete"] == [
        b"a",
        b"b",
        b"c",
        b"h",
        b"g",
    ]
    assert [(key, body["reason"]) for key, body in sent if body.get("event") == "capture_incomplete"] == [
        (b"b", f"{named}:3 is damaged")
    ]
    assert [body.get("event") for key, body in sent if key == b"b"] == [
        None,
        "capture_incomplete",
        "rollout_complete",
    ]
    assert (published.skipped, published.withheld) == (2, 3)


def test_a_missing_file_is_noticed_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), sources([write(tmp_path / "1", line("a")), str(tmp_path / "2")]):
        pass


@pytest.mark.parametrize(("records_max", "bytes_max"), [(7, 1 << 20), (1_000, 400)])
async def test_batches_stay_in_bounds_and_in_order(records_max: int, bytes_max: int) -> None:
    recorder = Recorder()
    events = [entry("r", f"c{number}", [1], [2]) for number in range(50)]
    async with BatchPublisher(recorder, records_max=records_max, bytes_max=bytes_max) as publisher:
        for event in events:
            await publisher.put(record_of(event))
    assert recorder.records == [record_of(event) for event in events]
    assert len(recorder.batches) > 5
    assert publisher.records == 50
    assert publisher.bytes == sum(record.size for record in recorder.records)


async def test_a_failed_batch_is_raised_and_nothing_after_it_is_sent() -> None:
    recorder = Recorder(refuse_at=2)
    publisher = BatchPublisher(recorder, records_max=2)

    async def publish() -> None:
        async with publisher:
            for number in range(20):
                await publisher.put(record_of(entry("r", f"c{number}", [1], [2])))

    with pytest.raises(BrokerUnavailableError):
        await publish()
    assert publisher.records == 4


async def test_an_error_of_the_caller_is_not_hidden_by_a_failing_batch() -> None:
    async def fail() -> None:
        async with BatchPublisher(Recorder(refuse_at=0), records_max=1) as publisher:
            await publisher.put(record_of(entry("r", "c", [1], [2])))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()


async def test_single_events_are_published(transport: Transport, producer: Producer) -> None:
    events = events_for(["a", "b"], "rollout_complete", {"reward": {"score": 1}, "n_calls": 3, "model": None})
    assert await publish_events(producer, events) == 2
    values = [orjson.loads(value or b"") for _, value in await values_in(transport)]
    assert sorted(value["rollout_id"] for value in values) == ["a", "b"]
    assert all(value["reward"] == {"score": 1} and value["n_calls"] == 3 for value in values)
    assert all("model" not in value for value in values)


def test_events_are_checked_before_anything_is_published() -> None:
    assert events_for(["a"], "rollout_clear", {}) == [RolloutClear(rollout_id="a")]
    assert events_for(["a"], "rollout_complete", {"reward": 0.5}) == [
        RolloutComplete(rollout_id="a", reward=0.5)
    ]
    with pytest.raises(InputError, match="'no/id' is no valid rollout id"):
        events_for(["a", "no/id"], "rollout_clear", {})
    with pytest.raises(InputError, match="group_size"):
        events_for(["a"], "rollout_complete", {"group_size": 0})
    with pytest.raises(InputError, match="reward"):
        events_for(["a"], "rollout_complete", {"reward": "much"})


@pytest.mark.parametrize("packed", [False, True])
async def test_simulated_load_is_published_in_its_order(packed: bool) -> None:
    recorder, truths = Recorder(), list[Truth]()
    profile = Profile(rollouts=10)
    async with BatchPublisher(recorder, records_max=10) as publisher:
        await publish_simulated(publisher, simulate(profile), packed=packed, on_truth=truths.append)
    assert recorder.records == [record_of(item.event, packed=packed) for item in simulate(profile)]
    assert truths == [item.truth for item in simulate(profile) if item.truth is not None]


async def test_simulated_load_keeps_its_rate() -> None:
    recorder = Recorder()
    profile = Profile(
        rollouts=4, turns=(3, 3), duplicate=0, retry=0, empty=0, lost=0, no_records=0, cancelled=0
    )
    began = time.monotonic()
    async with BatchPublisher(recorder) as publisher:
        await publish_simulated(publisher, simulate(profile), rate=50)
    calls = sum(record.value is not None and b'"token_entry"' in record.value for record in recorder.records)
    assert calls >= 12
    assert time.monotonic() - began >= (calls - 1) / 50
    assert len(recorder.batches) > 1
