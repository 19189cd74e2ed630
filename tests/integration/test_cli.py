"""The real command: help, wrong usage, and how it ends when it cannot go on."""

from __future__ import annotations

import contextlib
import gc
import os
import pty
import re
import shlex
import signal
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from freezepoint import __version__
from freezepoint.cli.commands import COMMANDS as LISTED
from freezepoint.cli.commands import command_of
from freezepoint.errors import ConfigurationError
from freezepoint.origins import OTHER_VARIABLES
from freezepoint.reader import TrajectoryReader
from freezepoint.sink import TokenSink
from freezepoint.source import TokenSource
from tests.integration.shell import COMMAND, TIMEOUT_S, Shell
from tests.polling import poll_until

COMMANDS = [
    "demo",
    "simulate",
    "publish",
    "complete",
    "cancel",
    "clear",
    "run",
    "topics",
    "topics apply",
    "topics check",
    "results",
    "inspect",
    "report",
    "build",
    "doctor",
    "replay",
    "schema",
    "schema export",
    "config",
]
READING = {"results", "report", "replay"}
"""Commands whose examples read what has to be there."""


# -------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_there_and_its_example_works(shell: Shell, events: Path, command: str) -> None:
    helped = shell.ok(*command.split(), "--help")
    text = helped.out.decode()
    assert not helped.err
    example = re.search(r"Example: freezepoint (.*)", text)
    assert example is not None, text
    assert example[1].split()[: len(command.split())] == command.split() or not command
    if command in READING:
        shell.ok("topics", "apply")
    assert shell(*shlex.split(example[1])).code == 0


def test_version(shell: Shell) -> None:
    assert shell.ok("--version").out.decode() == f"freezepoint {__version__}\n"


def test_without_a_command_the_help_is_shown(shell: Shell) -> None:
    outcome = shell()
    assert outcome.code == 2
    assert "Usage: freezepoint" in outcome.out.decode() + outcome.err
    assert "error" not in outcome.err


def test_the_list_of_commands_says_what_their_own_help_says() -> None:
    before = structlog.get_config()
    structlog.configure(cache_logger_on_first_use=not before["cache_logger_on_first_use"])
    kept = structlog.get_config()
    for name, (_, summary) in LISTED.items():
        assert command_of(name).help.partition("\n")[0] == summary
    # To look a command up is not to run it: who embeds us keeps their logs, and their garbage.
    assert structlog.get_config() == kept
    assert gc.get_freeze_count() == 0
    structlog.configure(**before)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["publish", "--help"], ["nonsense"]])
def test_what_does_no_work_imports_little(shell: Shell, arguments: list[str]) -> None:
    program = (
        "import sys, freezepoint.cli\n"
        "try: freezepoint.cli.main()\n"
        "finally: print([m for m in sys.modules if m.split('.')[0] in {'numpy', 'asyncio', 'pydantic_settings',"
        " 'freezepoint_schemas.events', 'structlog'}])"
    )
    assert shell.program(program, *arguments).out.endswith(b"[]\n")


RICH = {"rich", "pygments", "markdown_it"}
WORK = {"numpy", "freezepoint_schemas.events"}


@pytest.mark.parametrize(
    ("arguments", "unused"),
    [
        (["config"], RICH | WORK),
        (["topics", "check"], RICH),
        (["publish", "--complete", "events.jsonl"], RICH),
        (["run", "--until-idle"], RICH),
        (["results"], RICH),
        (["report"], RICH),
        (["inspect", "a", "--file", "events.jsonl"], RICH),
        (["build", "events.jsonl"], RICH),
        (["doctor"], RICH),
        (["clear", "a"], RICH),
        (["replay", "--all"], RICH),
        (["schema", "export"], RICH),
        (["simulate", "--rollouts", "1"], RICH),
    ],
)
def test_what_shows_no_colours_imports_none(
    shell: Shell, events: Path, arguments: list[str], unused: set[str]
) -> None:
    """And what computes nothing imports nothing to compute with."""
    shell.ok("topics", "apply")
    program = (
        "import sys, freezepoint.cli\n"
        "try: freezepoint.cli.main()\n"
        "finally: print(*(name for name, module in sys.modules.items() if module is not None), file=sys.stderr)"
    )
    imported = set(shell.program(program, *arguments).err.splitlines()[-1].split())
    assert {
        "typer",
        "freezepoint.settings" if "schema" not in arguments else "freezepoint.cli.schema",
    } <= imported
    assert not imported & unused


