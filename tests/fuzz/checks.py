"""What must hold for every input."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from freezepoint.core.digests import body_digest, prompt_form
from freezepoint.core.effects import DeadLetter
from freezepoint.core.records import InputRecord
from freezepoint_schemas import codec
from freezepoint_schemas.errors import DecodeError
from freezepoint_schemas.events import InputEvent, RolloutClear, TokenEntry
from freezepoint_schemas.reasons import Reason
from tests.events import Bench, complete, record
from tests.fuzz.oracle import account_for

MESSAGE_BYTES_MAX = 2_000
SHAKEN_SHARE = 0.5
STREAM_LIMITS = {"bytes_max": 20_000, "entries_max": 20, "record_bytes_max": 8_000}
TIGHT_LIMITS = {"bytes_max": 400, "entries_max": 3, "record_bytes_max": 1_000}
OVERHEAD_BYTES_MAX = 2_000
"""Of the parts of one value, as they are counted."""
TIGHT_SHARE = 0.2


def check_value(value: bytes) -> str:
    """One value through the decoder and, if it is accepted, all the way to a result. Returns the outcome in a few words."""
    try:
        event = codec.decode_event("a", value)
    except DecodeError as error:
        return check_refusal(error)
    check_recoding(event)
    check_result(event, value)
    return f"accepted {event.event}"


def check_refusal(error: DecodeError) -> str:
    """A refusal has a reason, and a message that fits into a header."""
    message = str(error)
    assert isinstance(error.reason, Reason)
    assert len(message.encode()) < MESSAGE_BYTES_MAX
    return f"{error.reason}: {message}"


def check_recoding(event: InputEvent) -> None:
    """An accepted event means the same in both wire forms."""
    plain = codec.encode_event(event)
    for again in (plain, codec.encode_event(event, packed=True)):
        decoded = codec.decode_event("a", again)
        assert codec.encode_event(decoded) == plain
        if isinstance(event, TokenEntry):
            assert isinstance(decoded, TokenEntry)
            assert body_digest(decoded) == body_digest(event)
            assert prompt_form(decoded) == prompt_form(event)


def check_result(event: InputEvent, value: bytes) -> None:
    """An accepted event can be frozen, built and encoded; the result decodes, and to the same bytes again."""
    bench = Bench()
    stream = [record(0, "a", value)]
    if not isinstance(event, TokenEntry):
        stream.insert(0, record(-1, "a", b'{"event":"call_intent","model_call_id":"c"}'))
    stream.append(record(1, "a", complete("a")))
    for item in stream:
        bench.waiting += bench.core.feed(item)
    bench.commit()
    assert not bench.dead_letters
    assert bench.results or isinstance(event, RolloutClear)
    check_published(bench, stream)


def check_published(bench: Bench, stream: list[InputRecord]) -> None:
    """Results are bytes that mean themselves, one per life, and accounted for; dead letters are in order, each once."""
    for result, raw in zip(bench.results, bench.result_values, strict=True):
        assert codec.encode_result(result) == raw
        plain = codec.encode_result(result, packed=False)
        assert codec.encode_result(codec.decode_result(plain), packed=False) == plain
        account_for(result, stream)
    places = [(result.rollout_id, result.snapshot.freeze_offset) for result in bench.results]
    assert len(set(places)) == len(places)
    offsets = [letter.offset for letter in bench.dead_letters]
    assert offsets == sorted(set(offsets))
    for letter in bench.dead_letters:
        assert all(isinstance(content, bytes) for _, content in letter.record.headers)


def check_watermark(bench: Bench, before: int) -> int:
    """The watermark never falls, and never passes what is held."""
    watermark = bench.core.watermark()
    held = [
        life.carried.through + 1 if life.carried else life.first_offset for life in bench.core.open.values()
    ]
    held += [
        effect.offset if isinstance(effect, DeadLetter) else effect.held_offset for effect in bench.waiting
    ]
    assert watermark <= min([*held, bench.core.next_offset])
    assert watermark >= before
    return watermark


def check_stream(stream: list[InputRecord], random: Random) -> Iterator[str]:
    """One partition's log, at rest and through crashes: the same results, each once. Yields the outcomes."""
    limits = TIGHT_LIMITS if random.random() < TIGHT_SHARE else STREAM_LIMITS
    steady = Bench(**limits)
    watermark = 0
    for item in stream:
        steady.feed([item])
        watermark = check_watermark(steady, watermark)
        for life in steady.core.open.values():
            held_max = limits["bytes_max"] + limits["record_bytes_max"] + OVERHEAD_BYTES_MAX
            assert life.held_bytes <= held_max, f"{life.held_bytes} bytes held"
    steady.commit()
    check_published(steady, stream)
    if random.random() < SHAKEN_SHARE:
        _check_shaken(steady, _shaken(stream, random, limits))
    for result in steady.results:
        yield "result " + (" ".join(result.reasons) or "unmasked")
    for letter in steady.dead_letters:
        yield f"dead letter {letter.reason}"


def _check_shaken(steady: Bench, shaken: Bench) -> None:
    assert shaken.result_values == steady.result_values
    assert [(letter.offset, letter.record) for letter in shaken.dead_letters] == [
        (letter.offset, letter.record) for letter in steady.dead_letters
    ]
    carried = [life.carried.chunks for life in shaken.core.open.values() if life.carried]
    assert shaken.carried_chunks() == sum(carried)
    assert shaken.core.watermark() == steady.core.watermark() or carried


def _shaken(stream: list[InputRecord], random: Random, limits: dict[str, int]) -> Bench:
    bench = Bench(**limits)
    watermark = 0
    for _ in range(random.randrange(2, 6)):
        ahead = [item for item in stream if item.offset >= bench.core.next_offset]
        for item in ahead[: random.randrange(len(stream))]:
            bench.feed([item])
            if random.random() < 0.2:
                bench.commit(random.randrange(4))
                watermark = check_watermark(bench, watermark)
        if random.random() < 0.3:
            bench.carry()
        progress = bench.progress
        bench.crash(progress.watermark if progress else 0)  # no replay begins before it
        watermark = 0
    bench.run(stream)
    return bench
