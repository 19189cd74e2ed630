"""``replay``: results rebuilt and dead letters put back, on both transports, after real workers."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from freezepoint.core.effects import OVERSIZED_KEPT_BYTES
from freezepoint.core.records import OutputRecord
from freezepoint.replay import Filters, Selection, letters, put_back, rebuild
from freezepoint.replay.letters import Why
from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from freezepoint.transport.ports import Transport
from freezepoint.transport.splitting import split_record
from freezepoint_schemas import codec, headers
from freezepoint_schemas.events import InputEvent
from freezepoint_schemas.results import Result
from freezepoint_schemas.topics import Topic, partition_for
from tests.contract.driving import Cluster
from tests.documents import Typist, blocks_of
from tests.events import cancelled, clear, complete, entry, intent
from tests.integration.shell import Outcome, Shell
from tests.integration.workers import publish, publish_raw, read_all, read_results, run_until_idle, worker
from tests.polling import poll_until_async

PARTITIONS = 2
ALL = Filters()
CALLS = [("c1", [1], [2]), ("c2", [1, 2, 3], [4])]


def life(rollout_id: str, **fields: Any) -> list[InputEvent]:
    return [*(entry(rollout_id, *call) for call in CALLS), complete(rollout_id, **fields)]


class Site:
    """One broker's topics, the worker's and the command's environment."""

    def __init__(self, cluster: Cluster, shell: Shell) -> None:
        self.cluster = cluster
        self.shell = shell
        self.settings: Settings = cluster.settings()
        self._runs = 0

    async def open(self) -> Transport:
        return await self.cluster.with_topics(PARTITIONS)

    def work(self, **more: str) -> None:
        self._runs += 1
        environment = {**self.cluster.environment(), **more}
        run_until_idle(environment, self.shell.folder / f"worker-{self._runs}.log")

    def __call__(self, *arguments: str, stdin: bytes = b"") -> Outcome:
        return self.shell(
            "replay", *arguments, stdin=stdin, environment={**self.cluster.environment(), "COLUMNS": "200"}
        )

    async def rebuilt(self, selection: Selection) -> list[tuple[Result, bool | None]]:
        async with connect(self.settings) as broker:
            return [(one.result, one.agrees) async for one in rebuild(broker, self.settings, selection)]

    async def put_back(self, filters: Filters = ALL, *, dry_run: bool = False) -> dict[str, Why | None]:
        """What became of each letter, by its origin without the topic."""
        async with connect(self.settings) as broker:
            return {
                fate.origin.partition(":")[2]: fate.why
                async for fate in put_back(broker, filters, dry_run=dry_run)
            }


@pytest.fixture
def site(cluster: Cluster, shell: Shell) -> Site:
    return Site(cluster, shell)


def bodies(results: Sequence[Result]) -> dict[tuple[str, int], bytes]:
    return {
        (result.rollout_id, result.snapshot.freeze_offset): codec.encode_result(result) for result in results
    }


# ------------------------------------------------------------------------------------------------------- rebuilding


async def test_everything_rebuilt_is_what_was_published(site: Site) -> None:
    transport = await site.open()
    await publish(
        transport,
        [
            *(event for name in ("a", "b", "c") for event in life(name, reward=1.0)),
            *life("reused"),
            clear("reused"),
            entry("reused", "other", [5], [6]),
            complete("reused"),
            entry("reused", "late", [5], [6]),
            complete("reused"),
            intent("lost", "c0"),
            complete("lost"),
            cancelled("given-up"),
            clear("grouped", group_id="g", group_size=2),
            complete("grouped"),
            entry("open", "c", [1], [2]),
        ],
    )
    site.work()
    published = await read_results(transport)
    rebuilt = await site.rebuilt(Selection())
    assert bodies([result for result, _ in rebuilt]) == bodies(published)
    assert len(rebuilt) == len(published) == 8
    unproved = [result.rollout_id for result, agrees in rebuilt if agrees is not True]
    assert unproved == ["reused"]  # its first life: the ledger speaks of the last one


