"""The commands of docs/diagnosis.md, on a run with a few masked rollouts; and the names that its tables use."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from freezepoint.core.breaks import Likely
from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from freezepoint_schemas import codec
from freezepoint_schemas.events import InputEvent
from tests.documents import Typist, blocks_of, document
from tests.events import complete, entry
from tests.integration.workers import publish, run_until_idle

DOCUMENT = "docs/diagnosis.md"
ROLLOUTS, MASKED = 100, 10


def events() -> list[InputEvent]:
    """A rollout of two roots, which all traces un-mask, is masked; so are nine more of a hundred."""
    found: list[InputEvent] = []
    for number in range(ROLLOUTS):
        name = "run7.12-0" if number == 0 else f"run7.{number}-1"
        found.append(entry(name, "c1", [1, 2], [3]))
        if number < MASKED:
            found.append(entry(name, "c2", [9], [4]))
        found.append(complete(name))
    return found


@pytest.fixture
async def typist(tmp_path: Path) -> Typist:
    """Where these rollouts are published, built, and lie in ``capture.jsonl``."""
    broker = f"sqlite:///{tmp_path / 'freezepoint.db'}"
    async with connect(Settings(broker=broker)) as transport:
        await publish(transport, events())
    run_until_idle({"FREEZEPOINT_BROKER": broker}, tmp_path / "worker.log")
    (tmp_path / "capture.jsonl").write_bytes(
        b"".join(codec.encode_event(event) + b"\n" for event in events())
    )
    return Typist(tmp_path)


def test_these_are_all_blocks() -> None:
    assert [block.language for block in blocks_of(DOCUMENT)] == ["console", "console"]


async def test_one_rollout(typist: Typist) -> None:
    from_broker, from_file, as_page = (command for command, _ in blocks_of(DOCUMENT)[0].commands)
    for command in (from_broker, from_file, as_page):
        typist.command(command)
        assert "rollout run7.12-0: MASKED" in typist.printed
        assert "reading it as all_traces" in typist.printed
    assert "<html" in (typist.folder / "page.html").read_text()


async def test_many(typist: Typist) -> None:
    whole, limited, as_traces = (command for command, _ in blocks_of(DOCUMENT)[1].commands)
    masked = []
    for command in (whole, limited, as_traces):
        typist.command(command)
        report = json.loads(typist.printed)
        assert report["results"] == ROLLOUTS
        masked.append(report["masked"])
    assert masked == [MASKED, MASKED, 0]


def test_what_is_likely_is_all_that_a_break_can_be() -> None:
    table = document(DOCUMENT).partition("| `likely` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == [kind.value for kind in Likely]
