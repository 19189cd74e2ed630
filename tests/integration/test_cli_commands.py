"""The real command: what each one does."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import signal
import sqlite3
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from freezepoint.settings import WorkerSettings
from freezepoint_schemas import codec
from freezepoint_schemas.events import InputEvent
from tests.events import complete, entry
from tests.integration.shell import TIMEOUT_S, Outcome, Shell
from tests.polling import poll_until

# --------------------------------------------------------------------------------------------- publish, run, results


def test_the_whole_way(shell: Shell, events: Path) -> None:
    published = shell.ok("publish", "--complete", str(events))
    assert published.out == b""
    assert re.fullmatch(r"published 6 records of 2 rollouts, \d+ bytes in \d+\.\d s\n", published.err)
    ran = shell.ok("run", "--until-idle")
    assert ran.out == b""
    *logged, summary = ran.err.splitlines()
    assert summary == "6 records read, 2 results published (0 masked), 0 dead letters, 0 rollouts open"
    assert all({"event", "level", "timestamp"} <= json.loads(line).keys() for line in logged)
    traces = shell.ok("results").lines
    assert sorted(trace["rollout_id"] for trace in traces) == ["a", "b"]
    assert traces[0]["traces"][0]["token_ids"] == [7, 1, 8, 2]
    packed = shell.ok("results", "--packed").lines
    assert packed[0]["traces"][0]["token_ids"]["dtype"] == "i32"
    responses = shell.ok("results", "--projection", "response").lines
    assert responses[0].keys() == {
        "rollout_id",
        "builder",
        "rebuilt_response",
        "metrics",
        "mask_sample",
        "unresolved_retries",
    }
    again = shell.ok("run", "--until-idle", "--log-level", "error")
    assert again.err == "0 records read, 0 results published (0 masked), 0 dead letters, 0 rollouts open\n"


def test_single_events_and_the_filter(shell: Shell, events: Path) -> None:
    shell.ok("publish", str(events))
    completed = shell.ok(
        *(
            "complete",
            "a",
            "--n-calls",
            "2",
            "--reward",
            '{"score": 0.5}',
            "--group-id",
            "g",
            "--group-size",
            "2",
        ),
        *("--model", "m", "--metadata", "[1]", "--builder", "prefix_merging", "--delivery", "all_traces"),
        *("--terminal-call-id", "c2", "--terminal-response-id", "r2"),
    )
    assert completed.err == "published 1 rollout_complete event\n"
    cancelled = shell.ok("cancel", "b", "none", "--reason", "crashed", "--group-id", "g", "--group-size", "2")
    assert cancelled.err == "published 2 rollout_cancelled events\n"
    shell.ok("run", "--until-idle")
    [delivered] = shell.ok("results", "--unmasked").lines
    assert delivered["rollout_id"] == "a"
    assert delivered["reward"] == {"score": 0.5}
    assert (delivered["group_id"], delivered["group_size"], delivered["metadata"]) == ("g", 2, [1])
    assert (delivered["model"], delivered["delivery"]) == ("m", "all_traces")
    masked = shell.ok("results", "--masked").lines
    assert sorted(result["rollout_id"] for result in masked) == ["b", "none"]
    assert len(shell.ok("results").lines) == 3


def test_a_clear_begins_a_rollout_anew(shell: Shell, events: Path) -> None:
    shell.ok("publish", str(events))
    shell.ok("clear", "a", "--group-id", "g", "--group-size", "2", "--metadata", '{"try": 2}')
    shell.ok("complete", "a", "--n-calls", "0")
    shell.ok("run", "--until-idle")
    [result] = shell.ok("results").lines
    assert result["reasons"] == ["no_records"]
    assert (result["group_id"], result["metadata"]) == ("g", {"try": 2})


def test_stdin_and_gzip(shell: Shell, events: Path) -> None:
    raw = events.read_bytes()
    (shell.folder / "events.gz").write_bytes(gzip.compress(raw))
    assert shell.ok("publish", "--complete", "-", stdin=raw).err.startswith(
        "published 6 records of 2 rollouts"
    )
    assert shell.ok("publish", "-", stdin=gzip.compress(raw)).err.startswith(
        "published 4 records of 2 rollouts"
    )
    assert shell.ok("publish", "events.gz", "-", stdin=b"").err.startswith(
        "published 4 records of 2 rollouts"
    )
    assert shell.ok("build", "-", stdin=raw).out == shell.ok("build", "events.gz").out


def test_bad_lines_stop_publishing_or_are_skipped(shell: Shell, events: Path) -> None:
    raw = events.read_bytes()
    (shell.folder / "bad.jsonl").write_bytes(b"{}\n" + raw)
    assert shell.wrong(2, "publish", "bad.jsonl").startswith("bad.jsonl:1: no rollout_id (the 0 records")
    (shell.folder / "late.jsonl").write_bytes(raw + b"nonsense\n")
    assert shell.wrong(2, "publish", "late.jsonl").startswith("late.jsonl:5: no JSON")
    skipped = shell("publish", "--keep-going", "--complete", "bad.jsonl")
    assert skipped.code == 2
    first, summary, withheld = skipped.err.splitlines()
    assert first == "error: bad.jsonl:1: no rollout_id"
    assert re.fullmatch(r"published 4 records of 2 rollouts, .* 1 line skipped", summary)
    assert withheld.startswith(
        "2 rollouts got no complete event: a skipped line may have been one of their calls."
    )


def test_brokers_and_prefixes_keep_things_apart(shell: Shell, events: Path) -> None:
    shell.ok("publish", "--complete", str(events), "--broker", "sqlite:///one.db", "--topic-prefix", "x.")
    where = {"FREEZEPOINT_BROKER": "sqlite:///one.db", "FREEZEPOINT_TOPIC_PREFIX": "x."}
    shell.ok("run", "--until-idle", environment=where)
    assert len(shell.ok("results", environment=where).lines) == 2
    assert "'rollout-trajectories' does not exist" in shell.wrong(
        2, "results", "--broker", "sqlite:///one.db"
    )
    assert "two.db does not exist" in shell.wrong(
        2, "results", "--broker", "sqlite:///two.db", environment=where
    )
    assert not (shell.folder / "freezepoint.db").exists()


def test_following_prints_what_comes_later_until_it_is_interrupted(shell: Shell, events: Path) -> None:
    shell.ok("topics", "apply")
    with shell.start("results", "--follow") as following:
        assert following.stdout is not None
        shell.ok("publish", "--complete", str(events))
        shell.ok("run", "--until-idle")
        lines = [json.loads(following.stdout.readline()) for _ in range(2)]
        following.send_signal(signal.SIGINT)
        _, err = following.communicate(timeout=TIMEOUT_S)
    assert sorted(line["rollout_id"] for line in lines) == ["a", "b"]
    assert (following.returncode, err) == (130, b"")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_stops_at_a_signal(shell: Shell, events: Path, how: signal.Signals) -> None:
    shell.ok("publish", "--complete", str(events))
    with shell.start("run") as running:
        poll_until(lambda: len(shell.ok("results").lines) == 2, TIMEOUT_S, "both results are published")
        running.send_signal(how)
        out, err = running.communicate(timeout=TIMEOUT_S)
    assert (running.returncode, out) == (0, b"")
    assert "2 results published" in err.decode().splitlines()[-1]


# ----------------------------------------------------------------------------------------------------------- archives

READS = {
    "results": ("results", "--projection", "response"),
    "report": ("report",),
    "inspect": ("inspect", "a", "--json"),
    "replay": ("replay", "--all"),
}
"""What each reading command is asked for."""


@pytest.fixture
def archive() -> Iterator[Shell]:
    """A shell in a folder that any user may look into."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Shell(Path(folder))


