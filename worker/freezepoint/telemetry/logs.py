"""Log lines on stderr: JSON for machines, coloured for people at a terminal. Stdout is data and stays free of them."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog

LEVELS = ("debug", "info", "warning", "error", "critical")
_QUIET_CLIENTS = ("aiokafka", "asyncio")


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
        return [structlog.stdlib.ProcessorFormatter.remove_processors_meta, structlog.dev.ConsoleRenderer()]
    return [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]
