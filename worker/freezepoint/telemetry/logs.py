"""Log lines on stderr: JSON for machines, coloured for people at a terminal. Stdout is data and stays free of them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import structlog

LEVELS = ("debug", "info", "warning", "error", "critical")
_KAFKA_CLIENT = "aiokafka"
_QUIET_CLIENTS = (_KAFKA_CLIENT, "asyncio")
REPEAT_S = 30.0
"""A client's message comes at most this often: while a broker is silent, the Kafka client repeats some twenty times a second."""
KNOWN_MESSAGES_MAX = 1_000


class RepeatLimit(logging.Filter):
    """Lets a client's message pass once in ``REPEAT_S``, with the number of those held back since. Messages that differ
    in their arguments only are the same."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._passed: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it may be written."""
        if record.name.partition(".")[0] not in _QUIET_CLIENTS:
            return True
        message, now = (record.name, str(record.msg)), self._clock()
        passed_at, held_back = self._passed.get(message, (-REPEAT_S, 0))
        if now - passed_at < REPEAT_S:
            self._passed[message] = (passed_at, held_back + 1)
            return False
        if message not in self._passed and len(self._passed) >= KNOWN_MESSAGES_MAX:
            self._passed.clear()
        self._passed[message] = (now, 0)
        if held_back:
            record.msg, record.args = f"{record.getMessage()} (and {held_back} times more since)", None
        return True


def soften(record: logging.LogRecord) -> bool:
    """A filter that takes what the Kafka client calls an error for a warning: it goes on by itself after each of
    them, most come of every broker that starts or is away, and what ends its work it raises. A traceback stays an error."""
    if (
        record.name.partition(".")[0] == _KAFKA_CLIENT
        and record.levelno == logging.ERROR
        and not record.exc_info
    ):
        record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
    return record.levelno >= logging.getLogger().level


def configure(level: str = "info", stream: TextIO | None = None) -> None:
    """Send structlog's and the standard library's log lines to one place in one form.

    :param level: one of ``LEVELS``.
    :param stream: where to write; stderr by default. Whether it is a terminal decides the form.
    """
    out = sys.stderr if stream is None else stream
    shared = _shared_processors()
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=_rendering(terminal=out.isatty())
        )
    )
    handler.addFilter(soften)
    handler.addFilter(RepeatLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET_CLIENTS:  # their info lines are about every fetch and heartbeat
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _shared_processors() -> list[Any]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _rendering(*, terminal: bool) -> list[Any]:
    if terminal:
        # Its own form of a traceback, where Rich is installed, has every frame's variables: passwords, tokens, rollouts.
        plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        return [structlog.stdlib.ProcessorFormatter.remove_processors_meta, plain]
    return [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]