def without_rights(shell: Shell, *arguments: str, environment: Mapping[str, str] | None = None) -> Outcome:
    """The command run by a user who may not write here."""
    program = """
import concurrent.futures.thread, os, pkgutil, sys
import freezepoint
from freezepoint.cli.commands import run_command
from freezepoint.cli.start import quiet_logs
for module in pkgutil.walk_packages(freezepoint.__path__, "freezepoint."):  # not readable by anybody, maybe
    if not module.name.endswith(("__main__", "otel")):
        __import__(module.name)
quiet_logs()
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
sys.exit(run_command())
"""
    return shell.program(program, *arguments, environment=environment)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    for path in folder.iterdir():
        path.chmod(0o555)
    folder.chmod(0o555)
    try:
        yield
    finally:
        folder.chmod(0o755)


def finished(shell: Shell) -> None:
    calls: list[InputEvent] = [
        entry("a", "c1", [7], [1]),
        complete("a"),
        entry("b", "c1", [7], [2]),
        complete("b"),
    ]
    events = b"".join(codec.encode_event(call) + b"\n" for call in calls)
    shell.ok("publish", "-", stdin=events)
    shell.ok("run", "--until-idle")


@pytest.mark.parametrize("command", READS)
def test_an_archive_is_read_where_it_may_not_be_written(archive: Shell, command: str) -> None:
    finished(archive)
    before = archive.ok(*READS[command])
    files = sorted(archive.folder.iterdir())
    with read_only(archive.folder):
        after = without_rights(archive, *READS[command])
        assert (after.code, after.out) == (0, before.out), after.err
        refused = without_rights(archive, "complete", "c")
        assert (refused.code, refused.err.count("\n")) == (2, 1)
        assert "must be writable" in refused.err
    assert sorted(archive.folder.iterdir()) == files


