"""The real command: help, wrong usage, and how it ends when it cannot go on."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import pytest

from freezepoint import __version__
from tests.integration.shell import TIMEOUT_S, Shell
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


# -------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_there_and_its_example_works(shell: Shell, events: Path, command: str) -> None:
    helped = shell.ok(*command.split(), "--help")
    text = helped.out.decode()
    assert not helped.err
    example = re.search(r"Example: freezepoint (.*)", text)
    assert example is not None, text
    assert example[1].split()[: len(command.split())] == command.split() or not command
    assert shell(*shlex.split(example[1])).code == 0


def test_version(shell: Shell) -> None:
    assert shell.ok("--version").out.decode() == f"freezepoint {__version__}\n"


def test_without_a_command_the_help_is_shown(shell: Shell) -> None:
    outcome = shell()
    assert outcome.code == 2
    assert "Usage: freezepoint" in outcome.out.decode() + outcome.err
    assert "error" not in outcome.err


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command"),
        (["publish"], "Missing argument"),
        (["publish", "nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
        (["publish", "."], "Is a directory"),
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
        (["results", "--broker", "sqlite:////no/where/x.db"], "create it, or set --broker"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(shell: Shell, arguments: list[str], message: str) -> None:
    assert message in shell.wrong(2, *arguments)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"FREEZEPOINT_BROKER": "redis://x"}, "broker 'redis://x' is neither"),
        ({"FREEZEPOINT_KAFKA__SESSION_TIMEOUT_MS": "soon"}, "FREEZEPOINT_KAFKA__SESSION_TIMEOUT_MS: "),
        ({"FREEZEPOINT_CONFIG": "no.toml"}, "FREEZEPOINT_CONFIG names no.toml, which is no file"),
        ({"FREEZEPOINT_CONFIG": "bad.toml"}, "bad.toml: "),
        ({"FREEZEPOINT_KAFKA": "{"}, "kafka"),
    ],
)
def test_wrong_configuration_is_one_line_and_exit_code_2(
    shell: Shell, environment: dict[str, str], message: str
) -> None:
    (shell.folder / "bad.toml").write_text("this is no TOML")
    assert message in shell.wrong(2, "results", environment=environment)


def test_failed_work_is_exit_code_1(shell: Shell) -> None:
    assert "127.0.0.1:1" in shell.wrong(1, "results", "--broker", "kafka://127.0.0.1:1")


def test_a_file_that_is_no_database_is_one_line(shell: Shell) -> None:
    (shell.folder / "x.db").write_bytes(b"this is no database, however long one looks at it" * 100)
    outcome = shell("results", "--broker", "sqlite:///x.db")
    assert outcome.code in {1, 2}
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1


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
