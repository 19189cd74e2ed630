"""``build``: results from files, without a broker."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from freezepoint.cli.common import WRONG_INPUT, error_line, load_settings, warning_line, write_line
from freezepoint.cli.progress import file_progress
from freezepoint.collector import young_collections
from freezepoint.lines import LineError, sources
from freezepoint.offline import OfflineBuilder, expanded
from freezepoint.projections import Projection, line_of


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(epilog="Example: freezepoint build --projection response events.jsonl")(build)


def build(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="JSON lines, .gz, - for stdin, or a folder of <rollout_id>.tokens.jsonl."
        ),
    ],
    builder: Annotated[str | None, typer.Option(help="prefix_merging (default) or per_request.")] = None,
    delivery: Annotated[
        str | None, typer.Option(help="single_response (default), all_traces or per_request.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name in results that have none.")] = None,
    projection: Annotated[
        Projection, typer.Option(help="The result record, or the reference's dictionary.")
    ] = (Projection.TRACE),
    packed: Annotated[bool, typer.Option("--packed", help="Arrays of a trace as base64.")] = False,
) -> None:
    """Build results from files: each rollout freezes at its complete event or at the end of input.

    Lines that name no rollout are reported and skipped, and the exit code is then 2; what the other lines gave is written all the same.
    """
    settings = load_settings(worker={"builder": builder, "delivery": delivery})
    offline = OfflineBuilder(settings.worker, model, warning_line)

    def on_bad(error: LineError) -> None:
        error_line(str(error))

    with (
        young_collections(),
        sources(expanded(paths)) as files,
        file_progress(files, "building", wanted=not sys.stdout.isatty()) as on_position,
    ):
        for result in offline.results(files, on_bad, on_position):
            write_line(line_of(result, projection, packed=packed))
    if offline.unusable:
        raise typer.Exit(WRONG_INPUT)