@pytest.mark.parametrize("left", ["log", "log and its index"])
def test_an_archive_with_a_log_that_was_never_moved_in(archive: Shell, left: str) -> None:
    """As it lies there after its last writer was killed: the log is read with its index, and told where that is missing."""
    finished(archive)
    reading = sqlite3.connect(archive.folder / "freezepoint.db")
    reading.execute("SELECT 1 FROM topic").fetchone()
    archive.ok("complete", "late")
    (archive.folder / "copy").mkdir()
    for path in archive.folder.glob("freezepoint.db*"):
        if left != "log" or not path.name.endswith("-shm"):
            shutil.copy(path, archive.folder / "copy")
    reading.close()
    copied = Shell(archive.folder / "copy")
    with read_only(copied.folder):
        outcome = without_rights(copied, "inspect", "late")
    if left == "log":
        assert outcome.code == 2
        assert "copy freezepoint.db and freezepoint.db-wal to a folder of your own" in outcome.err
        assert outcome.err.count("\n") == 1
    assert "no_records" in (copied.ok("inspect", "late").out if left == "log" else outcome.out).decode()


# ----------------------------------------------------------------------------------------------------------- folders

FOLDERS = {
    "FREEZEPOINT_WORKER__SPOOL_FOLDER": "cannot spool to",
    "FREEZEPOINT_WORKER__EVIDENCE_DIR": "cannot keep evidence in",
}
"""Every setting that is a folder, and how it is refused."""


def test_these_are_all_folders() -> None:
    named = {
        f"FREEZEPOINT_WORKER__{name}".upper()
        for name in WorkerSettings.model_fields
        if name.endswith(("_folder", "_dir"))
    }
    assert named == FOLDERS.keys()


@pytest.mark.parametrize("setting", FOLDERS)
@pytest.mark.parametrize("folder", ["missing/x", "file", "file/x"])
def test_a_folder_that_cannot_be_used_is_found_at_the_start(shell: Shell, setting: str, folder: str) -> None:
    """Before the broker is looked for, which is none."""
    (shell.folder / "file").touch()
    environment = {setting: folder, "FREEZEPOINT_BROKER": "kafka://127.0.0.1:1"}
    outcome = shell("run", environment=environment)
    assert outcome.code == 2
    assert f"error: {FOLDERS[setting]} {folder}: " in outcome.err.splitlines()[-1]
    assert [path.name for path in shell.folder.iterdir()] == ["file"]


