"""The examples of docs/local.md, run one after another in one directory: each prints what stands below it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "local.md"
BLOCKS = re.compile(r"```(python|console|text)\n(.*?)```", re.DOTALL)


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the documents are not part of this copy")
def test_every_example_prints_what_is_said(tmp_path: Path) -> None:
    blocks = BLOCKS.findall(DOCUMENT.read_text())
    assert len(blocks) > 5
    printed = ""
    for language, text in blocks:
        if language == "text":
            assert printed == text
        elif language == "python":
            printed = run([sys.executable, "-c", text], tmp_path)
        else:
            command, _, expected = text.partition("\n")
            arguments = shlex.split(command.removeprefix("$ freezepoint "))
            assert run([sys.executable, "-m", "freezepoint", *arguments], tmp_path) == expected


def run(command: list[str], directory: Path) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
