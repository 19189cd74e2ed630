"""``topics``: create and verify what the broker must have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from freezepoint.cli.common import FAILED, Broker, TopicPrefix, load_settings, run_async, write_line
from freezepoint.errors import MissingTopicError
from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from freezepoint.transport.ports import TopicFinding
from freezepoint_schemas.topics import Topic, topic_specs

DEFAULT_PARTITIONS = 4

Partitions = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=100_000,
        help=f"Partitions of each topic. Default: as the tokens topic has, or {DEFAULT_PARTITIONS}.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    group = typer.Typer(
        help="Create and verify the topics.", epilog="Example: freezepoint topics apply", no_args_is_help=True
    )
    group.command(epilog="Example: freezepoint topics apply --partitions 8")(apply)
    group.command(epilog="Example: freezepoint topics check")(check)
    app.add_typer(group, name="topics")


def apply(partitions: Partitions = None, broker: Broker = None, topic_prefix: TopicPrefix = None) -> None:
    """Create what is missing and set what differs; never deletes, shrinks or re-partitions a topic."""
    _report(run_async(_findings(load_settings(broker, topic_prefix), partitions, change=True)))


def check(partitions: Partitions = None, broker: Broker = None, topic_prefix: TopicPrefix = None) -> None:
    """Verify names, partitions and configuration; changes nothing."""
    _report(run_async(_findings(load_settings(broker, topic_prefix), partitions, change=False)))


async def _findings(settings: Settings, partitions: int | None, *, change: bool) -> list[TopicFinding]:
    async with connect(settings, only_reading=not change) as transport:
        admin = transport.admin()
        if partitions is None:
            try:
                partitions = await admin.partitions(Topic.TOKENS)
            except MissingTopicError:
                partitions = DEFAULT_PARTITIONS
        specs = topic_specs(settings.topics, partitions)
        return await (admin.apply(specs) if change else admin.check(specs))


def _report(findings: Sequence[TopicFinding]) -> None:
    for finding in findings:
        message = finding.message.removeprefix(f"{finding.topic}: ")
        word = "WARN" if finding.warns else "ok  " if finding.ok else "FAIL"
        write_line(f"{word} {finding.topic}: {message}".encode())
    if not all(finding.ok for finding in findings):
        raise typer.Exit(FAILED)