@pytest.mark.parametrize("setting", FOLDERS)
def test_a_folder_that_may_not_be_written_is_found_at_the_start(archive: Shell, setting: str) -> None:
    (archive.folder / "mine").mkdir(mode=0o755)
    with read_only(archive.folder):
        outcome = without_rights(archive, "run", environment={setting: "mine"})
    assert outcome.code == 2
    assert f"error: {FOLDERS[setting]} mine: Permission denied" in outcome.err.splitlines()[-1]


# ------------------------------------------------------------------------------------------------------------ topics


def test_topics(shell: Shell) -> None:
    applied = shell.ok("topics", "apply", "--partitions", "3").out.decode().splitlines()
    assert [line.split(":")[0].split() for line in applied] == [
        ["ok", "rollout-tokens"],
        ["ok", "rollout-trajectories"],
        ["ok", "rollout-ledger"],
        ["ok", "rollout-dead-letters"],
    ]
    assert shell.ok("topics", "check").out.count(b"ok ") == 4
    wrong = shell("topics", "check", "--partitions", "5")
    assert wrong.code == 1
    assert wrong.out.startswith(b"FAIL rollout-tokens: ")


# ------------------------------------------------------------------------------------------------------------- build


def test_build_from_files_and_a_capture_folder(shell: Shell, events: Path) -> None:
    built = shell.ok("build", "--model", "m", str(events))
    assert [line["rollout_id"] for line in built.lines] == ["a", "b"]
    assert built.lines[0]["model"] == "m"
    capture = shell.folder / "capture"
    capture.mkdir()
    for rollout_id in ("b", "a"):
        lines = [
            line
            for line in events.read_bytes().splitlines()
            if f'"rollout_id":"{rollout_id}"'.encode() in line
        ]
        (capture / f"{rollout_id}.tokens.jsonl").write_bytes(b"\n".join(lines))
    from_folder = shell.ok("build", "--projection", "response", "capture")
    assert from_folder.lines == shell.ok("build", "--projection", "response", str(events)).lines
    assert not (shell.folder / "freezepoint.db").exists()


def test_build_reports_bad_lines_and_builds_the_rest(shell: Shell, events: Path) -> None:
    unusable = b'{"rollout_id":"b","event":"token_entry"}'
    (shell.folder / "x").write_bytes(events.read_bytes() + b"nonsense\n" + unusable + b"\n")
    outcome = shell("build", "x")
    assert outcome.code == 2
    assert [(line["rollout_id"], line["reasons"]) for line in outcome.lines] == [
        ("a", ["capture_incomplete"]),  # nobody completed it, and the line may have been a call of it
        ("b", ["capture_incomplete", "invalid_entry"]),
    ]
    error, warning = outcome.err.splitlines()
    assert error.startswith("error: x:5: no JSON")
    assert warning.startswith("warning: x:6: rollout b: invalid_entry: ")


def test_build_and_the_worker_agree(shell: Shell) -> None:
    shell.ok(
        "simulate", "--rollouts", "60", "--seed", "3", "--out", "events.jsonl.gz", "--truth", "truth.jsonl"
    )
    shell.ok("publish", "events.jsonl.gz")
    shell.ok("run", "--until-idle")

    def comparable(outcome: Outcome) -> dict[str, dict[str, Any]]:
        for line in outcome.lines:
            line["snapshot"] = line["snapshot"]["id"]
        return {line["rollout_id"]: {**line, "snapshot": line["snapshot"]["id"]} for line in outcome.lines}

    built = comparable(shell.ok("build", "events.jsonl.gz"))
    assert built == comparable(shell.ok("results"))
    truths = [json.loads(line) for line in (shell.folder / "truth.jsonl").read_text().splitlines()]
    assert len(truths) == len(built) == 60
    for truth in truths:
        result = built[truth["rollout_id"]]
        assert (result["mask_sample"], result.get("reasons", [])) == (truth["mask_sample"], truth["reasons"])


# --------------------------------------------------------------------------------------------------- simulate, demo


