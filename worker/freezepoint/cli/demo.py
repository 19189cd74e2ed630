"""``demo``: the whole way at a glance."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from freezepoint.cli.common import (
    FAILED,
    Broker,
    TopicPrefix,
    error_line,
    load_settings,
    note,
    run_async,
    to_stdout,
)
from freezepoint.cli.progress import text_progress
from freezepoint.demo import DemoReport, apart, demo_profiles, embedded, run_demo
from freezepoint.wording import counted
from freezepoint_schemas.results import Result

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPED_WIDTH = 120
"""Of the table where no terminal says how wide it is."""


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(epilog="Example: freezepoint demo --rollouts 40 --seed 7")(demo)


def demo(
    rollouts: Annotated[int, typer.Option(min=1, max=10_000, help="How many rollouts.")] = 24,
    agents: Annotated[int, typer.Option(min=1, max=64, help="How many publish at once.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal rollouts.")] = 0,
    broker: Broker = None,
    topic_prefix: TopicPrefix = None,
) -> None:
    """Simulated agents publish, a worker builds, and every result is checked against the truth.

    Without --broker everything lives in a temporary folder. With it, topics of the demo's own are created there.
    """
    settings = load_settings(broker, topic_prefix)
    began = time.monotonic()
    with ExitStack() as stack:
        if broker is None:
            settings = stack.enter_context(embedded(settings))
        else:
            settings = apart(settings, f"demo-{time.time_ns():x}")
            note(f"topics {settings.topic_prefix}* are created on {broker} and stay there")
        say = stack.enter_context(text_progress("running"))
        results: list[Result] = []

        def on_result(result: Result) -> None:
            results.append(result)
            if say is not None:
                say(f"{len(results)} of {counted(rollouts, 'result')}")

        report = run_async(run_demo(settings, demo_profiles(rollouts, agents, seed), on_result=on_result))
    with to_stdout():
        _console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(_table(report))
    _conclude(report, time.monotonic() - began)


def _console(width: int | None = None) -> Console:
    from rich.console import Console

    return Console(width=width)


def _table(report: DemoReport) -> Table:
    from rich.table import Table

    table = Table("rollout", "calls", "tokens", "delivered", "masked", "why", highlight=False)
    for name in ("calls", "tokens", "delivered"):
        next(column for column in table.columns if column.header == name).justify = "right"
    for result in sorted(report.results, key=lambda result: result.rollout_id):
        metrics = result.metrics
        table.add_row(
            result.rollout_id,
            str(metrics.get("n_calls", 0)),
            str(metrics.get("generated_tokens_captured", 0)),
            str(metrics.get("generated_tokens_delivered", 0)),
            "[yellow]yes[/]" if result.mask_sample else "[green]no[/]",
            ", ".join(result.reasons),
        )
    return table


def _conclude(report: DemoReport, seconds: float) -> None:
    """The summary line, or what differs from the truth."""
    masked = sum(result.mask_sample for result in report.results)
    delivered = sum(
        result.metrics.get("generated_tokens_delivered", 0)
        for result in report.results
        if not result.mask_sample
    )
    verdict = "as they should be" if not report.differences else "NOT as they should be"
    with to_stdout():
        _console().print(
            f"{counted(len(report.results), 'rollout')}, one result each: {len(report.results) - masked} to train on with "
            f"{counted(delivered, 'generated token')}, {masked} masked; all {verdict}, in {seconds:.1f} s",
            highlight=False,
            soft_wrap=True,
        )
    for difference in report.differences:
        error_line(difference)
    if report.differences:
        raise typer.Exit(FAILED)
