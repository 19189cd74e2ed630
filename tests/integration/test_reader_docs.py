"""The examples of docs/reader.md, on the rollouts that they speak of: each prints what stands below it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from freezepoint_schemas.events import InputEvent
from tests.events import cancelled, complete, entry
from tests.integration.workers import publish, run_until_idle

DOCUMENT = Path(__file__).parents[2] / "docs" / "reader.md"
BLOCKS = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)


def rollouts() -> list[InputEvent]:
    """Two prompts: one whole with a cancelled rollout, one with a rollout that recorded nothing and one that is missing."""
    return [
        entry("p1.0", "c1", [9906, 1917], [40, 41]),
        complete("p1.0", reward=1.0, group_id="p1", group_size=3),
        entry("p1.1", "c1", [9906, 1917], [50]),
        complete("p1.1", reward=0.0, group_id="p1", group_size=3),
        entry("p1.2", "c1", [9906, 1917], [60]),
        cancelled("p1.2", group_id="p1", group_size=3),
        entry("p2.0", "c1", [12, 13], [14]),
        complete("p2.0", reward=1.0, group_id="p2", group_size=3),
        complete("p2.1", group_id="p2", group_size=3),
    ]


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the documents are not part of this copy")
async def test_every_example_prints_what_is_said(tmp_path: Path) -> None:
    broker = f"sqlite:///{tmp_path / 'freezepoint.db'}"
    async with connect(Settings(broker=broker)) as transport:
        await publish(transport, rollouts())
    run_until_idle({"FREEZEPOINT_BROKER": broker}, tmp_path / "worker.log")
    blocks = BLOCKS.findall(DOCUMENT.read_text())
    assert len(blocks) == 4
    printed: list[str] = []
    for language, text in blocks:
        if language == "python":
            printed = run(text, tmp_path)
        else:
            assert sorted(printed) == sorted(text.splitlines()), "partitions come in any order"


def run(program: str, directory: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.splitlines()
