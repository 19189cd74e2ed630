"""The command line: thin commands over the library, one module for each group of them."""

from __future__ import annotations

import os
import sys
from typing import Annotated, cast

import typer

from freezepoint import __version__
from freezepoint.cli import (
    build,
    config,
    demo,
    doctor,
    events,
    inspect,
    load,
    replay,
    results,
    run,
    schema,
    topics,
)
from freezepoint.cli.common import INTERRUPTED, PIPE_CLOSED, PipeClosedError, error_line, exit_code_of, note
from freezepoint.telemetry import logs

app = typer.Typer(
    name="freezepoint",
    help="Token events of RL rollouts in, exactly one result per rollout out.",
    epilog="Example: freezepoint demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_ClickException = cast(
    "type[typer.BadParameter]",
    next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"),
)
"""Typer brings its own copy of click or uses the installed one, by its version."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"freezepoint {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Options of the command itself; ``version`` is dealt with by its callback."""


for group in (demo, load, events, run, topics, results, inspect, replay, build, doctor, schema, config):
    group.register(app)


def main() -> None:
    """Entry point: every error is one line on stderr and a non-zero exit code."""
    logs.configure("critical")  # commands say what went wrong themselves, and stdout stays free of log lines
    try:
        code = app(prog_name="freezepoint", standalone_mode=False) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (PipeClosedError, BrokenPipeError):
        code = _pipe_closed()
    except typer.Abort:
        code = INTERRUPTED
    except _ClickException as error:
        code = _wrong_usage(error)
    except Exception as error:  # noqa: BLE001 - a bug is told from the rest there, and raised again
        code = exit_code_of(error)
    sys.exit(code)


def _wrong_usage(error: typer.BadParameter) -> int:
    message = error.format_message().replace("Value error, ", "")
    if type(error).__name__ != "NoArgsIsHelpError":
        error_line(message)
    elif message:  # without arguments the help is the answer, and may have been shown already
        note(message)
    return error.exit_code


def _pipe_closed() -> int:
    """Nobody reads any more: nothing to report. What is still buffered must not fail again at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED
