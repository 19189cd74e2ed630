"""``run``: the worker."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from freezepoint.allocator import give_memory_back
from freezepoint.app import run_worker
from freezepoint.cli.common import Broker, TopicPrefix, load_settings, note, run_async
from freezepoint.cli.progress import text_progress
from freezepoint.telemetry import logs
from freezepoint.wording import counted
from freezepoint.worker import WorkerSummary


class LogLevel(StrEnum):
    """How much the worker tells."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(epilog="Example: freezepoint run --until-idle --log-level warning")(run)


def run(
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="Process what is there, then exit.")
    ] = False,
    group: Annotated[
        str | None, typer.Option(help="Consumer group; its workers share the partitions.")
    ] = None,
    builder: Annotated[str | None, typer.Option(help="prefix_merging or per_request.")] = None,
    delivery: Annotated[str | None, typer.Option(help="single_response, all_traces or per_request.")] = None,
    log_level: Annotated[LogLevel, typer.Option(envvar="FREEZEPOINT_LOG_LEVEL")] = LogLevel.INFO,
    broker: Broker = None,
    topic_prefix: TopicPrefix = None,
) -> None:
    """Run a worker: build every completed rollout and publish its one result. Stops on SIGTERM and SIGINT."""
    options = {"group": group, "builder": builder, "delivery": delivery}
    settings = load_settings(broker, topic_prefix, worker=options)
    give_memory_back()
    with text_progress("building", wanted=until_idle) as say:
        logs.configure(log_level)  # in here, so that log lines appear above the progress
        on_progress = None if say is None else lambda summary: say(_short(summary))
        summary = run_async(run_worker(settings, until_idle=until_idle, on_progress=on_progress))
    note(_figures(summary))


def _short(summary: WorkerSummary) -> str:
    return f"{counted(summary.records, 'record')}, {counted(summary.results, 'result')}"


def _figures(summary: WorkerSummary) -> str:
    return (
        f"{counted(summary.records, 'record')} read, {counted(summary.results, 'result')} published ({summary.masked} masked), "
        f"{counted(summary.dead_letters, 'dead letter')}, {counted(summary.open_rollouts, 'rollout')} open"
    )
