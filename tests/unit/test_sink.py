"""The sink without a broker: what it writes, refers to, refuses and remembers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import orjson
import pytest
import xxhash
from pydantic import BaseModel, ConfigDict

from freezepoint.core.records import OutputRecord
from freezepoint.errors import BrokerUnavailableError, ConfigurationError, InputError
from freezepoint.sink import TokenSink
from freezepoint_schemas import codec
from freezepoint_schemas.events import TokenEntry
from tests.events import entry
from tests.memory_transport import memory_sink
from tests.polling import poll_until_async


def body(record: OutputRecord) -> dict[str, Any]:
    assert record.value is not None
    decoded: dict[str, Any] = orjson.loads(record.value)
    return decoded


def prefix_of(record: OutputRecord) -> tuple[str, int] | None:
    prefix = body(record).get("prompt_prefix")
    return None if prefix is None else (prefix["call_id"], prefix["length"])


def digest(tokens: list[int]) -> str:
    return xxhash.xxh3_128_hexdigest(np.array(tokens, dtype="<i4").tobytes())


class GymEntry(BaseModel):
    """As NeMo Gym declares its own."""

    model_config = ConfigDict(extra="allow")

    schema_version: int = 1
    rollout_id: str
    model_call_id: str
    model: str = ""
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    routed_experts: Any | None = None
    output_items: list[dict[str, Any]] = []
    token_item_index: int | None = None
    created_at: float = 0.0


GIVEN: dict[str, Any] = {
    "rollout_id": "0-0",
    "model_call_id": "c1",
    "model": "m",
    "prompt_token_ids": [1, 2, 3],
    "generation_token_ids": [4, 5],
    "generation_log_probs": [-0.5, -0.1],
    "output_items": [{"type": "message", "content": "hi"}],
    "token_item_index": 0,
    "created_at": 7.5,
}


@pytest.mark.parametrize(
    "given",
    [
        GIVEN,
        GymEntry(**{**GIVEN, "continuation_fingerprint": "x"}),
        SimpleNamespace(**GIVEN, schema_version=1, unknown=object()),
        codec.event_from_object("0-0", {"event": "token_entry", **GIVEN}),
        {
            **GIVEN,
            "prompt_token_ids": np.array([1, 2, 3]),
            "generation_token_ids": (4, 5),
            "routed_experts": None,
        },
        GymEntry(**{**GIVEN, "schema_version": 3, "cum_len": 5, "digest": "x", "parent_resolution": "root"}),
    ],
    ids=["dict", "gym", "object", "entry", "arrays", "gym-3"],
)
async def test_put_takes_whatever_has_an_entrys_attributes(given: Any) -> None:
    with memory_sink(run="run1") as (sink, broker):
        await sink.put(given)
    (record,) = broker.sent
    assert record.key == b"run1.0-0"
    expected = codec.event_from_object(
        "run1.0-0", {"event": "token_entry", **GIVEN, "rollout_id": "run1.0-0"}
    )
    decoded = codec.decode_event("run1.0-0", record.value)
    assert codec.encode_event(decoded) == codec.encode_event(expected)
    assert body(record)["prompt_token_ids"]["dtype"] == "i32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"generation_log_probs": [-0.5]}, "2 generated tokens but 1"),
        ({"generation_log_probs": [float("nan"), 0.0]}, "finite"),
        ({"prompt_token_ids": [1, -2]}, "negative"),
        ({"prompt_token_ids": None}, "unknown event|prompt_token_ids"),
        ({"rollout_id": "a/b"}, "no valid rollout id"),
        ({"rollout_id": ""}, "no valid rollout id"),
        ({"rollout_id": None}, "no valid rollout id"),
        ({"schema_version": 2}, "newer"),
        ({"schema_version": 3, "cum_len": 2}, "whole prompt"),
        ({"token_item_index": 4}, "outside"),
        ({"output_items": [{"n": object()}]}, "JSON"),
    ],
)
async def test_what_is_no_entry_is_refused_before_anything_is_sent(
    change: dict[str, Any], message: str
) -> None:
    with memory_sink() as (sink, broker), pytest.raises(InputError, match=message):
        await sink.put({**GIVEN, **change})
    assert broker.attempts == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"broker": "http://x"}, "neither"),
        ({"run": "a/b"}, "run"),
        ({"wire": "xml"}, "wire"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"kafka": {"sasl_user": "x"}}, "kafka.sasl_user|sasl_user"),
        ({"sqlite": {"partitions": 0}}, "partitions"),
    ],
)
def test_wrong_arguments_show_when_the_sink_is_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TokenSink(**options)


async def test_the_other_events() -> None:
    with memory_sink(run="r") as (sink, broker):
        await sink.begin_call("0-0", "c1")
        await sink.cancel_call("0-0", "c1")
        await sink.mark_incomplete("0-0")
        await sink.mark_incomplete("0-0", "c2", reason="engine died")
        await sink.complete("0-0", reward=1.0, group_id="g", n_calls=None)
        await sink.clear("0-0")
        with pytest.raises(InputError, match="rewards"):
            await sink.complete("0-0", rewards=1.0)
        with pytest.raises(InputError, match="group_size"):
            await sink.complete("0-0", group_size=0)
    assert [record.key for record in broker.sent] == [b"r.0-0"] * 6
    events = [body(record) for record in broker.sent]
    assert [event["event"] for event in events] == [
        "call_intent", "call_cancelled", "capture_incomplete", "capture_incomplete", "rollout_complete", "rollout_clear",
    ]  # fmt: skip
    assert events[3]["reason"] == "engine died"
    assert (events[4]["reward"], events[4]["group_id"]) == (1.0, "g")


async def test_a_prompt_refers_to_the_whole_of_an_earlier_call() -> None:
    with memory_sink() as (sink, broker):
        await sink.put(entry("a", "c1", [1, 2], [3]))
        await sink.put(entry("a", "c2", [1, 2, 3, 4], [5]))
        await sink.put(entry("b", "c1", [1, 2, 3, 4, 5, 6], [7]))
        await sink.put(entry("a", "c3", [1, 2, 3, 9], [5]))
        await sink.put(entry("a", "c4", [1, 2], [8]))
    assert [prefix_of(record) for record in broker.sent] == [None, ("c1", 3), None, ("c1", 3), None]
    assert body(broker.sent[1])["prompt_prefix"]["digest"] == digest([1, 2, 3])


async def test_of_several_calls_the_newest_is_referred_to() -> None:
    with memory_sink() as (sink, broker):
        await sink.put(entry("a", "root", [1, 2], [3]))
        await sink.put(entry("a", "kept", [1, 2, 3, 4], [5]))
        await sink.put(entry("a", "drop", [1, 2, 3, 4], [9]))
        await sink.put(entry("a", "next", [1, 2, 3, 4, 5, 6], [7]))
        await sink.put(entry("a", "same", [1, 2, 3, 4, 5, 6], [7]))
        await sink.put(entry("a", "last", [1, 2, 3, 4, 5, 6, 7, 8], [7]))
    references = [("root", 3), ("root", 3), ("kept", 5), ("kept", 5), ("same", 7)]
    assert [prefix_of(record) for record in broker.sent[1:]] == references


async def test_a_repeated_call_never_refers_to_itself() -> None:
    empty = entry("a", "c1", [1, 2], [])
    with memory_sink() as (sink, broker):
        await sink.put(empty)
        await sink.put(empty)
        await sink.put(entry("a", "c2", [1, 2], [3]))
    assert [prefix_of(record) for record in broker.sent] == [None, None, ("c1", 2)]


async def test_only_acknowledged_calls_are_referred_to() -> None:
    with memory_sink() as (sink, broker):
        broker.held = asyncio.Event()
        first = asyncio.create_task(sink.put(entry("a", "c1", [1, 2], [3])))
        second = asyncio.create_task(sink.put(entry("a", "c2", [1, 2, 3, 4], [5])))
        await _until(lambda: broker.attempts == 2)
        broker.held.set()
        await asyncio.gather(first, second)
        broker.down = True
        with pytest.raises(BrokerUnavailableError):
            await sink.put(entry("a", "lost", [1, 2, 3, 4, 5, 6], [7]))
        broker.down = False
        await sink.put(entry("a", "c3", [1, 2, 3, 4, 5, 6, 7, 8], [9]))
    assert [prefix_of(record) for record in broker.sent] == [None, None, ("c2", 5)]


async def test_clear_and_complete_forget() -> None:
    with memory_sink() as (sink, broker):
        for end in (sink.clear, sink.complete):
            await sink.put(entry("a", "c1", [1, 2], [3]))
            await end("a")
            await sink.put(entry("a", "c2", [1, 2, 3, 4], [5]))
            await sink.clear("a")
    assert not any(prefix_of(record) for record in broker.sent)


async def test_what_was_under_way_when_a_clear_came_is_not_referred_to() -> None:
    with memory_sink() as (sink, broker):
        broker.held = asyncio.Event()
        put = asyncio.create_task(sink.put(entry("a", "c1", [1, 2], [3])))
        await _until(lambda: broker.attempts == 1)
        clear = asyncio.create_task(sink.clear("a"))
        await _until(lambda: broker.attempts == 2)
        late = asyncio.create_task(sink.put(entry("a", "c2", [5], [6])))
        await _until(lambda: broker.attempts == 3)
        broker.held.set()
        await asyncio.gather(put, clear, late)
        await sink.put(entry("a", "c3", [1, 2, 3, 4], [5]))
        await sink.put(entry("a", "c4", [5, 6, 7], [5]))
    assert not any(prefix_of(record) for record in broker.sent)


async def test_references_can_be_turned_off_and_json_written() -> None:
    with memory_sink(wire="json", by_reference=False) as (sink, broker):
        await sink.put(entry("a", "c1", [1, 2], [3]))
        await sink.put(entry("a", "c2", [1, 2, 3, 4], [5]))
    assert body(broker.sent[1])["prompt_token_ids"] == [1, 2, 3, 4]


async def test_the_memory_for_references_is_bounded() -> None:
    with memory_sink(reference_cache_bytes=64 * 1024) as (sink, broker):
        for number in range(200):
            await sink.put(entry(f"r{number}", "c", range(1000), [1]))
            assert sink._references is not None
            assert sink._references.bytes <= 64 * 1024
        await sink.put(entry("r199", "d", [*range(1000), 1, 2], [1]))
        await sink.put(entry("r0", "d", [*range(1000), 1, 2], [1]))
        await sink.put(entry("huge", "c", range(20_000), [1]))
        await sink.put(entry("huge", "d", [*range(20_000), 1], [1]))
    assert [prefix_of(record) for record in broker.sent[200:]] == [("c", 1001), None, None, None]


async def test_a_conversation_costs_the_memory_of_its_tokens_once() -> None:
    prompt = list(range(1000))
    with memory_sink() as (sink, broker):
        for number in range(50):
            await sink.put(entry("a", f"c{number}", prompt, [7] * 10))
            prompt += [7] * 10 + [8] * 90
        assert sink._references is not None
        assert sink._references.bytes < 6000 * 4 + 60 * 1024
    assert prefix_of(broker.sent[-1]) == ("c48", 1000 + 48 * 100 + 10)


async def test_integer_routes_are_written_in_the_smallest_type() -> None:
    routes = np.arange(24, dtype=np.int64).reshape(4, 3, 2)
    with memory_sink() as (sink, broker):
        await sink.put({**GIVEN, "routed_experts": routes})
        await sink.put({**GIVEN, "model_call_id": "c2", "routed_experts": routes.tolist()})
        await sink.put(entry("a", "c", [1, 2], [3, 4], routed_experts=routes))
    for record in broker.sent:
        written = body(record)["routed_experts"]
        assert (written["dtype"], written["shape"]) == ("u8", [4, 3, 2])
        decoded = codec.decode_event((record.key or b"").decode(), record.value)
        assert isinstance(decoded, TokenEntry)
        assert np.array_equal(np.asarray(decoded.routed_experts), routes)


async def test_a_slow_broker_holds_a_call_up_no_longer_than_the_deadline() -> None:
    with memory_sink(deadline_s=0.2) as (sink, broker):
        broker.held = asyncio.Event()
        with pytest.raises(BrokerUnavailableError, match=r"0.2 s \(deadline_s\)"):
            await sink.put(entry("a", "c1", [1, 2], [3]))
        broker.held.set()
        await _until(lambda: len(broker.sent) == 1)  # it was not cancelled, and counts as acknowledged now
        await sink.put(entry("a", "c2", [1, 2, 3, 4], [5]))
        assert prefix_of(broker.sent[1]) == ("c1", 3)
        await sink.close()


async def test_what_waits_for_the_broker_is_bounded() -> None:
    with memory_sink(pending_bytes_max=1000) as (sink, broker):
        broker.held = asyncio.Event()
        waiting = asyncio.create_task(sink.put(entry("a", "c1", range(2000), [3])))
        await _until(lambda: broker.attempts == 1)
        with pytest.raises(BrokerUnavailableError, match="pending_bytes_max"):
            await sink.put(entry("a", "c2", [1], [2]))
        broker.held.set()
        await waiting


async def test_a_mark_that_the_broker_did_not_take_goes_before_what_comes_next() -> None:
    with memory_sink() as (sink, broker):
        broker.down = True
        with pytest.raises(BrokerUnavailableError):
            await sink.mark_incomplete("a", "c1")
        with pytest.raises(BrokerUnavailableError):
            await sink.mark_incomplete("b", "c1")
        broker.down = False
        await sink.complete("a")
        assert [body(record)["event"] for record in broker.sent[:2]] == [
            "capture_incomplete",
            "rollout_complete",
        ]
        await _until(lambda: len(broker.sent) == 3)  # by itself: nothing more comes of b
        assert broker.sent[2].key == b"b"
        await sink.close()
    assert len(broker.sent) == 3


async def test_closing_tries_once_more_and_names_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    with memory_sink() as (sink, broker):
        broker.down = True
        with pytest.raises(BrokerUnavailableError):
            await sink.mark_incomplete("a", "c1")
        attempts = broker.attempts
        await sink.close()
        await sink.close()
    assert broker.attempts == attempts + 1
    assert broker.closed == 1
    assert "rollouts a:" in caplog.text
    with pytest.raises(ConfigurationError, match="closed"):
        await sink.begin_call("a", "c")


def test_one_sink_serves_one_loop_at_a_time() -> None:
    with memory_sink() as (sink, broker):
        asyncio.run(sink.begin_call("a", "c1"))
        asyncio.run(sink.begin_call("a", "c2"))  # the first loop is gone

        async def from_another_loop() -> None:
            await sink.begin_call("a", "c3")
            with pytest.raises(ConfigurationError, match="another event loop"):
                await asyncio.to_thread(asyncio.run, sink.begin_call("a", "c4"))

        asyncio.run(from_another_loop())
    assert len(broker.sent) == 3


async def _until(predicate: Any) -> None:
    async def check() -> bool:
        return bool(predicate())

    await poll_until_async(check, 5, "it happens")


@runtime_checkable
class GymTokenSink(Protocol):
    """What NeMo Gym asks of the class that its configuration names, and what it uses where it is there."""

    async def put(self, entry: Any) -> None: ...

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None: ...

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None: ...

    async def cancel_call(self, rollout_id: str, model_call_id: str) -> None: ...

    async def close(self) -> None: ...


async def test_it_can_be_named_in_gyms_configuration(tmp_path: Path) -> None:
    module, _, name = "freezepoint.sink:TokenSink".partition(":")
    sink_kwargs = {
        "broker": f"sqlite:///{tmp_path / 'gym.db'}",
        "run": "run1",
        "deadline_s": 5,
        "by_reference": True,
    }
    sink = getattr(import_module(module), name)(**sink_kwargs)
    assert isinstance(sink, GymTokenSink)
    await sink.begin_call("0-0", "c1")
    await sink.put(GymEntry(**GIVEN))
    await sink.mark_incomplete("0-0", "c2")
    await sink.close()


def test_a_model_server_needs_no_web_framework() -> None:
    program = (
        "import sys, freezepoint.sink, freezepoint.capture;"
        "print({'starlette', 'uvicorn', 'openai', 'typer', 'aiokafka'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "set()"
