"""``inspect``: one rollout explained from its log. ``report``: many results in a few numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from freezepoint.cli.common import (
    FAILED,
    WRONG_INPUT,
    Broker,
    TopicPrefix,
    error_line,
    load_settings,
    naming,
    note,
    require_files,
    run_async,
    write_line,
)
from freezepoint.core.views import VIEWS
from freezepoint.errors import InputError
from freezepoint.inspection import (
    Explanation,
    Found,
    as_page,
    as_text,
    explain,
    find_in_broker,
    find_in_files,
)
from freezepoint.lines import sources
from freezepoint.offline import expanded
from freezepoint.reader import BadResultError, ResultReader
from freezepoint.reporting import Report
from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from freezepoint.wording import agreeing, counted
from freezepoint_schemas import codec
from freezepoint_schemas.topics import Topic, is_rollout_id

Files = Annotated[
    list[str] | None,
    typer.Option(
        "--file",
        metavar="PATH",
        help="Read files instead of a broker (repeatable).",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(epilog="Example: freezepoint inspect a --file events.jsonl")(inspect)
    app.command(epilog="Example: freezepoint report --max-mask-fraction 0.2 --min-samples 0")(report)


def inspect(
    rollout_id: Annotated[str, typer.Argument(metavar="ROLLOUT_ID", help="The rollout to explain.")],
    file: Files = None,
    builder: Annotated[str | None, typer.Option(help="prefix_merging (default) or per_request.")] = None,
    delivery: Annotated[
        str | None, typer.Option(help="single_response (default), all_traces or per_request.")
    ] = None,
    life: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Which life of the id, the oldest being 1. Default: the last.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="All facts as one JSON object.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Also write one self-contained page.")
    ] = None,
    broker: Broker = None,
    topic_prefix: TopicPrefix = None,
) -> None:
    """Explain one rollout: its calls and chains, what was set aside and why, and what would un-mask it."""
    if not is_rollout_id(rollout_id):
        raise InputError(f"{rollout_id!r} is no valid rollout id")
    settings = load_settings(broker, topic_prefix, worker={"builder": builder, "delivery": delivery})
    found = _find(settings, rollout_id, file, life)
    if found is None:
        raise InputError(f"nothing of rollout {rollout_id} is there")
    explanation = explain(found, settings.worker)
    if html is not None:
        with naming(str(html)):
            html.write_text(as_page(found.log, explanation), "utf-8")
        note(f"wrote {html}")
    _print(explanation, json=json)


def _find(settings: Settings, rollout_id: str, file: list[str] | None, life: int | None) -> Found | None:
    if not file:
        return run_async(find_in_broker(settings, rollout_id, life))
    with sources(expanded(file)) as files:
        return find_in_files(settings.worker, rollout_id, files, life)


def _print(explanation: Explanation, *, json: bool) -> None:
    if json:
        write_line(orjson.dumps(explanation.facts))
    else:
        write_line(as_text(explanation.facts).encode("utf-8", "replace"))


def report(
    file: Files = None,
    delivery: Annotated[
        str | None, typer.Option(help=f"Judge as {', '.join(VIEWS)}. Default: as published.")
    ] = None,
    max_mask_fraction: Annotated[
        float | None, typer.Option(min=0, max=1, help="Fail if more of the results are masked.")
    ] = None,
    min_samples: Annotated[
        int, typer.Option(min=0, help="Fail if there are fewer results: too few to judge.")
    ] = 0,
    policy_version: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The trainer's policy version, which results lag behind. Default: the newest in the results.",
            show_default=False,
        ),
    ] = None,
    broker: Broker = None,
    topic_prefix: TopicPrefix = None,
) -> None:
    """Sum all committed results up as one JSON object: masked and why, tokens, staleness."""
    if delivery not in (None, *VIEWS):
        raise InputError(f"unknown delivery {delivery!r}; there are {', '.join(VIEWS)}")
    totals = Report(delivery, policy_version)
    if file:
        bad = _count_files(file, totals)
    else:
        bad = run_async(_count_broker(load_settings(broker, topic_prefix), totals))
    write_line(orjson.dumps(totals.summary(), option=orjson.OPT_INDENT_2))
    failures = list(_failures(totals, max_mask_fraction, min_samples))
    for failure in failures:
        error_line(failure)
    if bad and file:
        raise typer.Exit(WRONG_INPUT)
    if failures or bad:
        raise typer.Exit(FAILED)


def _failures(totals: Report, max_mask_fraction: float | None, min_samples: int) -> Iterator[str]:
    if totals.results < min_samples:
        yield f"{counted(totals.results, 'result is', 'results are')} fewer than the {min_samples} that were asked for"
    if max_mask_fraction is not None and totals.masked_fraction > max_mask_fraction:
        yield (
            f"{totals.masked} of {counted(totals.results, 'result')} {agreeing(totals.masked, 'is', 'are')} masked "
            f"({totals.masked_fraction:.1%}), more than {max_mask_fraction:.1%}"
        )


def _count_files(names: list[str], totals: Report) -> int:
    """Returns how many lines were no results."""
    bad = 0
    require_files(names)
    with sources(names) as files:
        for source in files:
            for line in source.lines():
                try:
                    totals.add(codec.decode_result(line.raw))
                except InputError as error:
                    bad += 1
                    error_line(f"{line.where}: {error}")
    return bad


async def _count_broker(settings: Settings, totals: Report) -> int:
    """Returns how many records were no results."""
    bad: list[Any] = []

    def on_bad(error: BadResultError) -> None:
        bad.append(error)
        error_line(str(error))

    async with connect(settings, only_reading=True) as transport:
        reader = await transport.reader(Topic.TRAJECTORIES)
        try:
            async with aclosing(ResultReader(reader, on_bad).results()) as results:
                async for read in results:
                    totals.add(read.result)
        finally:
            await reader.close()
    return len(bad)
