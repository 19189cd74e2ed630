"""All benchmarks as one table.

    python -m tests.benchmarks [--only NAME ...] [--quick] [--rounds N] [--write FILE]

Rows on Kafka need KAFKA_BOOTSTRAP_SERVERS, or Docker or Java for a broker that is started here.
"""

from __future__ import annotations

import argparse
import logging
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import structlog

from freezepoint.errors import BrokerError
from kafka_local import LocalKafka, MissingToolError, check_machine
from tests.benchmarks.core import core_rows
from tests.benchmarks.growth import growth_rows
from tests.benchmarks.kafka import kafka_rows, servers
from tests.benchmarks.measuring import Row
from tests.benchmarks.pauses import build_rows, pause_rows
from tests.benchmarks.scaling import scaling_rows
from tests.benchmarks.store import store_rows

CORE = {"build", "plain", "packed", "size"}
KAFKA = {"json-100k", "packed-100k", "small-1k", "replay", "sink", "latency"}
NAMES = sorted({*CORE, *KAFKA, "store", "growth", "pauses", "workers"})
LIBRARIES = ("numpy", "orjson", "pydantic", "pybase64", "xxhash", "aiokafka")

METHOD = """\
Compared jobs take turns in one run (A B A B …), and every value is the median of the rounds' ratios, with the lowest and
the highest in brackets; a first round is not counted. What needs no broker and no disk is measured by the process's CPU
time, which a busy machine distorts least; the rest by the clock. The standard rollout has 100 calls, a first prompt of 8,000
tokens, 400 generated and 600 tool tokens a turn, ids uniform below 150,000, one message item of 200 characters a call:
108,000 tokens, 5.8 million received where prompts are sent whole. On Kafka, the bare consumer has the worker's client
settings (read committed, checksums on), and both are measured from their first batch to the last, the worker until
every result is committed; broker, worker and bare consumer share the machine, and the process is set up as `freezepoint
run` sets itself up. Latency has the worker and its client in one process, and counts after a first second. A load on Kafka
is 250 MB, 1 GB for the replay, 20 MB of small records. Beside a goal that is beyond what Python can do stands what any
worker has to do at the least, measured the same way.
"""


def run(only: Sequence[str], rounds: int, *, quick: bool) -> list[Row]:
    """Rows are printed as they come: the last ones need a broker, and brokers fail."""
    wanted = set(only or NAMES)
    rows: list[Row] = []

    def add(more: Iterable[Row]) -> None:
        for row in more:
            if row.name in wanted:
                rows.append(row)
                print(f"{row.name}: {row.value.text()} {row.unit}; {row.note}", file=sys.stderr, flush=True)

    if wanted & CORE:
        add(core_rows(rounds, quick=quick))
    if "store" in wanted:
        add(store_rows(rounds))
    if "workers" in wanted:
        add(scaling_rows(rounds, quick=quick))
    if "growth" in wanted:
        add(growth_rows(None if quick else Path("docs/growth.svg"), quick=quick))
    if "pauses" in wanted:
        add([*pause_rows(rounds, quick=quick), *build_rows(rounds)])
    if wanted & KAFKA:
        with _broker() as bootstrap:
            if bootstrap is not None:
                for name in sorted(wanted & KAFKA):
                    add(_tried(partial(kafka_rows, bootstrap, rounds, name.__eq__, quick=quick), name))
    return rows


def _tried(measure: Callable[[], list[Row]], name: str) -> list[Row]:
    try:
        return measure()
    except (TimeoutError, BrokerError) as error:
        print(f"{name}: left out, the broker failed: {error!r}", file=sys.stderr)
        return []


@contextmanager
def _broker() -> Iterator[str | None]:
    found = servers()
    if found is not None:
        yield found
        return
    try:
        check_machine()
    except MissingToolError as error:
        print(f"no broker, rows on Kafka are left out: {error}")
        yield None
        return
    with LocalKafka() as kafka:
        yield kafka.bootstrap


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| name | what | measured against | goal | median (min–max) | met | figures |",
        "|---|---|---|---|---|---|---|",
    ]
    words = {True: "yes", False: "no", None: "–"}
    lines += [
        f"| {row.name} | {row.what} | {row.against} | {row.goal_text} | {row.value.text()} {row.unit} | {words[row.met]} | "
        f"{row.note} |"
        for row in rows
    ]
    return "\n".join(lines)


def machine() -> str:
    """The kind of machine, nothing that tells which one."""
    cores = subprocess.run(["nproc"], capture_output=True, text=True, check=False).stdout.strip() or "?"
    info = Path("/proc/cpuinfo")
    models = (
        [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    model = models[0].partition(": ")[2] if models else platform.machine()
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    return f"{cores} cores, {model}, {platform.system()}; Python {platform.python_version()}, {libraries}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=NAMES, default=[], metavar="NAME", help=", ".join(NAMES)
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: whether they run, not how fast")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, help="also write the table there, with machine and method")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    text = table(run(options.only, options.rounds, quick=options.quick))
    print(text)
    if options.write is not None:
        head = f"# Benchmarks\n\nMade by `make bench`.\n\nMachine: {machine()}.\n\n{METHOD}\n"
        growth = "\n\n![Growth: time and memory over turns, open rollouts and partitions](growth.svg)\n"
        options.write.write_text(head + text + growth, encoding="utf-8")


if __name__ == "__main__":
    main()
