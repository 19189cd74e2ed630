"""``python -m tests.chaos``: play the scenarios against a real broker and print what was measured."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos import page
from tests.chaos.broker import ChaosBroker
from tests.chaos.figures import Report, summary
from tests.chaos.registry import DEFAULT_SECONDS, Scenario, all_scenarios, play


def main() -> int:
    """0 if every figure of every scenario was as expected."""
    options = options_of(sys.argv[1:])
    known = all_scenarios()
    if options.list:
        for scenario in known.values():
            print(f"{scenario.name:<24}{scenario.row}")
        return 0
    unknown = set(options.only) - known.keys()
    if unknown:
        print(f"no scenario is called {', '.join(sorted(unknown))}: see --list", file=sys.stderr)
        return 2
    chosen = [known[name] for name in options.only] or list(known.values())
    folder = options.logs or Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"seed {options.seed}, logs in {folder}", flush=True)
    reports = asyncio.run(_play_all(chosen, folder, options))
    print("\n".join(["", *summary(reports)]))
    if options.write is not None:
        seconds = sum(report.seconds for report in reports)
        results = sum(report.results for report in reports)
        run = f"Seed {options.seed}, {seconds / 60:.0f} minutes on {os.cpu_count()} cores: {len(reports)} scenarios"
        page.write(options.write, reports, f"{run}, {results:,} results checked.", list(known))
    return 0 if all(report.ok for report in reports) else 1


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the scenarios and the rows they play")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this one (repeatable)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="what is random follows from it")
    parser.add_argument(
        "--duration", type=float, default=DEFAULT_SECONDS, help="seconds of load of a scenario (%(default)g)"
    )
    parser.add_argument("--logs", type=Path, help="where the workers' logs go (default: a new folder)")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help="put the figures into this page, with --only in the place of these scenarios'",
    )
    return parser.parse_args(arguments)


async def _play_all(chosen: list[Scenario], folder: Path, options: argparse.Namespace) -> list[Report]:
    reports: list[Report] = []
    async with ChaosBroker() as broker:
        for scenario in chosen:
            report = await play(scenario, broker, folder, seed=options.seed, seconds=options.duration)
            reports.append(report)
            print("\n".join(report.lines()), flush=True)
    return reports


if __name__ == "__main__":
    sys.exit(main())