async def test_named_ones_give_their_last_life_and_a_range_what_froze_in_it(site: Site) -> None:
    transport = await site.open()
    await publish(transport, [*life("a"), clear("a"), entry("a", "x", [7], [8]), complete("a"), *life("b")])
    site.work()
    home = partition_for(b"a", PARTITIONS)
    [(named, agrees)] = await site.rebuilt(Selection(frozenset({"a"})))
    assert agrees
    assert [span.call_id for span in named.traces[0].spans] == ["x"]
    first = next(
        result.snapshot.freeze_offset for result in await read_results(transport) if result.rollout_id == "a"
    )
    [(early, _)] = await site.rebuilt(Selection(partition=home, end=first + 1))
    assert (early.rollout_id, early.snapshot.freeze_offset) == ("a", first)
    later = await site.rebuilt(Selection(partition=home, first=first + 1))
    assert first not in {result.snapshot.freeze_offset for result, _ in later}
    assert named.snapshot.freeze_offset in {result.snapshot.freeze_offset for result, _ in later}


async def test_a_life_that_was_timed_out_ends_where_the_worker_ended_it(site: Site) -> None:
    transport = await site.open()
    await publish(transport, [entry("idle", "c1", [1], [2])])
    environment = {**site.cluster.environment(), "FREEZEPOINT_WORKER__ROLLOUT_TIMEOUT_S": "1"}
    with worker(environment, site.shell.folder / "worker.log"):
        await poll_until_async(lambda: _any(transport), 60, "the timeout's result")
    await publish(transport, [entry("idle", "c2", [1, 2, 3], [4]), complete("idle")])
    [published] = await read_results(transport)
    [(result, agrees)] = await site.rebuilt(Selection(frozenset({"idle"})))
    assert agrees
    assert result.reasons == ["rollout_timeout"]
    assert bodies([result]) == bodies([published])


async def _any(transport: Transport) -> bool:
    return bool(await read_results(transport))


async def test_the_command_writes_lines_and_says_what_is_missing(site: Site) -> None:
    transport = await site.open()
    await publish(transport, [*life("a"), *life("b"), entry("open", "c", [1], [2])])
    site.work()
    done = site("a", "--ids", "-", stdin=b"b\n")
    assert (done.code, {line["rollout_id"] for line in done.lines}) == (0, {"a", "b"})
    assert done.err.startswith("2 results rebuilt (0 masked, 0 of which")
    assert "rebuilt_response" in site("a", "--projection", "response").lines[0]
    missing = site("a", "nobody", "open")
    assert (missing.code, len(missing.lines)) == (1, 1)
    assert "warning: rollout nobody: nothing of it is frozen" in missing.err
    assert "warning: rollout open: nothing of it is frozen" in missing.err
    for wrong in (
        [],
        ["a", "--all"],
        ["no/id"],
        ["a", "--dry-run"],
        ["--partition", "9"],
        ["--dead-letters", "--reason", "x"],
    ):
        outcome = site(*wrong)
        assert (outcome.code, outcome.out) == (2, b""), wrong


async def test_results_go_to_another_topic_and_never_to_a_workers_own(site: Site) -> None:
    transport = await site.open()
    await publish(transport, [*life("a"), *life("b")])
    site.work()
    own = site.settings.topic_prefix
    assert "the worker's own" in site("--all", "--to-prefix", own).err
    other = f"{own}again-"
    assert f"freezepoint topics apply --topic-prefix {other}" in site("--all", "--to-prefix", other).err
    names = site.settings.model_copy(update={"topic_prefix": other})
    async with connect(names) as broker:
        specs = [replace(spec, name=other + spec.name.removeprefix(own)) for spec in site.cluster.specs(1)]
        assert all(finding.ok for finding in await broker.admin().apply(specs))
        before = len(await read_results(transport))
        done = site("--all", "--to-prefix", other)
        assert (done.code, done.out) == (0, b"")
        assert bodies(await read_results(broker)) == bodies(await read_results(transport))
        assert len(await read_results(transport)) == before
        await publish_raw(broker, [OutputRecord(Topic.LEDGER, b"!progress", b"{}", partition=0)])
    assert "belongs to a worker" in site("--all", "--to-prefix", other).err


