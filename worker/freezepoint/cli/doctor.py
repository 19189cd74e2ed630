"""``doctor``: what a worker depends on, each with a verdict and what mends it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated

import orjson
import typer

from freezepoint.cli.common import FAILED, Broker, TopicPrefix, load_settings, run_async, write_line
from freezepoint.doctor import examine
from freezepoint.transport.ports import Check

LABELS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(epilog="Example: freezepoint doctor --json")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="All checks as one JSON object.")] = False,
    probe_clock: Annotated[
        bool,
        typer.Option(
            "--probe-clock",
            help="Measure the broker's clock by a record that is never committed. Takes Write on the tokens topic.",
        ),
    ] = False,
    broker: Broker = None,
    topic_prefix: TopicPrefix = None,
) -> None:
    """Look at everything a worker depends on; each line a verdict, below it what mends it. Fails if one check does."""
    checks = run_async(
        _collect(examine(load_settings(broker, topic_prefix), probe_clock=probe_clock), as_json)
    )
    failed = any(check.verdict == "fail" for check in checks)
    if as_json:
        body = {"ok": not failed, "checks": [asdict(check) for check in checks]}
        write_line(orjson.dumps(body, option=orjson.OPT_INDENT_2))
    if failed:
        raise typer.Exit(FAILED)


async def _collect(found: AsyncIterator[Check], quiet: bool) -> list[Check]:
    checks = []
    async for check in found:
        checks.append(check)
        if not quiet:
            write_line(_line(check).encode(), flush=True)
    return checks


def _line(check: Check) -> str:
    """What mends it stands below, but where the message says it itself."""
    line = f"{LABELS[check.verdict]} {check.subject}: {check.message.removeprefix(f'{check.subject}: ')}"
    told = check.mend is None or check.mend in check.message
    return line if told else f"{line}\n     mend: {check.mend}"
