"""``doctor`` as a command, on both transports: what is in order, and each thing that may not be."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from freezepoint.transport.kafka import KafkaTransport
from freezepoint.transport.sqlite import examine as sqlite_examine
from freezepoint_schemas import codec
from freezepoint_schemas.topics import Topic, TopicNames
from kafka_local import LocalKafka, _free_port
from tests.events import complete, entry
from tests.integration.kafka_kit import SETTINGS
from tests.integration.shell import Outcome, Shell

INIT_PRODUCER_ID = 22


class Patient:
    """A broker with one test's topics, and the command that examines it."""

    def __init__(self, shell: Shell, environment: dict[str, str]) -> None:
        self.shell = shell
        self.environment = environment
        self.tokens = environment.get("FREEZEPOINT_TOPIC_PREFIX", "") + "rollout-tokens"

    def __call__(self, *arguments: str, **more: str) -> Outcome:
        return self.shell(*arguments, environment={**self.environment, **more})

    def examined(self, *options: str, code: int = 0, **more: str) -> dict[str, dict[str, Any]]:
        """The checks by their subjects."""
        outcome = self("doctor", "--json", *options, **more)
        assert outcome.code == code, (outcome.out, outcome.err)
        body = orjson.loads(outcome.out)
        assert body["ok"] == (code == 0)
        assert all(check["verdict"] == "ok" or check["mend"] for check in body["checks"]), body
        return {check["subject"]: check for check in body["checks"]}

    def work(self) -> None:
        """Topics of one partition, one rollout done and one open."""
        self.ok("topics", "apply", "--partitions", "1")
        self.publish(entry("a", "c", [1], [2]), complete("a"), entry("b", "c", [1], [2]))
        self.ok("run", "--until-idle")

    def ok(self, *arguments: str) -> None:
        self.shell.ok(*arguments, environment=self.environment)

    def publish(self, *events: Any) -> None:
        log = self.shell.folder / "log.jsonl"
        log.write_bytes(b"".join(codec.encode_event(event) + b"\n" for event in events))
        self.ok("publish", str(log))


@pytest.fixture
def sqlite(shell: Shell) -> Patient:
    return Patient(shell, {"FREEZEPOINT_BROKER": "sqlite:///f.db"})


@pytest.fixture
def kafka(shell: Shell, kafka_bootstrap: str, unique_prefix: str) -> Patient:
    return Patient(
        shell,
        {
            "FREEZEPOINT_BROKER": f"kafka://{kafka_bootstrap}",
            "FREEZEPOINT_TOPIC_PREFIX": f"{unique_prefix}-",
            "FREEZEPOINT_WORKER__GROUP": unique_prefix,
            "FREEZEPOINT_KAFKA__SESSION_TIMEOUT_MS": "6000",
        },
    )


@pytest.fixture(params=["sqlite", "kafka"])
def patient(request: pytest.FixtureRequest) -> Patient:
    found: Patient = request.getfixturevalue(request.param)
    return found


