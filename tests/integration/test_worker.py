"""The worker on both transports: what bad input gets, kills, sharing, stops, refusals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from freezepoint.core.records import OutputRecord
from freezepoint.simulate import Profile, simulate
from freezepoint.transport.splitting import KEY_KEPT_BYTES
from freezepoint_schemas import codec
from freezepoint_schemas.events import InputEvent
from freezepoint_schemas.headers import ERROR_CLASS, ERROR_OFFSET, ERROR_TOPIC, ORIGINAL_SIZE, PART, header
from freezepoint_schemas.ledger import PROGRESS_KEY
from freezepoint_schemas.topics import Topic, partition_for
from tests.contract.driving import PARTITIONS, Cluster, read_until
from tests.events import Bench, clear, complete, entry, records_of
from tests.integration.workers import (
    by_rollout,
    publish,
    publish_raw,
    read_all,
    read_results,
    run_until_idle,
    worker,
)
from tests.polling import poll_until_async

TOKEN_BYTES_MAX = 100_000
"""The worker's record limit in the table of bad input."""


@dataclass(frozen=True)
class Row:
    """A row of CONTRACT.md's "What bad input gets": what is sent for one rollout, and what must come of it.

    ``sent`` are (key, value) pairs, the key defaulting to the rollout id; ``reasons`` None means no result.
    """

    name: str
    sent: Sequence[bytes | InputEvent | None]
    reasons: Sequence[str] | None
    dead_letters: Sequence[str] = ()
    headers: tuple[tuple[str, bytes], ...] = ()
    closed: bool = True
    key: bytes | None = b"same"
    off_partition: bool = False
    extra: Sequence[InputEvent] = field(default_factory=tuple)


def body(rollout_id: str, text: str) -> bytes:
    return text.replace("ID", rollout_id).encode()


def rows() -> list[Row]:
    def good(rollout_id: str, call_id: str = "c1", generation: Sequence[int] = (3,)) -> InputEvent:
        return entry(rollout_id, call_id, [1, 2], generation)

    intent_of_x = '{"event": "call_intent", "model_call_id": "x", '
    return [
        Row("fine", [good("fine")], []),
        Row("not-json", [good("not-json"), b"{"], ["undecodable_record"], ["undecodable_record"]),
        Row("no-object", [good("no-object"), b"[1]"], ["undecodable_record"], ["undecodable_record"]),
        Row("unknown-event", [good("unknown-event"), b'{"event": "x"}'], ["undecodable_record"], ["undecodable_record"]),
        Row("invalid", [good("invalid"), b'{"event": "call_intent"}'], ["invalid_entry"], ["invalid_entry"]),
        Row("no-id-in-body", [b'{"model_call_id": "c", "prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [0]}'], []),
        Row("foreign", [good("foreign"), (intent_of_x + '"rollout_id": "other"}').encode()], ["foreign_record"], ["foreign_record"]),
        Row("newer", [good("newer"), (intent_of_x + '"schema_version": 9}').encode()], ["unsupported_schema"], ["unsupported_schema"]),
        Row("repeat", [good("repeat"), codec.encode_event(good("repeat"), packed=True)], []),
        Row("conflict", [good("conflict"), good("conflict", generation=(9,))], ["conflicting_entry"]),
        Row("late", [good("late"), complete("late"), good("late"), good("late", "c2"), complete("late")], [], ["late_after_freeze"] * 2, closed=False),
        Row("empty", [], ["no_records"]),
        Row("too-large", [good("too-large"), b"x" * (TOKEN_BYTES_MAX + 1)], ["rollout_too_large"], ["rollout_too_large"]),
        Row("no-key", [good("no-key")], None, ["invalid_key"], key=None, closed=False),
        Row("bad-key", [good("bad-key")], None, ["invalid_key"], key=b"a/b", closed=False),
        Row("strayed", [good("strayed")], None, ["wrong_partition"], off_partition=True, closed=False),
        Row("cleared", [b"{", clear("cleared"), good("cleared")], [], ["undecodable_record"]),
    ]  # fmt: skip


