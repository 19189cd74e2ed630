"""Whatever the order across producers, the repeats, the crashes and the replays: the same results, each once."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from freezepoint.core.records import InputRecord
from freezepoint_schemas import codec, parts
from freezepoint_schemas.events import InputEvent, TokenEntry
from freezepoint_schemas.headers import PART
from tests.events import (
    Bench,
    cancelled,
    cancelled_call,
    clear,
    comparable,
    complete,
    entry,
    incomplete,
    intent,
    record,
)

ROLLOUTS = ("a", "b", "c")
CALLS = ("c0", "c1", "c2")
TOKENS = st.lists(st.integers(0, 2), max_size=4)


@st.composite
def log_events(draw: st.DrawFn, rollout_id: str) -> InputEvent:
    """What may be written into an open life; payloads of one call id are a function of the id (no conflicts)."""
    call_id = draw(st.sampled_from(CALLS))
    kind = draw(st.sampled_from(["entry"] * 5 + ["intent", "cancelled", "incomplete"]))
    if kind == "entry":
        number = CALLS.index(call_id)
        return entry(
            rollout_id, call_id, [1, 2, 0][: number + 1], [2] * (number + 1), created_at=float(number)
        )
    match kind:
        case "intent":
            return intent(rollout_id, call_id)
        case "cancelled":
            return cancelled_call(rollout_id, call_id)
        case _:
            return incomplete(rollout_id, call_id)


@st.composite
def streams(draw: st.DrawFn) -> list[InputRecord]:
    """A partition's log: lives of a few rollouts, bad records, split records, tombstones."""
    stream: list[InputRecord] = []
    for _ in range(draw(st.integers(1, 25))):
        rollout_id = draw(st.sampled_from(ROLLOUTS))
        kind = draw(
            st.sampled_from(["log"] * 6 + ["split", "complete", "complete", "cancel", "clear", "bad", "key"])
        )
        offset = (
            len(stream) + draw(st.integers(0, 2))
            if not stream
            else stream[-1].offset + draw(st.integers(1, 3))
        )
        match kind:
            case "log":
                stream.append(record(offset, rollout_id, draw(log_events(rollout_id))))
            case "split":
                value = codec.encode_event(draw(log_events(rollout_id)))
                pieces = list(parts.split(value, max(1, len(value) // 2)))
                for index in draw(st.lists(st.integers(0, len(pieces) - 1), min_size=1, max_size=4)):
                    header, part = pieces[index]
                    stream.append(record(offset, rollout_id, part, headers=((PART, header.encode()),)))
                    offset += 1
            case "complete":
                stream.append(record(offset, rollout_id, complete(rollout_id)))
            case "cancel":
                stream.append(record(offset, rollout_id, cancelled(rollout_id)))
            case "clear":
                group = draw(st.sampled_from([None, "g"]))
                value_or_none = clear(rollout_id, group_id=group) if group else draw(st.sampled_from([None]))
                stream.append(record(offset, rollout_id, value_or_none))
            case "bad":
                stream.append(
                    record(
                        offset, rollout_id, draw(st.sampled_from([b"{", b"{}", b'{"event":"call_intent"}']))
                    )
                )
            case "key":
                stream.append(record(offset, None, b"{}"))
    return stream


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(1, 8)),
        st.tuples(st.just("commit"), st.integers(0, 5)),
        st.tuples(st.just("crash"), st.integers(0, 40)),
        st.tuples(st.just("carry"), st.just(0)),
    ),
    max_size=25,
)


def full(bench: Bench) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    return (
        [result.model_dump() for result in bench.results],
        [(letter.offset, str(letter.reason)) for letter in bench.dead_letters],
    )


def plain(value: Any) -> Any:
    """Arrays as lists, so that results compare."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


@settings(max_examples=400, deadline=None)
@given(streams(), STEPS)
def test_crashes_and_replays_change_nothing(stream: list[InputRecord], steps: list[tuple[str, int]]) -> None:
    steady = Bench()
    steady.run(stream)
    shaken = Bench()
    for step, count in steps:
        match step:
            case "feed":
                shaken.feed([item for item in stream if item.offset >= shaken.core.next_offset][:count])
            case "commit":
                shaken.commit(count)
            case "carry":
                shaken.carry()
            case "crash":
                progress = shaken.progress
                shaken.crash(max(0, progress.watermark - count) if progress else 0)
    shaken.run(stream)
    assert plain(full(shaken)) == plain(full(steady))
    assert shaken.core.watermark() >= steady.core.watermark()
    assert shaken.carried_chunks() == sum(
        life.carried.chunks for life in shaken.core.open.values() if life.carried
    )


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_order_across_producers_and_repeats_change_nothing(data: st.DataObject) -> None:
    events = data.draw(st.lists(log_events("a"), min_size=1, max_size=8))
    first = data.draw(st.permutations(events))
    repeats = data.draw(st.lists(st.sampled_from(events), max_size=6))
    second = data.draw(st.permutations([*events, *repeats]))
    outcomes = []
    for order in (first, second):
        bench = Bench()
        encoded = [codec.encode_event(event, packed=data.draw(st.booleans())) for event in order]
        bench.feed(record(offset, "a", value) for offset, value in enumerate(encoded))
        (result,) = bench.run([record(100, "a", complete("a"))])
        outcomes.append(plain(comparable(result)))
    assert outcomes[0] == outcomes[1]


@settings(max_examples=200, deadline=None)
@given(TOKENS, st.data())
def test_which_of_two_conflicting_payloads_is_kept_is_all_that_order_decides(
    tokens: list[int], data: st.DataObject
) -> None:
    one: TokenEntry = entry("a", "c0", tokens, [1])
    other: TokenEntry = entry("a", "c0", tokens, [2])
    for order in data.draw(st.permutations([[one, other], [other, one]])):
        bench = Bench()
        bench.feed(record(offset, "a", event) for offset, event in enumerate(order))
        (result,) = bench.run([record(9, "a", complete("a"))])
        assert result.reasons == ["conflicting_entry"]
        assert result.traces[0].token_ids.tolist() == [*tokens, *order[0].generation_token_ids]