async def test_what_the_topic_has_lost_is_not_handed_out(tmp_path: Path, shell: Shell) -> None:
    site = Site(Cluster(f"sqlite:///{tmp_path / 'f.db'}", ""), shell)
    transport = await site.open()
    await publish(transport, [*life("a"), *life("b")])
    site.work()
    connection = sqlite3.connect(tmp_path / "f.db")
    [home] = {partition_for(b"a", PARTITIONS)}
    stream = connection.execute(
        "SELECT stream.id FROM stream JOIN topic ON topic = topic.id WHERE name = 'rollout-tokens' AND partition = ?",
        (home,),
    ).fetchone()[0]
    connection.execute("DELETE FROM record WHERE position = ? << 40", (stream,))
    connection.execute("UPDATE stream SET log_start = 1 WHERE id = ?", (stream,))
    connection.commit()
    connection.close()
    lost = site("a", "b")
    assert lost.code == 1
    assert [line["rollout_id"] for line in lost.lines] == ["b"]
    assert (
        "warning: rollout a: not handed out: the topic does not hold what was published any more" in lost.err
    )
    await transport.close()


# ------------------------------------------------------------------------------------------------------ dead letters


def misplaced(event: InputEvent) -> OutputRecord:
    """On the partition that is not its key's."""
    key = event.rollout_id.encode()
    elsewhere = (partition_for(key, PARTITIONS) + 1) % PARTITIONS
    return OutputRecord(Topic.TOKENS, key, codec.encode_event(event), (("trace", b"1"),), elsewhere)


async def test_misplaced_records_go_back_once_and_complete_their_rollout(site: Site) -> None:
    transport = await site.open()
    await publish(transport, [entry("r", *CALLS[0])])
    await publish_raw(transport, [misplaced(entry("r", *CALLS[1]))])
    site.work()
    dry = site("--dead-letters", "--dry-run")
    assert dry.err == "1 dead letter would be put back, 0 stay\n"
    assert [(line["put_back"], line["why_not"]) for line in dry.lines] == [(False, "dry run")]
    assert len(await read_all(transport, Topic.TOKENS)) == 2

    done = site("--dead-letters")
    [line] = done.lines
    origin = (partition_for(b"r", PARTITIONS) + 1) % PARTITIONS
    assert line == {
        "origin": f"{transport.names[Topic.TOKENS]}:{origin}:0",
        "rollout_id": "r",
        "reason": "wrong_partition",
        "put_back": True,
        "why_not": None,
    }
    [back] = [
        record
        for record in await read_all(transport, Topic.TOKENS)
        if headers.header(record.headers, headers.REPLAYED)
    ]
    assert (back.partition, back.key) == (partition_for(b"r", PARTITIONS), b"r")
    assert back.headers == (("trace", b"1"), (headers.REPLAYED, line["origin"].encode()))

    second = site("--dead-letters")
    assert second.err == "0 dead letters were put back, 1 stays\n"
    assert second.lines[0]["why_not"] == Why.ALREADY
    assert len(await read_all(transport, Topic.TOKENS)) == 3
    await publish(transport, [complete("r", n_calls=2)])
    site.work()
    [result] = await read_results(transport)
    assert (result.mask_sample, result.metrics["n_calls"]) == (False, 2)


async def test_a_run_that_was_cut_off_goes_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = await site.open()
    await publish_raw(transport, [misplaced(entry("r", f"c{number}", [number], [1])) for number in range(4)])
    site.work()
    monkeypatch.setattr(letters, "SEND_RECORDS", 1)
    async with connect(site.settings) as broker, aclosing(put_back(broker, ALL)) as fates:
        await anext(fates)
    assert list((await site.put_back()).values()) == [Why.ALREADY, None, None, None]
    assert set((await site.put_back()).values()) == {Why.ALREADY}
    await publish(transport, [complete("r", n_calls=4, delivery="all_traces", builder="per_request")])
    site.work()
    [result] = await read_results(transport)
    assert (result.mask_sample, result.metrics["n_calls"]) == (False, 4)
    assert len(await read_all(transport, Topic.TOKENS)) == 4 + 4 + 1


