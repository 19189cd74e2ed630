"""What every command shares: options, settings, errors in one line, and writing to a pipe that may close."""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, TypeVar

import typer

from freezepoint.cli.start import loading, quiet_logs
from freezepoint.errors import ConfigurationError, FreezepointError, InputError

if TYPE_CHECKING:
    from pydantic import ValidationError

    from freezepoint.settings import Settings

FAILED: Final = 1
"""Exit code of work that failed."""
WRONG_INPUT: Final = 2
"""Exit code of wrong usage, configuration or input."""
PIPE_CLOSED: Final = 141
"""Exit code of a program that a closed pipe ended, as a shell reports it."""

_INPUT_OS_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_T = TypeVar("_T")

Broker = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="sqlite:///file.db or kafka://host:port. Also: FREEZEPOINT_BROKER. Default: sqlite:///freezepoint.db.",
        show_default=False,
    ),
]
TopicPrefix = Annotated[
    str | None,
    typer.Option(
        metavar="PREFIX",
        help="Put in front of all topic names. Also: FREEZEPOINT_TOPIC_PREFIX.",
        show_default=False,
    ),
]


def load_settings(
    broker: str | None = None, topic_prefix: str | None = None, *, worker: dict[str, Any] | None = None
) -> Settings:
    """The effective settings; options that were given win. ``worker``: options of that section, None where not given.

    :raises ConfigurationError: a value or the file is wrong.
    """
    with loading():
        from freezepoint.core.choices import BUILDER_NAMES, DELIVERY_NAMES
        from freezepoint.settings import load

        quiet_logs()
    settings = load(broker=broker, topic_prefix=topic_prefix)
    chosen = settings.worker.model_copy(update=_given(worker or {}))
    if not chosen.group:
        raise ConfigurationError("--group is empty: name a consumer group")
    _require_known("builder", chosen.builder, BUILDER_NAMES)
    _require_known("delivery", chosen.delivery, DELIVERY_NAMES)
    return settings.model_copy(update={"worker": chosen})


def _require_known(what: str, name: str, known: Iterable[str]) -> None:
    """A worker started with a name that does not exist would mask every rollout."""
    if name not in known:
        raise ConfigurationError(f"unknown {what} {name!r}; there are {', '.join(known)}")


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _option(location: tuple[str | int, ...]) -> str:
    return "--" + str(location[0]).replace("_", "-") if location else "options"


def wrong_option(error: ValidationError) -> InputError:
    """A model's complaint about an option of the same name."""
    problem = error.errors(include_url=False, include_context=False)[0]
    message = problem["msg"].removeprefix("Value error, ")
    return InputError(f"{_option(problem['loc'])}: {message}" if problem["loc"] else message)


def run_async(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end."""
    with loading():
        import asyncio

        quiet_logs()
    return asyncio.run(work)


def error_line(message: str) -> None:
    """Say on stderr, in one line, what is wrong."""
    _stderr_line("error", message)


def warning_line(message: str) -> None:
    """Say on stderr, in one line, what should be known."""
    _stderr_line("warning", message)


def _stderr_line(kind: str, message: str) -> None:
    sys.stderr.write(f"{kind}: {' '.join(message.split())}\n")


def note(message: str) -> None:
    """A summary on stderr; stdout is data only."""
    sys.stderr.write(message + "\n")


class PipeClosedError(Exception):
    """Nobody reads stdout any more. Not the OSError itself, which typer would take for its own to handle."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Errors of writing are told with what could not be written; by themselves they only say why."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or isinstance(error, BrokenPipeError):
            raise
        raise OSError(error.errno, error.strerror, what) from None


@contextmanager
def to_stdout() -> Iterator[BinaryIO]:
    """Where data goes. :raises PipeClosedError: nobody reads it any more."""
    try:
        with naming("stdout"):
            yield sys.stdout.buffer
    except BrokenPipeError:
        raise PipeClosedError from None


def require_files(names: Iterable[str]) -> None:
    """:raises InputError: one of them is a directory."""
    for name in names:
        if Path(name).is_dir():
            raise InputError(f"{name} is a directory; name its files, such as {Path(name) / '*.jsonl'}")


def write_line(line: bytes, *, flush: bool = False) -> None:
    """One line of data to stdout. :raises PipeClosedError: nobody reads it any more."""
    with to_stdout() as out:
        out.write(line + b"\n")
        if flush:
            out.flush()


def exit_code_of(error: BaseException) -> int:
    """Report an error in one line and return the exit code it deserves; re-raise what is a bug."""
    match error:
        case ConfigurationError() | InputError():
            error_line(str(error))
            return WRONG_INPUT
        case FreezepointError():
            error_line(str(error) or type(error).__name__)
            return FAILED
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            error_line(f"{where}{error.strerror or error}")
            return WRONG_INPUT if isinstance(error, _INPUT_OS_ERRORS) else FAILED
        case _:
            raise error
