"""The real command in processes of its own, for tests: what it prints, where, and how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from freezepoint_schemas import codec
from tests.events import entry

COMMAND = [sys.executable, "-m", "freezepoint"]
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """What a command left."""

    code: int
    out: bytes
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Stdout as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


class Shell:
    """Runs commands in a folder, with nothing of this environment's own settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FREEZEPOINT_")}
        paths = os.pathsep.join(path for path in sys.path if path)
        return {**inherited, "PYTHONPATH": paths, "COLUMNS": "200", "NO_COLOR": "1", **(extra or {})}

    def __call__(
        self, *arguments: str, stdin: bytes = b"", environment: Mapping[str, str] | None = None
    ) -> Outcome:
        return self._run([*COMMAND, *arguments], stdin, environment)

    def program(self, text: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Outcome:
        """A program instead of the command, with the arguments of one."""
        return self._run([sys.executable, "-c", text, *arguments], b"", environment)

    def _run(self, words: list[str], stdin: bytes, environment: Mapping[str, str] | None) -> Outcome:
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment(environment),
            input=stdin,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        outcome = Outcome(done.returncode, done.stdout, done.stderr.decode())
        assert "Traceback" not in outcome.err
        return outcome

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def ok(
        self, *arguments: str, stdin: bytes = b"", environment: Mapping[str, str] | None = None
    ) -> Outcome:
        outcome = self(*arguments, stdin=stdin, environment=environment)
        assert outcome.code == 0, outcome.err
        return outcome

    def wrong(
        self, code: int, *arguments: str, stdin: bytes = b"", environment: Mapping[str, str] | None = None
    ) -> str:
        """The one line that says what is wrong."""
        outcome = self(*arguments, stdin=stdin, environment=environment)
        assert outcome.code == code, outcome
        assert outcome.out == b""
        [line] = outcome.err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.fixture
def events(shell: Shell) -> Path:
    """Two rollouts of two calls each, without ends."""
    path = shell.folder / "events.jsonl"
    calls = [
        entry(rollout_id, f"c{turn}", prompt, [turn])
        for turn, prompt in ((1, [7]), (2, [7, 1, 8]))
        for rollout_id in ("a", "b")
    ]
    path.write_bytes(b"".join(codec.encode_event(call) + b"\n" for call in calls))
    return path