def test_simulate_is_deterministic_and_writes_either_way(shell: Shell) -> None:
    options = ("--rollouts", "20", "--seed", "5", "--turns", "2-4")
    shell.ok("simulate", *options, "--out", "a.jsonl", "--truth", "a.truth")
    shell.ok("simulate", *options, "--out", "b.jsonl.gz", "--truth", "b.truth", "--wire", "packed")
    json_lines = (shell.folder / "a.jsonl").read_bytes().splitlines()
    packed_lines = gzip.decompress((shell.folder / "b.jsonl.gz").read_bytes()).splitlines()
    assert (shell.folder / "a.truth").read_bytes() == (shell.folder / "b.truth").read_bytes()
    for plain, packed in zip(json_lines, packed_lines, strict=True):
        rollout_id = json.loads(plain)["rollout_id"]
        decoded = codec.decode_event(rollout_id, packed)
        assert codec.encode_event(decoded) == plain
    published = shell.ok("simulate", *options)
    assert published.err.startswith(f"published {len(json_lines)} records of 20 rollouts")


def test_simulate_keeps_its_rate(shell: Shell) -> None:
    published = shell.ok("simulate", "--rollouts", "4", "--turns", "5", "--rate", "40")
    seconds = re.search(r"in (\d+\.\d) s", published.err)
    assert seconds is not None
    assert float(seconds[1]) >= 0.4


def test_demo(shell: Shell) -> None:
    demo = shell.ok("demo", "--rollouts", "12", "--seed", "3", environment={"TMPDIR": str(shell.folder)})
    text = demo.out.decode()
    assert demo.err == ""
    assert len(re.findall(r"agent\d\.\d+-\d", text)) == 12
    assert re.search(r"12 rollouts, one result each: .* all as they should be, in \d+\.\d s", text)
    assert list(shell.folder.iterdir()) == []


def test_demo_on_a_broker_of_ones_own(shell: Shell) -> None:
    demo = shell.ok("demo", "--broker", "sqlite:///own.db")
    assert "all as they should be" in demo.out.decode()
    assert re.match(r"topics demo-[0-9a-f]+\.\* are created on sqlite:///own\.db and stay there", demo.err)


def test_demo_on_kafka(shell: Shell, kafka_bootstrap: str) -> None:
    demo = shell.ok("demo", "--broker", f"kafka://{kafka_bootstrap}")
    assert "all as they should be" in demo.out.decode()
    assert len(demo.err.splitlines()) == 1


def test_topics_on_kafka(shell: Shell, kafka_bootstrap: str, unique_prefix: str) -> None:
    where = ("--broker", f"kafka://{kafka_bootstrap}", "--topic-prefix", f"{unique_prefix}.")
    missing = shell("topics", "check", *where)
    assert missing.code == 1
    assert missing.out.count(b"FAIL ") == 4
    assert "does not exist" in shell.wrong(2, "complete", "a", *where)
    shell.ok("topics", "apply", "--partitions", "2", *where)
    assert shell.ok("topics", "check", *where).out.count(b"ok ") == 4
    shell.ok("complete", "a", *where)


# ----------------------------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    "command",
    [
        "run --until-idle --log-level debug",
        "doctor",
        "doctor --json",
        "replay --all",
        "replay --dead-letters",
        "results",
    ],
)
def test_no_command_tells_a_secret(shell: Shell, command: str) -> None:
    """Not even where it cannot connect, which is when messages tell most."""
    secrets = {
        "FREEZEPOINT_BROKER": "kafka://127.0.0.1:9",
        "FREEZEPOINT_KAFKA__REQUEST_TIMEOUT_MS": "1000",
        "FREEZEPOINT_KAFKA__SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "FREEZEPOINT_KAFKA__SASL_USERNAME": "alice",
        "FREEZEPOINT_KAFKA__SASL_PASSWORD": "geheim",
        "FREEZEPOINT_KAFKA__SSL_KEY_PASSWORD": "geheim",
    }
    outcome = shell(*command.split(), environment=secrets)
    assert outcome.code == 1
    assert "127.0.0.1:9" in outcome.err + outcome.out.decode()
    assert "geheim" not in outcome.err + outcome.out.decode()


