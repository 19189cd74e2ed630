"""What a worker says of itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from heapq import nsmallest
from pathlib import Path
from typing import Any, Final

from freezepoint import __version__
from freezepoint.core.rollout import RolloutLog
from freezepoint.runner import PartitionRunner
from freezepoint.settings import HttpSettings
from freezepoint.worker import Worker
from freezepoint_schemas.topics import Topic

OPEN_MAX: Final = 50
"""How many open rollouts are listed: the oldest."""

_STATM: Final = Path("/proc/self/statm")
_PAGE_BYTES: Final = 4096
_BEGAN: Final = time.monotonic()


def alive(worker: Worker, http: HttpSettings) -> bool:
    """Whether the process does its work or has reason to wait; a rebalance is alive."""
    now = asyncio.get_running_loop().time()
    if worker.waiting_since is not None:
        return now - worker.waiting_since < http.broker_wait_s_max
    return worker.heartbeat_at == 0.0 or now - worker.heartbeat_at < http.turn_s_max


def ready(worker: Worker) -> bool:
    """Whether every assigned partition is acquired and restored; a worker that stands by without any is ready."""
    return worker.waiting_since is None and worker.session is not None and worker.session.settled


async def status(worker: Worker, http: HttpSettings) -> dict[str, Any]:
    """How the worker stands, for people and scripts. What producers chose stands in it as plain JSON text."""
    runners = [] if worker.session is None else worker.session.runners
    figures = worker.figures
    partitions = await asyncio.gather(*(runner.status() for runner in runners))
    lags = [partition["lag"] for partition in partitions]
    return {
        "version": __version__,
        "group": worker.settings.group,
        "topic": worker.transport.names[Topic.TOKENS],
        "uptime_seconds": round(time.monotonic() - _BEGAN, 1),
        "alive": alive(worker, http),
        "ready": ready(worker),
        "lag": None if None in lags else sum(lags),
        "standing": dict(figures.standing()),
        "memory": {"resident_bytes": _resident_bytes(), "budget_bytes": worker.settings.memory_bytes_max},
        "per_second": figures.recent.per_second(asyncio.get_running_loop().time(), figures.counts),
        "counts": dict(sorted(figures.counts.items())),
        "partitions": sorted(partitions, key=lambda partition: partition["partition"]),
        "open": _open(runners),
        **figures.recent.as_json(),
    }


def _open(runners: list[PartitionRunner]) -> list[dict[str, Any]]:
    """The oldest open rollouts."""
    now_ms = time.time() * 1000
    oldest = nsmallest(OPEN_MAX, _lives(runners), key=lambda found: found[1].opened_ms)
    return [
        {
            "rollout_id": life.rollout_id,
            "partition": runner.lease.partition,
            "first_offset": life.first_offset,
            "age_seconds": round(max(0.0, now_ms - life.opened_ms) / 1000, 1) if life.opened_ms else None,
            "idle_seconds": round(max(0.0, runner.core.clock.now - life.active_at), 1),
            "calls": life.calls,
            "size_bytes": life.size_bytes,
        }
        for runner, life in oldest
    ]


def _lives(runners: list[PartitionRunner]) -> Iterator[tuple[PartitionRunner, RolloutLog]]:
    for runner in runners:
        for life in runner.core.open.values():
            yield runner, life


def _resident_bytes() -> int | None:
    """What the process holds of the machine's memory; None where the system does not say it so."""
    try:
        return int(_STATM.read_text("ascii").split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None