async def test_nothing_goes_back_into_a_frozen_or_a_cleared_rollout(site: Site) -> None:
    transport = await site.open()
    await publish(transport, [*life("frozen"), entry("frozen", "late", [1], [2])])
    await publish_raw(
        transport, [misplaced(entry("cleared", "c", [1], [2])), misplaced(entry("fine", "c", [1], [2]))]
    )
    site.work()
    await publish(transport, [clear("cleared"), entry("cleared", "new", [1], [2])])
    site.work()
    async with connect(site.settings) as broker:
        fates = {fate.rollout_id: fate.why async for fate in put_back(broker, Filters())}
    assert fates == {"frozen": Why.FROZEN, "cleared": Why.CLEARED, "fine": None}


async def test_filters_choose_and_rekey_mends_a_missing_key(site: Site) -> None:
    transport = await site.open()
    keyless = codec.encode_event(entry("keyless", "c", [1], [2]))
    await publish_raw(
        transport,
        [
            OutputRecord(Topic.TOKENS, None, keyless, partition=0),
            OutputRecord(Topic.TOKENS, b"no/id", b"not even JSON", partition=1),
            OutputRecord(Topic.TOKENS, b"bad", b"not even JSON"),
            misplaced(entry("stray", "c", [1], [2])),
        ],
    )
    site.work(FREEZEPOINT_WORKER__DEAD_LETTER_RATIO_MAX="1")

    async def chosen(filters: Filters) -> list[Why | None]:
        return sorted((await site.put_back(filters, dry_run=True)).values(), key=lambda why: why or "")

    assert await chosen(Filters()) == [None, None, Why.NO_KEY, Why.NO_KEY]
    assert await chosen(Filters(reasons=frozenset({"wrong_partition"}))) == [None]
    assert await chosen(Filters(rollout_ids=frozenset({"bad", "nobody"}))) == [None]
    rekeyed = Filters(reasons=frozenset({"invalid_key"}), rekey=True)
    assert await chosen(rekeyed) == [None, Why.NO_KEY]
    outcome = site("--dead-letters", "--rekey", "--reason", "invalid_key")
    assert outcome.err == "1 dead letter was put back, 1 stays\n"
    assert set((await site.put_back(rekeyed)).values()) == {Why.ALREADY, Why.NO_KEY}
    await publish(transport, [complete("keyless", n_calls=1)])
    site.work()
    [result] = await read_results(transport)
    assert (result.rollout_id, result.mask_sample) == ("keyless", False)


async def test_letters_in_parts_go_back_whole_and_truncated_ones_stay(site: Site) -> None:
    transport = await site.cluster.with_topics(PARTITIONS, 100_000)
    site.settings = site.cluster.settings(100_000)
    await publish_raw(transport, [misplaced(entry("long", "c", list(range(60_000)), [1]))])
    await publish(transport, [entry("huge", "c", [1] * 200_000, [1])])
    limits = {"FREEZEPOINT_SQLITE__RECORD_BYTES_MAX": "100000"}
    site.work(FREEZEPOINT_WORKER__RECORD_BYTES_MAX=str(2 * OVERSIZED_KEPT_BYTES), **limits)
    assert len(await read_all(transport, Topic.DEAD_LETTERS)) > 4
    assert set((await site.put_back()).values()) == {None, Why.TRUNCATED}
    assert set((await site.put_back()).values()) == {Why.TRUNCATED, Why.ALREADY}
    await publish(transport, [complete("long", n_calls=1)])
    site.work(**limits)
    [result] = await read_results(transport)
    assert (result.rollout_id, result.mask_sample) == ("long", False)
    assert result.traces[0].token_ids.tolist() == [*range(60_000), 1]


