"""The commands of docs/diagnosis.md, on a run with a few masked rollouts; and the names that its tables use."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from freezepoint.core.breaks import Likely
from freezepoint.evidence import ENTRIES, MARKER
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
    commands = [command for command, _ in blocks_of(DOCUMENT)[0].commands]
    assert len(commands) == 4
    for command in commands:
        typist.command(command)
        assert "rollout run7.12-0: MASKED" in typist.printed
        assert "reading it as all_traces" in typist.printed
    assert "<html" in (typist.folder / "page.html").read_text()


async def test_many(typist: Typist) -> None:
    masked, lag_to = [], None
    for command, _ in blocks_of(DOCUMENT)[1].commands:
        typist.command(command)
        report = json.loads(typist.printed)
        assert report["results"] == ROLLOUTS
        masked.append(report["masked"])
        lag_to = report["policy_versions"]["lag_to"]
    assert masked == [MASKED, MASKED, 0, MASKED]
    assert lag_to == 120


def test_the_longest_id_that_is_kept_is_the_one_that_the_document_names() -> None:
    assert f"more than {255 - len(ENTRIES)} characters" in document(DOCUMENT)
    assert f"`{MARKER}`" in document(DOCUMENT)


def test_what_is_likely_is_all_that_a_break_can_be() -> None:
    table = document(DOCUMENT).partition("| `likely` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == [kind.value for kind in Likely]