def records_of_row(row: Row) -> list[OutputRecord]:
    own = row.name.encode()
    key = own if row.key == b"same" else row.key
    partition = (partition_for(own, PARTITIONS) + 1) % PARTITIONS if row.off_partition else None
    closing = [complete(row.name)] if row.closed else []
    return [
        OutputRecord(
            Topic.TOKENS,
            key,
            item if isinstance(item, bytes) or item is None else codec.encode_event(item),
            partition=partition,
        )
        for item in [*row.sent, *closing]
    ]


async def test_every_row_of_bad_input(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics()
    table = rows()
    await publish_raw(transport, [record for row in table for record in records_of_row(row)])
    environment = {**cluster.environment(), "FREEZEPOINT_WORKER__RECORD_BYTES_MAX": str(TOKEN_BYTES_MAX)}
    run_until_idle(environment, tmp_path / "worker.log")

    results = by_rollout(await read_results(transport))
    assert {name: body["reasons"] for name, body in results.items()} == {
        row.name: list(row.reasons) for row in table if row.reasons is not None
    }
    letters = await read_all(transport, Topic.DEAD_LETTERS)
    sent_as = {row.name.encode() if row.key == b"same" else row.key: row.name for row in table}
    found = sorted(
        (sent_as[letter.key], (header(letter.headers, ERROR_CLASS) or b"").decode()) for letter in letters
    )
    assert found == sorted((row.name, reason) for row in table for reason in row.dead_letters)
    assert {header(letter.headers, ERROR_TOPIC) for letter in letters} == {
        cluster.names[Topic.TOKENS].encode()
    }
    assert all((header(letter.headers, ERROR_OFFSET) or b"").isdigit() for letter in letters)


def load(seed: int, rollouts: int) -> list[InputEvent]:
    """Simulated rollouts of every kind, interleaved."""
    return [step.event for step in simulate(Profile(rollouts=rollouts, seed=seed))]


def pure_fold(events: Sequence[InputEvent]) -> dict[str, dict[str, object]]:
    """What the events must become, by the fold alone: no transport, no process, no partitions."""
    return by_rollout(Bench().run(records_of(events)))


async def test_kills_lose_nothing_and_double_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """kill -9 of the only worker, four times, each while it is publishing results."""
    transport = await cluster.with_topics()
    events = load(seed=7, rollouts=120)
    size = len(events) // 4 + 1
    chunks = [events[start : start + size] for start in range(0, len(events), size)]
    for number, chunk in enumerate(chunks):
        before = len(await read_results(transport))
        with worker(cluster.environment(), tmp_path / f"killed-{number}.log") as running:
            running.until_acquired()
            await publish(transport, chunk)

            async def published(known: int = before) -> bool:
                return len(await read_results(transport)) > known

            await poll_until_async(published, 60, "a result of this chunk is committed")
            running.kill()
    run_until_idle(cluster.environment(), tmp_path / "last.log")
    assert by_rollout(await read_results(transport)) == pure_fold(events)


async def test_two_workers_share_the_partitions(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics()
    events = load(seed=11, rollouts=60)
    with (
        worker(cluster.environment(), tmp_path / "one.log") as one,
        worker(cluster.environment(), tmp_path / "two.log") as two,
    ):
        one.until_acquired()
        two.until_acquired()
        await publish(transport, events)
        expected = pure_fold(events)

        async def all_there() -> bool:
            return len(await read_results(transport)) >= len(expected)

        await poll_until_async(all_there, 60, "all results are committed")
        assert one.terminate() == 0, one.log.read_text()
        assert two.terminate() == 0, two.log.read_text()
    assert by_rollout(await read_results(transport)) == expected


async def test_a_worker_takes_over_from_a_killed_one_in_mid_rollout(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics()
    first, second = entry("r", "c1", [1], [2]), entry("r", "c2", [1, 2], [3])
    with worker(cluster.environment(), tmp_path / "dies.log") as dies:
        dies.until_acquired(PARTITIONS)
        await publish(transport, [first, entry("s", "c1", [1], [2]), complete("s")])

        async def published() -> bool:
            return len(await read_results(transport)) == 1

        await poll_until_async(published, 60, "the other rollout's result")
        with worker(cluster.environment(), tmp_path / "lives.log") as lives:
            dies.kill()
            lives.until_acquired(PARTITIONS)
            await publish(transport, [second, complete("r", n_calls=2)])

            async def both() -> bool:
                return len(await read_results(transport)) == 2

            await poll_until_async(both, 60, "the rollout that outlived its worker")
            assert lives.terminate() == 0
    results = by_rollout(await read_results(transport))
    assert results["r"]["reasons"] == []
    assert results["r"]["metrics"]["n_calls"] == 2


async def test_a_repeated_log_gives_no_second_result(cluster: Cluster, tmp_path: Path) -> None:
    """Everything is sent twice, a worker runs after each: at-least-once producers are normal."""
    transport = await cluster.with_topics()
    events = load(seed=3, rollouts=20)
    for number in range(2):
        await publish(transport, events)
        run_until_idle(cluster.environment(), tmp_path / f"{number}.log")
    assert by_rollout(await read_results(transport)) == pure_fold(events)


async def test_lives_of_one_id_come_out_in_order(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics()
    lives = 6
    for life in range(lives):
        await publish(transport, [clear("r"), entry("r", "c", [life], [life + 1]), complete("r", n_calls=1)])
        if life % 2:
            run_until_idle(cluster.environment(), tmp_path / f"{life}.log")
    results = await read_results(transport)
    assert [result.traces[0].token_ids.tolist() for result in results] == [
        [life, life + 1] for life in range(lives)
    ]
    assert [result.reasons for result in results] == [[]] * lives


async def test_large_results_and_entries_pass_in_parts(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics(record_bytes_max=20_000)
    rng = random.Random(1)
    prompt = [rng.randrange(150_000) for _ in range(40_000)]
    events: list[InputEvent] = [entry("big", "c1", prompt, [1, 2, 3]), complete("big", n_calls=1)]
    await publish(transport, events)
    assert len(await read_all(transport, Topic.TOKENS)) > 10
    environment = {**cluster.environment(), "FREEZEPOINT_SQLITE__RECORD_BYTES_MAX": "20000"}
    run_until_idle(environment, tmp_path / "worker.log")
    assert len(await read_all(transport, Topic.TRAJECTORIES)) > 5
    (result,) = await read_results(transport)
    assert result.reasons == []
    assert result.traces[0].token_ids.tolist() == [*prompt, 1, 2, 3]


async def test_a_key_and_headers_that_leave_a_dead_letter_no_room_stop_nobody(
    cluster: Cluster, tmp_path: Path
) -> None:
    limit, reserve = 20_000, 600
    transport = await cluster.with_topics(record_bytes_max=limit)
    much = b"x" * (limit - reserve - 100)
    await publish_raw(
        transport,
        [
            OutputRecord(Topic.TOKENS, much, b"{}"),
            OutputRecord(Topic.TOKENS, b"of headers", b"y" * 100, (("h", much),)),
            OutputRecord(Topic.TOKENS, b"of an empty one", None, (("h", much), (PART, much[:10]))),
            OutputRecord(Topic.TOKENS, b"r", b"{", (("h", much),)),
        ],
    )
    await publish(transport, [entry("s", "c", [1], [2]), complete("s"), complete("r")])
    environment = {**cluster.environment(), "FREEZEPOINT_SQLITE__RECORD_BYTES_MAX": str(limit)}
    run_until_idle(environment, tmp_path / "worker.log")
    assert {name: body["reasons"] for name, body in by_rollout(await read_results(transport)).items()} == {
        "r": ["undecodable_record"],
        "s": [],
    }
    letters = {letter.key: letter for letter in await read_all(transport, Topic.DEAD_LETTERS)}
    assert {key: letter.value for key, letter in letters.items()} == {
        much[:KEY_KEPT_BYTES]: b"{}",
        b"of headers": b"y" * 100,
        b"of an empty one": None,
        b"r": b"{",
    }
    for letter in letters.values():
        assert header(letter.headers, ORIGINAL_SIZE) == str(len(letter.value or b"")).encode()
        assert (header(letter.headers, ERROR_OFFSET) or b"").isdigit()
        assert header(letter.headers, "h") is None


async def test_a_second_group_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics()
    await publish(transport, [entry("r", "c", [1], [2]), complete("r")])
    run_until_idle(cluster.environment(), tmp_path / "first.log")
    other = {**cluster.environment(), "FREEZEPOINT_WORKER__GROUP": f"{cluster.group}-other"}
    with worker(cluster.environment(), tmp_path / "owner.log") as owner:
        owner.until_acquired(PARTITIONS)
        assert owner.log.read_text().count('"acquired"') == 1
        with worker(other, tmp_path / "second.log", "--until-idle") as refused:
            assert refused.wait() == 2
        said = [line for line in (tmp_path / "second.log").read_text().splitlines() if line[:1] != "{"]
        assert len(said) == 1, said
        assert said[0].startswith("error: ")
        assert "one ledger serves one group" in said[0]
        assert not refused.acquired
        await publish(transport, [entry("s", "c", [1], [2]), complete("s")])
        assert len(await read_until(transport, Topic.TRAJECTORIES, 2)) == 2
        assert owner.terminate() == 0
    assert "lease_lost" not in (tmp_path / "owner.log").read_text()


async def test_what_every_partition_is_refused_for_is_said_once(cluster: Cluster, tmp_path: Path) -> None:
    """What only acquiring shows: each partition's ledger is of a newer release."""
    transport = await cluster.with_topics()
    producer = await transport.producer()
    await producer.send(
        [OutputRecord(Topic.LEDGER, PROGRESS_KEY, b"{}", (), partition) for partition in range(PARTITIONS)]
    )
    with worker(cluster.environment(), tmp_path / "worker.log") as refused:
        assert refused.wait() == 2
    said = [line for line in (tmp_path / "worker.log").read_text().splitlines() if line[:1] != "{"]
    assert len(said) == 1, said
    assert "run the release that wrote it" in said[0]


async def test_the_ledger_says_what_the_results_say(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics()
    await publish(transport, load(seed=5, rollouts=30))
    run_until_idle(cluster.environment(), tmp_path / "worker.log")
    decided = {}
    for record in await read_all(transport, Topic.LEDGER):
        if record.key not in (None, PROGRESS_KEY) and record.value is not None:
            decided[(record.key or b"").decode()] = codec.decode_ledger(record.value)
    results = await read_results(transport)
    assert {
        name: (line.freeze_offset, line.snapshot_id) for name, line in decided.items() if line.outcome
    } == {result.rollout_id: (result.snapshot.freeze_offset, result.snapshot.id) for result in results}


async def test_until_idle_waits_for_the_partitions_of_a_killed_worker(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A worker that is given some partitions only must not take the rest for somebody else's work."""
    transport = await cluster.with_topics()
    events = load(seed=13, rollouts=24)
    with worker(cluster.environment(), tmp_path / "dies.log") as dies:
        dies.until_acquired(PARTITIONS)
        dies.kill()
    await publish(transport, events)
    run_until_idle(cluster.environment(), tmp_path / "rest.log")
    assert by_rollout(await read_results(transport)) == pure_fold(events)
