"""``results``: what the worker published."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated

import typer

from freezepoint.cli.common import (
    FAILED,
    Broker,
    TopicPrefix,
    error_line,
    load_settings,
    run_async,
    write_line,
)
from freezepoint.projections import Projection, line_of
from freezepoint.reader import BadResultError, ResultReader
from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from freezepoint_schemas.topics import Topic


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(epilog="Example: freezepoint results --projection response --unmasked")(results)


def results(
    projection: Annotated[
        Projection, typer.Option(help="The result record, or the reference's dictionary.")
    ] = (Projection.TRACE),
    packed: Annotated[bool, typer.Option("--packed", help="Arrays of a trace as base64.")] = False,
    masked: Annotated[
        bool | None, typer.Option("--masked/--unmasked", help="Only these. Default: all.", show_default=False)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for what comes later, until interrupted.")
    ] = False,
    broker: Broker = None,
    topic_prefix: TopicPrefix = None,
) -> None:
    """Write all committed results to stdout, one JSON line each."""
    settings = load_settings(broker, topic_prefix)
    bad = run_async(_write(settings, projection, packed=packed, masked=masked, follow=follow))
    if bad:
        raise typer.Exit(FAILED)


async def _write(
    settings: Settings, projection: Projection, *, packed: bool, masked: bool | None, follow: bool
) -> int:
    """Returns how many records were no results."""
    bad: list[BadResultError] = []

    def on_bad(error: BadResultError) -> None:
        bad.append(error)
        error_line(str(error))

    async with connect(settings, only_reading=True) as transport:
        reader = await transport.reader(Topic.TRAJECTORIES)
        try:
            async with aclosing(ResultReader(reader, on_bad).results(follow=follow)) as found:
                async for read in found:
                    if masked in (None, read.result.mask_sample):
                        write_line(line_of(read.result, projection, packed=packed), flush=follow)
        finally:
            await reader.close()
    return len(bad)
