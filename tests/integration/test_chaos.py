"""A short selection of the scenarios of ``make chaos``."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.__main__ import options_of
from tests.chaos.broker import ChaosBroker
from tests.chaos.registry import all_scenarios, play
from tests.documents import blocks_of

SHORT = {
    "kills": 8.0,
    "zombies": 1.0,
    "late-commits": 10.0,
    "topic-recreated": 1.0,
    "log-truncated": 1.0,
    "rolling-upgrade": 1.0,
}


def test_the_commands_of_the_page_are_commands() -> None:
    """Of docs/faults.md; what they do is the rest of this file, and takes half an hour."""
    (block,) = blocks_of("docs/faults.md")
    for line in block.text.splitlines():
        make, target, *settings = shlex.split(line, comments=True)
        assert (make, target) == ("make", "chaos")
        for setting in settings:
            options = options_of(shlex.split(setting.removeprefix("CHAOS_ARGS=")))
            assert set(options.only) <= all_scenarios().keys()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def broker(kafka_jars: Path) -> AsyncIterator[ChaosBroker]:
    async with ChaosBroker() as running:
        yield running


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", SHORT)
async def test_scenario(name: str, broker: ChaosBroker, tmp_path: Path) -> None:
    report = await play(all_scenarios()[name], broker, tmp_path, seed=7, seconds=SHORT[name])
    assert report.ok, "\n" + "\n".join(report.lines())
