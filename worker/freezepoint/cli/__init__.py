"""The command line: thin commands over the library, one module for each group of them."""

from __future__ import annotations

import os
import sys
from typing import Annotated, cast

import typer

from freezepoint import __version__
from freezepoint.cli import build, config, demo, events, load, results, run, topics
from freezepoint.cli.common import INTERRUPTED, PIPE_CLOSED, error_line, exit_code_of

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


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    if version:
        typer.echo(f"freezepoint {__version__}")
        raise typer.Exit


for group in (demo, load, events, run, topics, results, build, config):
    group.register(app)


def main() -> None:
    """Entry point: every error is one line on stderr and a non-zero exit code."""
    try:
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        code = _pipe_closed()
    except typer.Abort:
        code = INTERRUPTED
    except _ClickException as error:
        error_line(error.format_message())
        code = error.exit_code
    except Exception as error:  # noqa: BLE001 - a bug is told from the rest there, and raised again
        code = exit_code_of(error)
    sys.exit(code)


def _pipe_closed() -> int:
    """Nobody reads any more: nothing to report. What is still buffered must not fail again at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED
