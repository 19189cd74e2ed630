"""The documents as tests see them: their code blocks and tables, and a reader who types off what stands there.

In a ``console`` block every line that begins with ``$ `` is a command, and what follows is what it prints; without such
lines every line is a command. A ``python`` block whose first line is ``# name.py`` (and perhaps ``: what it is``) is a file,
any other is a program; the ``text`` block below it is what it prints. ``…`` stands for what differs from run to run; log
lines on stderr do not count.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from tests.polling import poll_until

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 60.0
NEVER_RUN = frozenset({"json", "yaml", "toml", "text"})
"""Languages of blocks that are no program."""
_FENCED = re.compile(r"^```(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\w+\.py)\b")
_EXPORT = re.compile(r"export (\w+)=(\S+)$")


@dataclass(frozen=True)
class Block:
    """A fenced block. ``heading``: the last one above it."""

    language: str
    text: str
    heading: str

    @property
    def commands(self) -> list[tuple[str, str]]:
        """The commands of a console block, each with what is said to be printed, empty where nothing is said."""
        if not re.search(r"^\$ ", self.text, re.MULTILINE):
            return [(line, "") for line in self.text.splitlines() if line]
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)
        assert not parts[0], "output without a command"
        pairs = [part.partition("\n") for part in parts[1:]]
        return [(command, printed) for command, _, printed in pairs]


def document(name: str) -> str:
    """Its text; skips where the documents are not part of this copy."""
    path = ROOT / name
    if not path.exists():
        pytest.skip(f"{name} is not part of this copy")
    return path.read_text()


def blocks_of(name: str) -> list[Block]:
    text = document(name)
    found = []
    for match in _FENCED.finditer(text):
        headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", text[: match.start()]), re.MULTILINE)
        found.append(Block(match[1], match[2], headings[-1] if headings else ""))
    return found


def rows_under(name: str, heading: str) -> list[list[str]]:
    """The cells of the first table below that heading, without its head."""
    _, _, below = document(name).partition(f"\n## {heading}\n")
    assert below, f"{name} has no heading {heading!r}"
    lines = [line for line in below.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def spans_of(text: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", text)


def says(printed: str, expected: str) -> bool:
    pattern = re.escape(expected.rstrip()).replace("…", ".+")
    return re.fullmatch(pattern, printed.rstrip()) is not None


class Typist:
    """Types off blocks in a folder of its own. ``replace``: what stands for something else here, such as an address."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        replace: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.replace = dict(replace or {})
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FREEZEPOINT_")}
        paths = os.pathsep.join(path for path in sys.path if path)
        own = {"PYTHONPATH": paths, "COLUMNS": "200", "NO_COLOR": "1"}
        self.environment = {**inherited, **own, **(environment or {})}
        self.background: list[subprocess.Popen[bytes]] = []
        self.printed = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """End what runs in the background; it has to have run until now."""
        ended = [process.poll() for process in self.background]
        for process in self.background:
            process.send_signal(signal.SIGTERM)
            process.wait(TIMEOUT_S)
        assert error is not None or ended == [None] * len(ended), f"ended by themselves: {ended}"

    def type(self, block: Block) -> None:
        match block.language:
            case "console":
                for command, expected in block.commands:
                    self.command(command)
                    assert not expected or says(self.printed, expected), f"{command}\n{self.printed}"
            case "python":
                self._python(self._here(block.text))
            case "text":
                assert says(self.printed, block.text), self.printed
            case _:
                assert block.language in NEVER_RUN, block.language

    def command(self, line: str) -> None:
        """Run a command; what it prints is kept. One that ends with ``&`` runs on until the end."""
        line = self._here(line).partition("  #")[0].strip()
        if export := _EXPORT.match(line):
            self.environment[export[1]] = export[2]
            self.printed = ""
            return
        words = shlex.split(line.removesuffix("&"))
        if words[0] == "python":
            words[0] = sys.executable
        else:
            assert words[0] in {"freezepoint", "uvicorn"}, f"nobody here knows how to run {line!r}"
            words[:0] = [sys.executable, "-m"]
        if line.endswith("&"):
            self.background.append(subprocess.Popen(words, cwd=self.folder, env=self.environment))
        else:
            self._run(words)

    def until_printed(self, words: list[str], what: str) -> None:
        """Run the command again and again until it prints that."""

        def printed() -> bool:
            self._run([sys.executable, "-m", *words])
            return what in self.printed

        poll_until(printed, TIMEOUT_S, f"{words} prints {what!r}")

    def _python(self, text: str) -> None:
        if name := _FILE.match(text):
            (self.folder / name[1]).write_text(text)
        else:
            self._run([sys.executable, "-W", "error", "-c", text])

    def _run(self, words: list[str]) -> None:
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        said = [line for line in done.stderr.splitlines(keepends=True) if not line.startswith('{"')]
        self.printed = done.stdout + "".join(said)

    def _here(self, text: str) -> str:
        for there, here in self.replace.items():
            text = text.replace(there, here)
        return text


async def run_here(block: Block, names: dict[str, Any], replace: Mapping[str, str]) -> None:
    """Run a python block that is a part of somebody's coroutine, with these names; what it assigns is added to them."""
    text = block.text
    for there, here in replace.items():
        assert there in text
        text = text.replace(there, here)
    compiled = compile(text, block.heading, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    awaitable = types.FunctionType(compiled, names)()
    if awaitable is not None:
        await awaitable


def markdown_files() -> list[str]:
    """Every document of the repository, by its path from the root."""
    paths = [path.relative_to(ROOT) for path in sorted(ROOT.rglob("*.md"))]
    return [
        path.as_posix()
        for path in paths
        if not any(part.startswith(".") or part in {"build", "dist", "node_modules"} for part in path.parts)
    ]
