"""The commands by name. Their modules are imported when they are called."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from freezepoint import __version__
from freezepoint.cli.common import PIPE_CLOSED, PipeClosedError, error_line, exit_code_of, note, to_stdout
from freezepoint.cli.start import INTERRUPTED, loading, without_rich

COMMANDS = {
    "demo": (
        "demo",
        "Simulated agents publish, a worker builds, and every result is checked against the truth.",
    ),
    "simulate": (
        "load",
        "Generate seeded load: agent rollouts with retries, sub-agents, compaction, lost calls and duplicates.",
    ),
    "publish": (
        "publish",
        "Publish files of events or bare token entries, line by line as they stand, in order per rollout.",
    ),
    "complete": ("events", "End rollouts: freeze what was recorded and build the result."),
    "cancel": (
        "events",
        "Give rollouts up: freeze them and publish them masked, so that nobody waits for them.",
    ),
    "clear": (
        "events",
        "Forget everything recorded under these ids: they are about to be dispatched (again).",
    ),
    "run": (
        "run",
        "Run a worker: build every completed rollout and publish its one result. Stops on SIGTERM and SIGINT.",
    ),
    "topics": ("topics", "Create and verify the topics."),
    "results": ("results", "Write all committed results to stdout, one JSON line each."),
    "inspect": (
        "inspect",
        "Explain one rollout: its calls and chains, what was set aside and why, and what would un-mask it.",
    ),
    "report": (
        "inspect",
        "Sum all committed results up as one JSON object: masked and why, tokens, staleness.",
    ),
    "replay": (
        "replay",
        "Rebuild results from the tokens topic (to stdout, or to another results topic), or put dead letters back.",
    ),
    "build": (
        "build",
        "Build results from files: each rollout freezes at its complete event or at the end of input.",
    ),
    "doctor": (
        "doctor",
        "Look at everything a worker depends on; each line a verdict, below it what mends it. Fails if one check does.",
    ),
    "schema": ("schema", "The contract's JSON Schemas and AsyncAPI document."),
    "config": (
        "config",
        "Print the settings in effect (options, environment, FREEZEPOINT_CONFIG file), secrets hidden.",
    ),
}
"""Name -> module, and what the command's own help begins with."""


class _Commands(TyperGroup):
    """Lists the commands by ``COMMANDS``, and imports the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else command_of(name), rest


def command_of(name: str) -> Any:
    """The command itself."""
    with loading(), without_rich():
        module = import_module(f"freezepoint.cli.{COMMANDS[name][0]}")
    own = typer.Typer()
    module.register(own)
    return typer.main.get_group(own).commands[name]


app = typer.Typer(
    cls=_Commands,
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


def _listed() -> None:
    """Stands for a command in the list; never called."""


for _name, (_, _summary) in COMMANDS.items():
    app.command(_name, help=_summary)(_listed)


def run_command() -> int:
    """Run what the command line names; the exit code."""
    try:
        code = app(prog_name="freezepoint", standalone_mode=False) or 0
        with to_stdout():
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (PipeClosedError, BrokenPipeError):
        _drop_stdout()
        code = PIPE_CLOSED
    except typer.Abort:
        code = INTERRUPTED
    except _ClickException as error:
        code = _wrong_usage(error)
    except Exception as error:  # noqa: BLE001 - a bug is told from the rest there, and raised again
        code = exit_code_of(error)
        if isinstance(error, OSError):
            _drop_stdout()
    return code


def _wrong_usage(error: typer.BadParameter) -> int:
    message = error.format_message().replace("Value error, ", "")
    if type(error).__name__ != "NoArgsIsHelpError":
        error_line(message)
    elif message:  # without arguments the help is the answer, and may have been shown already
        note(message)
    return error.exit_code


def _drop_stdout() -> None:
    """It takes nothing more, which has been told if it is worth telling. What is still buffered must not fail again at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