@pytest.mark.parametrize("threads", [None, "3"])
def test_modules_are_no_garbage_and_nobody_multiplies_matrices(
    shell: Shell, events: Path, threads: str | None
) -> None:
    program = (
        "import gc, os, freezepoint.cli\n"
        "try: freezepoint.cli.main()\n"
        "finally: print(gc.isenabled(), gc.get_freeze_count() > 50_000, os.environ['OPENBLAS_NUM_THREADS'])"
    )
    environment = {} if threads is None else {"OPENBLAS_NUM_THREADS": threads}
    told = shell.program(program, "build", "events.jsonl", environment=environment).out.splitlines()[-1]
    assert told.decode() == f"True True {threads or 1}"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["demo", "--rollouts", "1"], "┏━"),
        (["run", "--until-idle"], "\x1b[1massigned"),
        (["run", "--help"], "╭─"),
    ],
)
def test_a_terminal_has_colours(shell: Shell, arguments: list[str], shown: str) -> None:
    shell.ok("topics", "apply")
    environment = {**shell.environment(), "TERM": "xterm-256color"}
    del environment["NO_COLOR"]
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb") as terminal:
        with subprocess.Popen(
            [*COMMAND, *arguments], cwd=shell.folder, env=environment, stdout=theirs, stderr=theirs
        ) as process:
            os.close(theirs)
            seen = b"".join(_until_closed(terminal.fileno())).decode()
        assert process.returncode == 0
    assert shown in seen
    assert "\x1b[" in seen


def _until_closed(terminal: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # EIO: the other side has closed it
        while some := os.read(terminal, 1 << 16):
            yield some


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command"),
        (["publish"], "Missing argument"),
        (["publish", "nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
        (["publish", "."], ". is a directory; name its files, such as *.jsonl"),
        (["report", "--file", "."], ". is a directory; name its files, such as *.jsonl"),
        (
            ["publish", "misspelt.jsonl", "folder"],
            "folder is a directory; name its files, such as folder/*.jsonl",
        ),
        (["build", "nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
        (["build", "."], "no *.tokens.jsonl in this directory"),
        (
            ["build", "--builder", "best", "x"],
            "unknown builder 'best'; there are prefix_merging, per_request",
        ),
        (
            ["run", "--delivery", "some"],
            "unknown delivery 'some'; there are single_response, all_traces, per_request",
        ),
        (["run", "--group"], "requires an argument"),
        (["complete", "no/id"], "'no/id' is no valid rollout id"),
        (["complete", "a", "--reward", "much"], "--reward: 'much' is no JSON"),
        (["complete", "a", "--group-size", "0"], "group_size: Input should be greater than or equal to 1"),
        (["cancel"], "Missing argument"),
        (["simulate", "--retry", "2"], "--retry: Input should be less than or equal to 1"),
        (["simulate", "--turns", "many"], "--turns: 'many' is neither a number nor MIN-MAX"),
        (["simulate", "--turns", "5-2"], "turns: 5 is above 2"),
        (["simulate", "--run", "a b"], "run must begin with a letter or digit"),
        (["simulate", "--out", "no/where"], "no/where: No such file or directory"),
        (["topics", "apply", "--partitions", "0"], "--partitions"),
        (["results", "--broker", "redis://x"], "is neither kafka://host:port"),
        (["complete", "a", "--broker", "sqlite:////no/where/x.db"], "create it, or set --broker"),
        (["results", "--broker", "sqlite:////no/where/x.db"], "/no/where/x.db does not exist"),
        (["results", "--broker", "kafka://h:99999"], "'h:99999' is no host:port"),
        (["run", "--broker", "kafka://h:0"], "'h:0' is no host:port"),
        (["run", "--broker", "kafka://h:9092,"], "'' is no host:port"),
        (["run", "--broker", "kafka://h:9092,b:x"], "'b:x' is no host:port"),
        (["run", "--broker", "kafka://h:9092/topic"], "'h:9092/topic' is no host:port"),
        (["run", "--broker", "kafka://::1:9092"], "'::1:9092' is no host:port"),
        (["run", "--broker", "kafka://a..b:9092"], "'a..b:9092' is no host:port"),
        (
            ["run", "--broker", "kafka://u:p@h:9092"],
            "broker: there is no place for credentials in it: write kafka",
        ),
        (["topics", "apply", "--topic-prefix", "bad prefix/"], "'bad prefix/' cannot begin a topic's name"),
        (["topics", "apply", "--topic-prefix", "x" * 201], "cannot begin a topic's name"),
        (["replay", "--all", "--to-prefix", "a b"], "'a b' cannot begin a topic's name"),
        (["run", "--group", ""], "--group is empty: name a consumer group"),
        (["build", "numbers.jsonl"], "numbers.jsonl:1: a JSON int, not an object"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(shell: Shell, arguments: list[str], message: str) -> None:
    (shell.folder / "numbers.jsonl").write_text("7\n")
    (shell.folder / "folder").mkdir()
    assert message in shell.wrong(2, *arguments)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"FREEZEPOINT_BROKER": "redis://x"}, "broker 'redis://x' is neither"),
        ({"FREEZEPOINT_KAFKA__SESSION_TIMEOUT_MS": "soon"}, "FREEZEPOINT_KAFKA__SESSION_TIMEOUT_MS: "),
        ({"FREEZEPOINT_CONFIG": "no.toml"}, "FREEZEPOINT_CONFIG names no.toml, which is no file"),
        ({"FREEZEPOINT_CONFIG": "."}, "FREEZEPOINT_CONFIG names ., which is no file"),
        ({"FREEZEPOINT_KAFKA": "{"}, "FREEZEPOINT_KAFKA is no JSON: "),
        ({"FREEZEPOINT_TOPIC_PREFIX": "bad prefix/"}, "set --topic-prefix or FREEZEPOINT_TOPIC_PREFIX"),
        ({"FREEZEPOINT_WORKER__GROUP": ""}, "FREEZEPOINT_WORKER__GROUP: String should have at least 1"),
        ({"FREEZEPOINT_READER__GROUP": ""}, "FREEZEPOINT_READER__GROUP: String should have at least 1"),
        ({"FREEZEPOINT_WORKER": "[1]"}, "FREEZEPOINT_WORKER is no JSON object; "),
        (
            {"FREEZEPOINT_WORKER": '{"poll_timeout_ms": 0}'},
            "FREEZEPOINT_WORKER: worker.poll_timeout_ms: Input should",
        ),
        ({"FREEZEPOINT_HTTP__HOST": ""}, "FREEZEPOINT_HTTP__HOST: String should have at least 1"),
        (
            {"FREEZEPOINT_KAFKA__SASL_PASSWORD": os.fsdecode(b"geh\xeaim")},
            "_KAFKA__SASL_PASSWORD is not UTF-8",
        ),
        (
            {"FREEZEPOINT_LOG_LEVEL": "loud"},
            "(env var: 'FREEZEPOINT_LOG_LEVEL'): 'loud' is not one of 'debug', 'info', 'warning', 'error'",
        ),
    ],
)
def test_wrong_configuration_is_one_line_and_exit_code_2(
    shell: Shell, environment: dict[str, str], message: str
) -> None:
    assert message in shell.wrong(2, "run", "--until-idle", environment=environment)
    assert list(shell.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"this is no TOML", "fp.toml: "),
        ('[worker]\ngroup = "Größe"'.encode("latin-1"), "fp.toml: line 2 is not UTF-8"),
        (b'brokr = "x"', "fp.toml: brokr is no setting; did you mean broker?"),
        (b"[workr]\ngroup = 'x'", "fp.toml: workr is no setting; did you mean worker?"),
        (b"[worker]\ngrup = 'x'", "fp.toml: worker.grup is no setting; did you mean worker.group?"),
        (b"[worker]\ngroup = 7", "fp.toml: worker.group: Input should be a valid string"),
        (b"worker = 7", "fp.toml: worker: Input should be "),
        (b"[http]\nport = 70000", "fp.toml: http.port: Input should be less than or equal to 65535"),
    ],
)
def test_a_wrong_settings_file_is_named_with_the_key(shell: Shell, text: bytes, message: str) -> None:
    (shell.folder / "fp.toml").write_bytes(text)
    assert shell.wrong(2, "config", environment={"FREEZEPOINT_CONFIG": "fp.toml"}).startswith(message)


def test_a_value_is_told_by_the_name_that_won(shell: Shell) -> None:
    """The file says it right, and the environment, which wins, wrong; then the other way round."""
    (shell.folder / "fp.toml").write_bytes(b"[http]\nport = 80")
    environment = {"FREEZEPOINT_CONFIG": "fp.toml", "FREEZEPOINT_HTTP__PORT": "x"}
    assert shell.wrong(2, "config", environment=environment).startswith("FREEZEPOINT_HTTP__PORT: ")
    (shell.folder / "fp.toml").write_bytes(b"[http]\nport = 'x'")
    shell.ok("config", environment=environment | {"FREEZEPOINT_HTTP__PORT": "80"})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("FREEZEPOINT_BROKR", "did you mean FREEZEPOINT_BROKER?"),
        ("freezepoint_brokr", "did you mean FREEZEPOINT_BROKER?"),
        ("FREEZEPOINT_WORKR__GROUP", "did you mean FREEZEPOINT_WORKER__GROUP?"),
        ("FREEZEPOINT_WORKER__GRUP", "did you mean FREEZEPOINT_WORKER__GROUP?"),
        ("FREEZEPOINT_WORKER_GROUP", "did you mean FREEZEPOINT_WORKER__GROUP?"),
        ("FREEZEPOINT_HTTP_PORT", "did you mean FREEZEPOINT_HTTP__PORT?"),
        ("FREEZEPOINT_WORKER__GROUP__X", "did you mean FREEZEPOINT_WORKER__GROUP?"),
        ("FREEZEPOINT_CONFIGS", "did you mean FREEZEPOINT_CONFIG?"),
        ("FREEZEPOINT_ZZZ", "freezepoint config prints every setting's name"),
    ],
)
def test_a_variable_that_is_no_setting_is_refused(shell: Shell, name: str, nearest: str) -> None:
    assert shell.wrong(2, "results", environment={name: "8080"}) == f"{name} is no setting; {nearest}"
    assert list(shell.folder.iterdir()) == []


def test_a_key_of_a_whole_section_that_is_no_setting_is_refused(shell: Shell) -> None:
    wrong = shell.wrong(2, "results", environment={"FREEZEPOINT_WORKER": '{"grup": 1}'})
    assert wrong == "FREEZEPOINT_WORKER: worker.grup is no setting; did you mean worker.group?"


def test_variables_that_are_no_settings_and_yet_known(shell: Shell) -> None:
    services = {  # what Kubernetes sets in a pod beside services named freezepoint and freezepoint-worker
        "FREEZEPOINT_SERVICE_HOST": "10.0.0.1",
        "FREEZEPOINT_SERVICE_PORT": "8080",
        "FREEZEPOINT_SERVICE_PORT_HTTP": "8080",
        "FREEZEPOINT_PORT": "tcp://10.0.0.1:8080",
        "FREEZEPOINT_WORKER_PORT": "tcp://10.0.0.1:8080",
        "FREEZEPOINT_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "FREEZEPOINT_PORT_8080_TCP_PROTO": "tcp",
        "FREEZEPOINT_PORT_8080_TCP_PORT": "8080",
        "FREEZEPOINT_PORT_8080_TCP_ADDR": "10.0.0.1",
    }
    (shell.folder / "fp.toml").write_bytes(b"")
    others = dict.fromkeys(OTHER_VARIABLES, "info") | {"FREEZEPOINT_CONFIG": "fp.toml"}
    shell.ok("config", environment=services | others)


