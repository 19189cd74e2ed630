"""Log lines: a client that says the same thing over and over is not repeated."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator

import pytest
import structlog

from freezepoint.telemetry.logs import KNOWN_MESSAGES_MAX, REPEAT_S, RepeatLimit, configure

CLIENT = "aiokafka.consumer.group_coordinator"
SECRET = "geh-eim"


class Limited:
    """What of some log lines passes, by a clock that stands until it is set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._limit = RepeatLimit(lambda: self.now)

    def passes(self, message: str, *args: object, name: str = CLIENT) -> str | None:
        record = logging.LogRecord(name, logging.ERROR, "", 0, message, args, None)
        return record.getMessage() if self._limit.filter(record) else None


def test_a_clients_message_passes_now_and_then_with_the_number_of_the_others() -> None:
    log = Limited()
    assert log.passes("node %s is dead", 1) == "node 1 is dead"
    assert [log.passes("node %s is dead", number) for number in range(600)] == [None] * 600
    assert log.passes("node %s is alive", 1) == "node 1 is alive"
    log.now = REPEAT_S
    assert log.passes("node %s is dead", 2) == "node 2 is dead (and 600 times more since)"
    log.now = 2 * REPEAT_S
    assert log.passes("node %s is dead", 3) == "node 3 is dead"


def test_our_own_lines_always_pass() -> None:
    log = Limited()
    assert [log.passes("rollout_timed_out", name="freezepoint.runner") for _ in range(3)].count(None) == 0


def test_it_remembers_a_bounded_number_of_messages() -> None:
    log = Limited()
    for number in range(3 * KNOWN_MESSAGES_MAX):
        assert log.passes(f"message {number}") is not None
    assert len(log._limit._passed) <= KNOWN_MESSAGES_MAX


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[dict[str, object]]]]:
    """What is written, at a level, of what a broker's absence makes the client say."""
    root, before = logging.getLogger(), structlog.get_config()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)

    def written(level: str) -> list[dict[str, object]]:
        out = io.StringIO()
        configure(level, out)
        client = logging.getLogger(CLIENT)
        for _ in range(5):
            client.error("Group Coordinator Request failed: %s", "[Error 15]")
        try:
            raise ValueError("a bug")
        except ValueError:
            client.exception("Unexpected error in coordinator routine")
        return [json.loads(line) for line in out.getvalue().splitlines()]

    yield written
    structlog.configure(**before)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("lines")
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_no_traceback_shows_what_variables_hold(kind: type[io.StringIO]) -> None:
    def connect(password: str) -> None:
        raise ValueError(f"not {len(password)}")

    out = kind()
    configure("info", out)
    try:
        connect(SECRET)
    except ValueError:
        logging.getLogger("asyncio").exception("a task failed")
    assert "ValueError: not 7" in out.getvalue()
    assert SECRET not in out.getvalue()


def test_the_clients_errors_are_warnings_once_and_its_tracebacks_errors(
    lines: Callable[[str], list[dict[str, object]]],
) -> None:
    assert [(line["level"], line["event"]) for line in lines("info")] == [
        ("warning", "Group Coordinator Request failed: [Error 15]"),
        ("error", "Unexpected error in coordinator routine"),
    ]
    assert [line["level"] for line in lines("error")] == ["error"]
