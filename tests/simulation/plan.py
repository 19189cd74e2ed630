"""One seed's choices: how large, how long, which settings, which faults."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from freezepoint.settings import WorkerSettings

FAULTS = (
    "kill",
    "kill",
    "kill",
    "kill_all",
    "stop",
    "stop",
    "shutdown",
    "visitor",
    "visitor",
    "outage",
    "crash",
    "crash",
    "cut",
    "cut",
    "loss",
    "loss",
    "loss",
    "slowness",
    "slowness",
    "stall",
    "stall",
    "offsets_deleted",
    "compaction",
    "clock",
    "hanging_transaction",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """``active_s``: for how long producers publish and faults happen. ``slow_feed``: the fold yields after every record.

    ``faults``: (when, what), in order.
    """

    seed: int
    partitions: int
    workers: int
    producers: int
    rollouts: int
    active_s: float
    build_delay_s: float
    output_bytes_max: int
    slow_feed: bool
    truncates: bool
    settings: WorkerSettings
    faults: tuple[tuple[float, str], ...]

    @classmethod
    def draw(cls, seed: int) -> Plan:
        rng = random.Random(f"plan {seed}")
        timeout_s = rng.choice([40.0, 60.0, 100.0, 100.0, 300.0, 3_600.0])
        active_s = rng.uniform(15.0, 70.0)
        truncates = rng.random() < 0.08
        faults = [(rng.uniform(0.0, active_s), rng.choice(FAULTS)) for _ in range(rng.randint(2, 10))]
        if truncates:
            faults.append((rng.uniform(0.0, active_s), "truncation"))
        return cls(
            seed=seed,
            partitions=rng.randint(1, 3),
            workers=rng.randint(1, 3),
            producers=rng.randint(2, 4),
            rollouts=rng.randint(6, 14),
            active_s=active_s,
            build_delay_s=rng.choice([0.0, 3.0, 30.0]),
            output_bytes_max=rng.choice([2_048, 1_000_000]),
            slow_feed=rng.random() < 0.5,
            truncates=truncates,
            settings=WorkerSettings(**_settings(rng, timeout_s)),
            faults=tuple(sorted(faults)),
        )


def _settings(rng: random.Random, timeout_s: float) -> dict[str, Any]:
    return {
        "poll_timeout_ms": 5_000,
        "poll_records_max": rng.choice([3, 20, 500]),
        "flush_interval_ms": rng.choice([0, 5, 50]),
        "transaction_results_max": rng.choice([1, 3, 200]),
        "progress_interval_ms": rng.choice([500, 5_000]),
        "pending_bytes_max": rng.choice([1_024, 1 << 20]),
        "memory_bytes_max": rng.choice([0, 20_000, 1 << 24, 1 << 24]),
        "replay_bytes_max": rng.choice([0, 500, 4_000, 1 << 24]),
        "inline_build_bytes_max": rng.choice([0, 0, 4_000, 1 << 20]),
        "rollout_timeout_s": timeout_s,
        "stall_timeout_s": rng.choice([50.0, 600.0, 600.0]),
        "shutdown_timeout_s": rng.choice([1.0, 30.0]),
        "topic_check_interval_s": 20.0,
    }