@pytest.mark.parametrize("command", ["run --until-idle --log-level debug", "doctor", "results", "config"])
@pytest.mark.parametrize("source", ["file", "endpoint"])
def test_no_command_tells_a_token_or_what_it_is_bought_with(shell: Shell, command: str, source: str) -> None:
    (shell.folder / "token").write_text("geheim")
    given = {
        "file": {"SASL_OAUTH_TOKEN_FILE": "token"},
        "endpoint": {
            "SASL_OAUTH_TOKEN_URL": "http://127.0.0.1:9/token",
            "SASL_OAUTH_CLIENT_ID": "worker",
            "SASL_OAUTH_CLIENT_SECRET": "geheim",
        },
    }[source]
    environment = {f"FREEZEPOINT_KAFKA__{name}": value for name, value in given.items()}
    outcome = shell(
        *command.split(),
        environment=environment
        | {
            "FREEZEPOINT_BROKER": "kafka://127.0.0.1:9",
            "FREEZEPOINT_KAFKA__REQUEST_TIMEOUT_MS": "1000",
            "FREEZEPOINT_KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
            "FREEZEPOINT_KAFKA__SASL_MECHANISM": "OAUTHBEARER",
        },
    )
    told = outcome.err + outcome.out.decode()
    assert outcome.code == (0 if command == "config" else 1), told
    assert "127.0.0.1:9" in told
    assert "geheim" not in told


# ------------------------------------------------------------------------------------------------------------ config


def test_config_is_a_file_that_can_be_named(shell: Shell) -> None:
    secret = {"FREEZEPOINT_KAFKA__SASL_PASSWORD": "geheim", "FREEZEPOINT_WORKER__GROUP": 'g "1" ü'}
    printed = shell.ok("config", "--broker", "kafka://b:9092", environment=secret)
    assert b"geheim" not in printed.out
    settings = tomllib.loads(printed.out.decode())
    assert settings["broker"] == "kafka://b:9092"
    assert settings["worker"]["group"] == 'g "1" ü'
    assert b"\n# sasl_password = (set, hidden)\n" in printed.out
    assert b"\n# sasl_oauth_client_secret =\n" in printed.out
    (shell.folder / "fp.toml").write_bytes(printed.out)
    again = shell.ok("config", environment={"FREEZEPOINT_CONFIG": "fp.toml"})
    assert again.out == printed.out.replace(b" (set, hidden)", b"")
    as_json = shell.ok("config", "--json", environment=secret)
    assert b"geheim" not in as_json.out
    assert json.loads(as_json.out)["kafka"]["sasl_password"] == "(set, hidden)"


def test_the_delivery_per_request_is_accepted_wherever_one_is_named(shell: Shell) -> None:
    """A complete event, the worker's setting and option, build and inspect."""
    fork = [
        entry("fork", "m", [1, 2], [3]),
        entry("fork", "x", [1, 2, 3, 4], [5]),
        entry("fork", "y", [1, 2, 3, 9], [6]),
    ]
    log = shell.folder / "log.jsonl"
    log.write_bytes(b"".join(codec.encode_event(event) + b"\n" for event in fork))
    [built] = shell.ok("build", "log.jsonl", "--delivery", "per_request").lines
    assert (built["mask_sample"], len(built["traces"])) == (False, 3)
    assert (
        "trainable"
        in shell.ok("inspect", "fork", "--file", "log.jsonl", "--delivery", "per_request").out.decode()
    )
    set_by = {"FREEZEPOINT_WORKER__DELIVERY": "per_request"}
    for database, option, environment in (
        ("event", (), {}),
        ("option", ("--delivery", "per_request"), {}),
        ("set", (), set_by),
    ):
        broker = {**environment, "FREEZEPOINT_BROKER": f"sqlite:///{database}.db"}
        shell.ok("publish", "log.jsonl", environment=broker)
        named = ("--delivery", "per_request") if database == "event" else ()
        shell.ok("complete", "fork", *named, environment=broker)
        shell.ok("run", "--until-idle", *option, environment=broker)
        [result] = shell.ok("results", environment=broker).lines
        assert (result["builder"], result["delivery"], len(result["traces"])) == (
            "per_request",
            "all_traces",
            3,
        )
