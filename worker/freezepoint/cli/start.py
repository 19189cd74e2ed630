"""Importing what a command needs, when it is called: help and Ctrl-C must not wait for NumPy."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

INTERRUPTED: Final = 130


@contextmanager
def loading() -> Iterator[None]:
    """Ctrl-C ends the process at once meanwhile: nothing has begun yet, and modules that are half imported, some of them in C,
    make other errors of it, or tracebacks."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, say: as whoever started us wants it
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(*_: Any) -> None:
    os._exit(INTERRUPTED)


def quiet_logs() -> None:
    """Commands say what went wrong themselves, and stdout stays free of log lines."""
    import structlog

    from freezepoint.telemetry import logs

    if not structlog.is_configured():
        logs.configure("critical")
