"""``publish``: files of events into a broker."""

from __future__ import annotations

from typing import Annotated

import typer

from freezepoint.cli.common import WRONG_INPUT, Broker, TopicPrefix, load_settings
from freezepoint.cli.start import loading, without_rich


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(epilog="Example: freezepoint publish --complete events.jsonl")(publish)


def publish(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="JSON lines, .gz, or - for stdin.")],
    complete: Annotated[
        bool, typer.Option("--complete", help="Add the complete event after each rollout's last line.")
    ] = False,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going",
            help="Report and skip bad lines. The rollout that one can be told to belong to is masked; where none can, those of "
            "its file get no complete event.",
        ),
    ] = False,
    broker: Broker = None,
    topic_prefix: TopicPrefix = None,
) -> None:
    """Publish files of events or bare token entries, line by line as they stand, in order per rollout."""
    with loading(), without_rich():
        from freezepoint.cli.load import publish_lines
    settings = load_settings(broker, topic_prefix)
    if publish_lines(settings, files, complete=complete, keep_going=keep_going):
        raise typer.Exit(WRONG_INPUT)