@pytest.mark.parametrize("made", [TokenSink, TokenSource, TrajectoryReader])
def test_libraries_refuse_what_the_command_refuses(made: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREEZEPOINT_BROKR", "sqlite:///x.db")
    with pytest.raises(ConfigurationError, match=r"did you mean FREEZEPOINT_BROKER\?"):
        made()
    monkeypatch.delenv("FREEZEPOINT_BROKR")
    monkeypatch.setenv("FREEZEPOINT_KAFKA__REQUEST_TIMEOUT_MS", "soon")
    with pytest.raises(ConfigurationError, match=r"^FREEZEPOINT_KAFKA__REQUEST_TIMEOUT_MS: "):
        made()


def test_failed_work_is_exit_code_1(shell: Shell) -> None:
    wrong = shell.wrong(1, "results", "--broker", "kafka://127.0.0.1:1")
    assert wrong == (
        "no answer from the broker while connecting at 127.0.0.1:1: nothing listens there, or nobody knows that name"
    )


def test_a_port_that_speaks_something_else(shell: Shell) -> None:
    class HangUp(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(100)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), HangUp) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            wrong = shell.wrong(1, "results", "--broker", f"kafka://127.0.0.1:{server.server_address[1]}")
        finally:
            server.shutdown()
            serving.join()
    assert (
        "the port is open, but nothing there answers as PLAINTEXT goes; it may be starting, or stuck" in wrong
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("build events.jsonl", "stdout"),
        ("inspect a --file events.jsonl", "stdout"),
        ("config", "stdout"),
        ("schema export x", "stdout"),
        ("demo --rollouts 2", "stdout"),
        ("simulate --out -", "stdout"),
        ("simulate --out /dev/full", "/dev/full"),
        ("simulate --out /dev/full.gz", None),
        ("simulate --truth /dev/full", "/dev/full"),
        ("inspect a --file events.jsonl --html /dev/full", "/dev/full"),
    ],
)
def test_a_full_disk_is_named(shell: Shell, events: Path, command: str, what: str | None) -> None:
    if what is None:
        (shell.folder / "full.gz").symlink_to("/dev/full")
        command, what = command.replace("/dev/full.gz", "full.gz"), "full.gz"
    with Path("/dev/full" if what == "stdout" else "/dev/null").open("wb") as out:
        done = subprocess.run(
            [*COMMAND, *command.split()],
            cwd=shell.folder,
            env=shell.environment(),
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == f"error: {what}: No space left on device"
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr


def test_a_file_that_is_no_database_is_one_line(shell: Shell) -> None:
    (shell.folder / "x.db").write_bytes(b"this is no database, however long one looks at it" * 100)
    outcome = shell("results", "--broker", "sqlite:///x.db")
    assert outcome.code in {1, 2}
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "results",
        "results --follow",
        "report",
        "inspect a",
        "replay --all",
        "replay --dead-letters",
        "replay --dead-letters --dry-run",
    ],
)
def test_reading_creates_nothing(shell: Shell, command: str) -> None:
    wrong = shell.wrong(2, *command.split(), "--broker", "sqlite:///typo.db")
    assert wrong.startswith("typo.db does not exist, and reading creates nothing; name a file")
    assert list(shell.folder.iterdir()) == []
    (shell.folder / "typo.db").touch()
    assert "typo.db is empty" in shell.wrong(2, *command.split(), "--broker", "sqlite:///typo.db")
    assert (shell.folder / "typo.db").stat().st_size == 0


def test_checking_topics_creates_nothing(shell: Shell) -> None:
    assert shell.ok("topics", "check").out.count(b"not there yet") == 4
    assert list(shell.folder.iterdir()) == []


@pytest.mark.parametrize(
    "text", [b"{}\n", b"no JSON\n", b'{"rollout_id":"a"}\n{}\n', b"", b"\x1f\x8bnonsense"]
)
def test_input_that_is_refused_leaves_nothing_behind(shell: Shell, text: bytes) -> None:
    """Nor does input without a line; the third one is published up to its first bad line."""
    for options in ((), ("--complete",)):
        outcome = shell("publish", "-", *options, stdin=text)
        assert outcome.code == (2 if text else 0)
        there = text.startswith(b'{"rollout_id"')
        assert [path.name for path in shell.folder.iterdir()] == ["freezepoint.db"] * there


def test_a_closed_pipe_is_no_error(shell: Shell) -> None:
    process = shell.start("simulate", "--rollouts", "5000", "--out", "-")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    with process:
        assert process.stderr.read() == b""
        assert process.wait(TIMEOUT_S) == 141


def test_an_interrupt_is_exit_code_130(shell: Shell) -> None:
    process = shell.start("simulate", "--rollouts", "100000", "--rate", "1", "--truth", "truth")
    with process:
        poll_until((shell.folder / "freezepoint.db").exists, TIMEOUT_S, "the load has begun")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ["--help"]),
        ("freezepoint.cli.load", ["publish", "events.jsonl"]),
        ("numpy", ["publish", "events.jsonl"]),
        ("numpy.linalg", ["run"]),
        ("pydantic_settings", ["results"]),
        ("asyncio", ["config"]),
        ("structlog", ["topics", "apply"]),
        ("freezepoint.transport.sqlite", ["complete", "a"]),
    ],
)
def test_an_interrupt_while_modules_are_imported(shell: Shell, module: str, arguments: list[str]) -> None:
    """It comes from within the import of that module."""
    program = f"""
import os, signal, sys, freezepoint.cli
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
freezepoint.cli.main()
"""
    outcome = shell.program(program, *arguments)
    assert (outcome.code, outcome.out, outcome.err) == (130, b"", "")
