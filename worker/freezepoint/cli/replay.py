"""``replay``: results rebuilt from the tokens topic, and dead letters put back onto it."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Annotated

import orjson
import typer

from freezepoint.cli.common import (
    FAILED,
    Broker,
    TopicPrefix,
    load_settings,
    note,
    run_async,
    warning_line,
    write_line,
)
from freezepoint.collector import young_collections
from freezepoint.errors import InputError
from freezepoint.projections import Projection, line_of
from freezepoint.replay import Filters, Selection, put_back, rebuild, results_elsewhere
from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from freezepoint.wording import agreeing, counted
from freezepoint_schemas.reasons import DeadLetterReason, Reason
from freezepoint_schemas.topics import Topic, is_rollout_id


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(epilog="Example: freezepoint replay --dead-letters --dry-run")(replay)


def replay(
    rollout_id: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ROLLOUT_ID]...", help="Rebuild these.", show_default=False),
    ] = None,
    id_file: Annotated[
        Path | None,
        typer.Option(
            "--ids", metavar="PATH", help="More of them, one a line; - is stdin.", show_default=False
        ),
    ] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Rebuild what froze in it.")] = None,
    first: Annotated[int, typer.Option("--from", min=0, help="… at this offset or later.")] = 0,
    end: Annotated[int | None, typer.Option("--to", min=0, help="… before this offset.")] = None,
    all_partitions: Annotated[bool, typer.Option("--all", help="Rebuild what froze in all of them.")] = False,
    to_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX",
            help="Publish to the results topic of this prefix, never the worker's own. Default: stdout.",
            show_default=False,
        ),
    ] = None,
    projection: Annotated[Projection, typer.Option(help="Form on stdout.")] = Projection.TRACE,
    dead_letters: Annotated[
        bool, typer.Option("--dead-letters", help="Put dead letters back onto the tokens topic instead.")
    ] = False,
    reason: Annotated[
        list[str] | None, typer.Option(help="Only letters of this reason (repeatable).", show_default=False)
    ] = None,
    rekey: Annotated[
        bool, typer.Option("--rekey", help="Letters without a usable key get the rollout id of their body.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be put back.")] = False,
    builder: Annotated[str | None, typer.Option(help="prefix_merging (default) or per_request.")] = None,
    delivery: Annotated[
        str | None, typer.Option(help="single_response (default), all_traces or per_request.")
    ] = None,
    broker: Broker = None,
    topic_prefix: TopicPrefix = None,
) -> None:
    """Rebuild results from the tokens topic (to stdout, or to another results topic), or put dead letters back.

    A rebuilt result that is not what was published, by the ledger, is reported and not handed out. Dead letters are put back once,
    however often this runs; those of rollouts that are frozen or cleared stay where they are. One JSON line tells
    what became of each.
    """
    ids = _ids(rollout_id or [], id_file)
    settings = load_settings(broker, topic_prefix, worker={"builder": builder, "delivery": delivery})
    if dead_letters:
        run_async(_put_back(settings, Filters(_reasons(reason or []), ids, rekey), dry_run=dry_run))
        return
    if dry_run or reason or rekey:
        raise InputError("--dry-run, --reason and --rekey go with --dead-letters")
    if not ids and partition is None and not all_partitions:
        raise InputError("name rollouts, a --partition or --all; or --dead-letters")
    if ids and (partition is not None or all_partitions):
        raise InputError("name either rollouts or a range, not both")
    selection = Selection(ids, partition, first, end)
    if not run_async(_rebuild(settings, selection, projection, to_prefix)):
        raise typer.Exit(FAILED)


def _ids(named: list[str], listed: Path | None) -> frozenset[str]:
    text = "" if listed is None else sys.stdin.read() if str(listed) == "-" else listed.read_text("utf-8")
    found = [*named, *text.split()]
    for name in found:
        if not is_rollout_id(name):
            raise InputError(f"{name!r} is no valid rollout id")
    return frozenset(found)


def _reasons(given: list[str]) -> frozenset[str]:
    known = {code.value for code in (*Reason, *DeadLetterReason)}
    for name in given:
        if name not in known:
            raise InputError(f"unknown reason {name!r}; there are {', '.join(sorted(known))}")
    return frozenset(given)


async def _rebuild(
    settings: Settings, selection: Selection, projection: Projection, to_prefix: str | None
) -> bool:
    """Whether all that was asked for was handed out."""
    counts: Counter[str] = Counter()
    missing = set(selection.rollout_ids)
    async with AsyncExitStack() as stack:
        stack.enter_context(young_collections())
        target = None
        if to_prefix is not None:
            target = await stack.enter_async_context(results_elsewhere(settings, to_prefix))
        broker = await stack.enter_async_context(connect(settings, only_reading=True))
        found = await stack.enter_async_context(aclosing(rebuild(broker, settings, selection)))
        async for rebuilt in found:
            result = rebuilt.result
            missing.discard(result.rollout_id)
            if rebuilt.agrees is False:
                counts["differ"] += 1
                warning_line(
                    f"rollout {result.rollout_id}: not handed out: the topic does not hold what was published any more"
                )
                continue
            counts["masked" if result.mask_sample else "delivered"] += 1
            counts["unproved"] += rebuilt.agrees is None
            if target is None:
                write_line(line_of(result, projection))
            else:
                await target.publish(result)
    for name in sorted(missing):
        warning_line(f"rollout {name}: nothing of it is frozen in the topic")
    note(
        f"{counted(counts['masked'] + counts['delivered'], 'result')} rebuilt ({counts['masked']} masked, {counts['unproved']} of "
        f"which the ledger does not speak), {counted(counts['differ'], 'differs', 'differ')} from what was published, "
        f"{len(missing)} not found"
    )
    return not counts["differ"] and not missing


async def _put_back(settings: Settings, filters: Filters, *, dry_run: bool) -> None:
    counts: Counter[bool] = Counter()
    async with connect(settings, only_reading=True) as there:
        await there.extents(Topic.DEAD_LETTERS)
    async with connect(settings) as broker, aclosing(put_back(broker, filters, dry_run=dry_run)) as fates:
        async for fate in fates:
            counts[fate.why is None] += 1
            said = {"origin": fate.origin, "rollout_id": fate.rollout_id, "reason": fate.reason}
            why_not = "dry run" if dry_run and fate.why is None else fate.why
            write_line(orjson.dumps({**said, "put_back": why_not is None, "why_not": why_not}), flush=True)
    were = agreeing(counts[True], "was", "were")
    done = f"{counted(counts[True], 'dead letter')} {'would be' if dry_run else were} put back"
    note(f"{done}, {counted(counts[False], 'stays', 'stay')}")