async def test_a_value_whose_parts_are_not_all_letters_stays(site: Site) -> None:
    transport = await site.cluster.with_topics(PARTITIONS, 100_000)
    site.settings = site.cluster.settings(100_000)
    value = misplaced(entry("long", "c", list(range(60_000)), [1]))
    first, *_ = split_record(value, 90_000)
    await publish_raw(transport, [first])
    site.work(FREEZEPOINT_SQLITE__RECORD_BYTES_MAX="100000")
    assert list((await site.put_back()).values()) == [Why.PARTS]


async def test_what_cannot_be_proved_stays(tmp_path: Path, shell: Shell) -> None:
    site = Site(Cluster(f"sqlite:///{tmp_path / 'f.db'}", ""), shell)
    transport = await site.open()
    await publish_raw(
        transport, [OutputRecord(Topic.TOKENS, b"r", b"no JSON"), misplaced(entry("stray", "c", [1], [2]))]
    )
    await publish(transport, [entry("r", "c1", [1], [2]), entry("stray", "c1", [1], [2])])
    site.work()
    assert set((await site.put_back(dry_run=True)).values()) == {None}
    connection = sqlite3.connect(tmp_path / "f.db")
    connection.execute(
        "UPDATE stream SET log_start = 2 WHERE topic = (SELECT id FROM topic WHERE name = 'rollout-tokens')"
    )
    connection.execute(
        "DELETE FROM record WHERE (position & ?) < 2 AND position >> 40 IN (SELECT stream.id FROM stream JOIN topic "
        "ON topic = topic.id WHERE name = 'rollout-tokens')",
        ((1 << 40) - 1,),
    )
    connection.commit()
    connection.close()
    assert set((await site.put_back()).values()) == {Why.UNPROVED}
    await transport.close()


async def test_a_letter_that_fails_again_is_a_new_letter(site: Site) -> None:
    transport = await site.open()
    await publish_raw(transport, [OutputRecord(Topic.TOKENS, b"r", b'{"event":"nonsense"}')])
    site.work()
    assert list((await site.put_back()).values()) == [None]
    site.work()
    assert list((await site.put_back(dry_run=True)).values()) == [Why.ALREADY, None]
    found = await read_all(transport, Topic.DEAD_LETTERS)
    assert len(found) == 2
    assert [
        len([name for name, _ in letter.headers if name == headers.ERROR_OFFSET]) for letter in found
    ] == [1, 1]
    assert orjson.loads(found[0].value or b"") == {"event": "nonsense"}


async def test_the_blocks_of_replay_md(tmp_path: Path) -> None:
    environment = {"FREEZEPOINT_BROKER": f"sqlite:///{tmp_path / 'f.db'}"}
    async with connect(Settings(broker=environment["FREEZEPOINT_BROKER"])) as transport:
        await publish(transport, [*life("run7.12-0"), *life("run7.13-0")])
        count = await transport.admin().partitions(Topic.TOKENS)
        home = (partition_for(b"run7.14-0", count) + 1) % count
        stray = codec.encode_event(entry("run7.14-0", "c", [1], [2]))
        await publish_raw(transport, [OutputRecord(Topic.TOKENS, b"run7.14-0", stray, partition=home)])
    run_until_idle(environment, tmp_path / "worker.log")
    (tmp_path / "failed.txt").write_text("run7.12-0\n")
    rebuilding, putting_back = blocks_of("docs/replay.md")
    with Typist(tmp_path, environment) as typist:
        printed = []
        for command, _ in [*rebuilding.commands, *putting_back.commands]:
            typist.command(command)
            printed.append(typist.printed)
    assert [text.count('"rollout_id"') for text in printed[:2]] == [2, 1]
    assert [text.count('"put_back":true') for text in printed[4:]] == [0, 1, 0, 0]
    assert "rebuilt_response" in printed[3]
