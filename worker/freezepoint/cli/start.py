"""Importing what a command needs, when it is called: help and Ctrl-C must not wait for NumPy."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

INTERRUPTED: Final = 130


def claim_process() -> None:
    """To be called before anything is imported, by who has the process to himself: a third of a short command's time was
    spent on what it has no use for.

    The collector would search modules again and again, while they are imported and when the process ends, where they are
    what stays. OpenBLAS would start a thread for each further core, for products of matrices that nobody here asks for.
    """
    gc.freeze()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@contextmanager
def loading() -> Iterator[None]:
    """Ctrl-C ends the process at once meanwhile: nothing has begun yet, and modules that are half imported, some of them in C,
    make other errors of it, or tracebacks."""
    with _uncollected(), _ended_by_interrupts():
        yield


@contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, say: as whoever started us wants it
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _uncollected() -> Iterator[None]:
    """What is imported meanwhile is not searched for garbage, now or later; only in a process that was claimed."""
    if not (gc.get_freeze_count() and gc.isenabled()):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def without_rich() -> Iterator[None]:
    """structlog imports Rich, with a highlighter for each language, for tracebacks that show every variable: a form that
    we never use. It does without where there is none."""
    before = sys.modules.get("rich")
    sys.modules["rich"] = cast("Any", None)
    try:
        yield
    finally:
        if before is None:
            del sys.modules["rich"]
        else:
            sys.modules["rich"] = before


def _leave(*_: Any) -> None:
    os._exit(INTERRUPTED)


def quiet_logs() -> None:
    """Commands say what went wrong themselves, and stdout stays free of log lines."""
    with without_rich():
        import structlog

        from freezepoint.telemetry import logs

    if not structlog.is_configured():
        logs.configure("critical")