def wrong(checks: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {subject: check["verdict"] for subject, check in checks.items() if check["verdict"] != "ok"}


# ------------------------------------------------------------------------------------------------------------ both


def test_a_healthy_set_up_is_all_ok(patient: Patient) -> None:
    patient.work()
    checks = patient.examined("--probe-clock")
    assert wrong(checks) == {}
    messages = {check["message"] for check in checks.values()}
    assert "1 partition readable; 2 rollouts known, 1 of them open" in messages
    assert checks[f"lag on {patient.tokens}"]["message"] == "everything is applied"
    assert "differs from ours by" in checks["clock (measured)"]["message"]
    again = patient.examined()
    assert again[f"lag on {patient.tokens}"]["message"] == "everything is applied"  # the probe left nothing


def test_the_worker_passes_over_a_probe(patient: Patient) -> None:
    patient.ok("topics", "apply", "--partitions", "1")
    patient.examined("--probe-clock")
    patient.publish(entry("a", "c", [1], [2]), complete("a"))
    ran = patient("run", "--until-idle")
    assert "2 records read, 1 result published (0 masked), 0 dead letters" in ran.err


def test_another_groups_ledger_fails_as_it_would_at_a_start(patient: Patient) -> None:
    patient.work()
    checks = patient.examined(code=1, FREEZEPOINT_WORKER__GROUP="others")
    [(subject, verdict)] = wrong(checks).items()
    assert subject.endswith("rollout-ledger[0]")
    assert verdict == "fail"
    assert "one ledger serves one group" in checks[subject]["message"]


def test_records_that_nobody_applied_are_a_lag(patient: Patient) -> None:
    patient.work()
    patient.publish(entry("c", "c", [1], [2]))
    checks = patient.examined()
    assert wrong(checks) == {}
    message = checks[f"lag on {patient.tokens}"]["message"]
    assert message.startswith("1 record in 1 partition is not applied, the oldest is ")


def test_short_retention_and_a_missing_spool_folder(patient: Patient) -> None:
    patient.ok("topics", "apply", "--partitions", "1")
    more = {
        "FREEZEPOINT_WORKER__ROLLOUT_TIMEOUT_S": str(8 * 24 * 3600),
        "FREEZEPOINT_WORKER__SPOOL_FOLDER": "nowhere",
    }
    checks = patient.examined(code=1, **more)
    assert wrong(checks) == {"spool": "fail", "retention": "warn"}
    assert checks["spool"]["mend"] == "mkdir -p nowhere"


# ---------------------------------------------------------------------------------------------------------- SQLite


def test_a_file_that_is_not_there_is_fine_and_not_made(sqlite: Patient) -> None:
    checks = sqlite.examined()
    assert "not there yet" in checks["connection"]["message"]
    assert list(sqlite.shell.folder.iterdir()) == []


def test_a_folder_that_is_not_there_fails(sqlite: Patient) -> None:
    checks = sqlite.examined(code=1, FREEZEPOINT_BROKER="sqlite:///nowhere/f.db")
    assert "no writable folder" in checks["connection"]["message"]
    assert "mkdir -p" in checks["connection"]["mend"]


def test_somebody_elses_file_fails_and_stays_as_it_is(sqlite: Patient) -> None:
    theirs = sqlite.shell.folder / "f.db"
    theirs.write_bytes(b"no database at all" * 100)
    assert "no freezepoint database" in sqlite.examined(code=1)["connection"]["message"]
    assert theirs.read_bytes() == b"no database at all" * 100


def test_lines_for_people_name_what_mends(sqlite: Patient) -> None:
    sqlite.ok("topics", "apply")
    outcome = sqlite("doctor", FREEZEPOINT_SQLITE__SYNCHRONOUS="NORMAL")
    assert outcome.code == 0
    lines = outcome.out.decode().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("warn durability: "))
    assert lines[at + 1] == "     mend: export FREEZEPOINT_SQLITE__SYNCHRONOUS=FULL"
    assert all(line.startswith(("ok   ", "warn ", "     mend: ")) for line in lines)


def _stamp_the_last(path: Path, shift_ms: int) -> None:
    connection = sqlite3.connect(path)
    connection.execute(
        "UPDATE record SET timestamp_ms = timestamp_ms + ? WHERE position = "
        "(SELECT max(position) FROM record JOIN stream ON position >> 40 = stream.id JOIN topic ON topic = topic.id "
        "WHERE name = 'rollout-tokens')",
        (shift_ms,),
    )
    connection.commit()
    connection.close()


def test_an_old_lag_and_a_clock_that_is_ahead_are_warnings(sqlite: Patient) -> None:
    sqlite.work()
    sqlite.publish(entry("c", "c", [1], [2]))
    _stamp_the_last(sqlite.shell.folder / "f.db", -600_000)
    checks = sqlite.examined()
    assert wrong(checks) == {f"lag on {sqlite.tokens}": "warn"}
    assert "freezepoint run" in checks[f"lag on {sqlite.tokens}"]["mend"]
    _stamp_the_last(sqlite.shell.folder / "f.db", 4_200_000)
    checks = sqlite.examined()
    assert wrong(checks) == {"clock (by records)": "warn"}
    assert "ahead of" in checks["clock (by records)"]["message"]


