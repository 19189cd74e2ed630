"""Writes the page of a worker's metrics from the one list of them in the code: ``python metrics_page.py docs/metrics.md``."""

import sys
from collections.abc import Iterator
from pathlib import Path

from freezepoint.telemetry.figures import LATENCY_BOUNDS_S
from freezepoint.telemetry.metrics import COUNTERS, FREEZE_TO_PUBLISH, GAUGES, LABELLED

HEAD = """# Metrics

Written by `make metrics` from the list in `worker/freezepoint/telemetry/metrics.py`. A worker serves them at `/metrics`, once
`http.port` is set. They are of one process: counters begin at 0 with it, and what a partition's new owner replays is
counted anew under `freezepoint_records_consumed_total`. Rollout ids are never labels.

[operations.md](operations.md) says what to watch, `deploy/prometheus/alerts.yaml` what to be woken by, and
`deploy/grafana/dashboard.json` shows every one of them.
"""


def page() -> str:
    """The whole page, in Markdown."""
    return "\n".join([HEAD, *_counters(), *_gauges(), *_histogram()])


def _counters() -> Iterator[str]:
    yield from _table("Counters", "metric", "labels")
    for name, (_, meaning) in COUNTERS.items():
        yield f"| `{name}_total` | | {meaning} |"
    for name, (_, label, meaning) in LABELLED.items():
        yield f"| `{name}_total` | `{label}` | {meaning} |"
    yield ""


def _gauges() -> Iterator[str]:
    yield from _table("Gauges", "metric")
    for name, meaning in GAUGES.items():
        yield f"| `{name}` | {meaning} |"
    yield ""


def _histogram() -> Iterator[str]:
    name, meaning = FREEZE_TO_PUBLISH
    bounds = ", ".join(f"{bound:g}" for bound in LATENCY_BOUNDS_S)
    yield from _table("Histogram", "metric", "buckets")
    yield f"| `{name}` | {bounds} s | {meaning} |"
    yield ""


def _table(title: str, *columns: str) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| " + " | ".join([*columns, "meaning"]) + " |"
    yield "|---" * (len(columns) + 1) + "|"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
