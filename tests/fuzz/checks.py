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

MESSAGE_LENGTH_MAX = 500
STREAM_LIMITS = {"bytes_max": 20_000, "entries_max": 20, "record_bytes_max": 8_000}


def check_value(value: bytes) -> str:
    """One value through the decoder and, if it is accepted, all the way to a result. Returns the outcome in a few words."""
    try:
        event = codec.decode_event("a", value)
    except DecodeError as error:
        message = str(error)
        assert isinstance(error.reason, Reason)
        assert len(message.encode()) < MESSAGE_LENGTH_MAX * 4
        assert len(message) < MESSAGE_LENGTH_MAX
        return f"{error.reason}: {message}"
    check_recoding(event)
    check_result(event, value)
    return f"accepted {event.event}"


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
        assert codec.encode_result(codec.decode_result(codec.encode_result(result, packed=False))) == raw
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
    held = [life.first_offset for life in bench.core.open.values()]
    held += [
        effect.offset if isinstance(effect, DeadLetter) else effect.log.first_offset for effect in bench.waiting
    ]
    assert watermark <= min([*held, bench.core.next_offset])
    assert watermark >= before
    return watermark


def check_stream(stream: list[InputRecord], random: Random) -> Iterator[str]:
    """One partition's log, at rest and through crashes: the same results, each once. Yields the outcomes."""
    steady = Bench(**STREAM_LIMITS)
    watermark = 0
    for item in stream:
        steady.feed([item])
        watermark = check_watermark(steady, watermark)
        for life in steady.core.open.values():
            assert life.held_bytes <= STREAM_LIMITS["bytes_max"] + STREAM_LIMITS["record_bytes_max"]
    steady.commit()
    check_published(steady, stream)
    shaken = _shaken(stream, random)
    assert shaken.result_values == steady.result_values
    assert [(letter.offset, letter.record) for letter in shaken.dead_letters] == [
        (letter.offset, letter.record) for letter in steady.dead_letters
    ]
    assert shaken.core.watermark() == steady.core.watermark()
    for result in steady.results:
        yield "result " + (" ".join(result.reasons) or "unmasked")
    for letter in steady.dead_letters:
        yield f"dead letter {letter.reason}"


def _shaken(stream: list[InputRecord], random: Random) -> Bench:
    bench = Bench(**STREAM_LIMITS)
    watermark = 0
    for _ in range(random.randrange(2, 6)):
        ahead = [item for item in stream if item.offset >= bench.core.next_offset]
        for item in ahead[: random.randrange(len(stream))]:
            bench.feed([item])
            if random.random() < 0.2:
                bench.commit(random.randrange(4))
                watermark = check_watermark(bench, watermark)
        progress = bench.progress
        bench.crash(max(0, progress.watermark - random.choice([0, 0, 3])) if progress else 0)
        watermark = 0
    bench.run(stream)
    return bench