def test_a_full_disk_and_a_log_that_only_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, verdict in ((2**40, "ok"), (2**29, "warn"), (2**20, "fail")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert sqlite_examine._room(tmp_path / "f.db").verdict == verdict
    for size, verdict in ((0, "ok"), (2**20, "ok"), (2**30, "warn")):
        with (tmp_path / "f.db-wal").open("wb") as wal:
            wal.truncate(size)
        assert sqlite_examine._wal(tmp_path / "f.db").verdict == verdict


# ----------------------------------------------------------------------------------------------------------- Kafka


def test_a_broker_that_does_not_answer_is_the_only_check(kafka: Patient) -> None:
    checks = kafka.examined(
        code=1,
        FREEZEPOINT_BROKER=f"kafka://127.0.0.1:{_free_port()}",
        FREEZEPOINT_KAFKA__REQUEST_TIMEOUT_MS="1000",
    )
    assert checks.keys() == {"connection", "spool"}
    assert wrong(checks) == {"connection": "fail"}


def test_missing_topics_fail_with_the_command_that_makes_them(kafka: Patient) -> None:
    checks = kafka.examined(code=1)
    assert wrong(checks) == {"topics": "fail"}
    assert checks["topics"]["mend"] == "freezepoint topics apply"


async def test_a_configuration_that_spoils_fails_and_another_warns(
    kafka: Patient, kafka_bootstrap: str
) -> None:
    await asyncio.to_thread(kafka.ok, "topics", "apply", "--partitions", "1")
    names = TopicNames(kafka.environment["FREEZEPOINT_TOPIC_PREFIX"])
    async with KafkaTransport(kafka_bootstrap, names, SETTINGS) as made:
        admin = made.admin()
        await admin._set(names[Topic.TOKENS], {"cleanup.policy": "compact"})
        await admin._set(names[Topic.TRAJECTORIES], {"retention.ms": "1000"})
    checks = await asyncio.to_thread(kafka.examined, code=1)
    assert wrong(checks) == {names[Topic.TOKENS]: "fail", names[Topic.TRAJECTORIES]: "warn"}


@asynccontextmanager
async def older(port: int, target_port: int) -> AsyncIterator[None]:
    """In front of a broker: it says of it that it knows no transactional producers, as one before Kafka 0.11 would."""

    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", target_port)
        asking = asyncio.create_task(_pass_on(reader, to_writer))
        try:
            size = int.from_bytes(await to_reader.readexactly(4), "big")
            answer = _without(await to_reader.readexactly(size), INIT_PRODUCER_ID)
            writer.write(len(answer).to_bytes(4, "big") + answer)
            await _pass_on(to_reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # a connection that ends is no news
        finally:
            asking.cancel()
            writer.transport.abort()
            to_writer.transport.abort()
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(set(tasks))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(65_536):
        writer.write(chunk)
        await writer.drain()


def _without(answer: bytes, api_key: int) -> bytes:
    """An ApiVersions answer (correlation id, error, then an array of key, oldest and newest version) less one key."""
    head, rest = answer[:6], answer[6:]
    (count,) = struct.unpack_from(">i", rest)
    entries = [rest[4 + 6 * number : 10 + 6 * number] for number in range(count)]
    kept = [found for found in entries if struct.unpack_from(">h", found)[0] != api_key]
    assert len(kept) == count - 1
    return head + struct.pack(">i", len(kept)) + b"".join(kept) + rest[4 + 6 * count :]


@pytest.mark.slow
async def test_a_broker_that_is_too_old_is_refused_by_name(
    kafka_jars: Path, shell: Shell, unique_prefix: str
) -> None:
    plain, behind, shown, controller = (_free_port() for _ in range(4))
    listeners = f"PLAINTEXT://127.0.0.1:{plain},OLD://127.0.0.1:{behind}"
    properties = {
        "listeners": f"{listeners},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{plain},OLD://127.0.0.1:{shown}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,OLD:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
    }
    old = Patient(
        shell,
        {
            "FREEZEPOINT_BROKER": f"kafka://127.0.0.1:{shown}",
            "FREEZEPOINT_TOPIC_PREFIX": unique_prefix,
            "FREEZEPOINT_KAFKA__REQUEST_TIMEOUT_MS": "10000",
        },
    )
    with LocalKafka(port=plain, extra_properties=properties):
        async with older(shown, behind):
            checks = await asyncio.to_thread(old.examined, code=1)
            refused = await asyncio.to_thread(old, "run")
    assert wrong(checks) == {"connection": "fail"}
    assert "is too old: it lacks idempotent and transactional producers" in checks["connection"]["message"]
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "Update it to Apache Kafka 2.4 or newer" in refused.err
