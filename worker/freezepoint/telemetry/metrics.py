"""Every metric of a worker, in one list, read from its figures when somebody asks.

Rollout ids are never labels: there are too many of them. Lag is what Kafka's own tools export.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from freezepoint.telemetry.figures import LATENCY_BOUNDS_S, Figures

COUNTERS = {
    "freezepoint_records_consumed": ("records", "Records folded in, replayed ones included."),
    "freezepoint_records_past": ("past", "Replayed records that a result or a carried log holds already."),
    "freezepoint_duplicates": ("duplicate", "Records that repeated what was recorded."),
    "freezepoint_conflicts": ("conflict", "Records that contradicted what was recorded under their call id."),
    "freezepoint_ignored_after_freeze": (
        "ignored_after_freeze",
        "Completes and cancellations after a freeze.",
    ),
    "freezepoint_rollouts_cleared": ("cleared", "Open rollouts forgotten by a clear."),
    "freezepoint_rollouts_timed_out": ("timed_out", "Rollouts frozen because nothing came for too long."),
    "freezepoint_rollouts_oversized": ("oversized", "Rollouts above the limit of bytes or entries."),
    "freezepoint_rollouts_expired": ("input_expired", "Rollouts that lost records to retention."),
    "freezepoint_offsets_expired_unread": (
        "unread_offsets",
        "Offsets that retention took before they were ever read.",
    ),
    "freezepoint_rollouts_carried": ("carried", "Old open rollouts written into the ledger."),
    "freezepoint_mask_alarms": ("mask_alarms", "Windows of results of which too many were masked."),
    "freezepoint_leases_lost": ("leases_lost", "Partitions whose transaction failed or whose owner changed."),
    "freezepoint_intake_pauses": ("intake_pauses", "Times a partition's intake paused for want of room."),
}
"""Counters without labels: metric name -> (figure, meaning)."""

LABELLED = {
    "freezepoint_results_published": ("result.", "outcome", "Results published, delivered or masked."),
    "freezepoint_masked": ("masked.", "reason", "Masked results by reason; a result may have several."),
    "freezepoint_dead_letters": ("published_dead_letter.", "reason", "Dead letters published."),
}
"""Counters with a label: metric name -> (prefix of the figures, label, meaning)."""

GAUGES = {
    "freezepoint_partitions": "Partitions at work here.",
    "freezepoint_rollouts_open": "Rollouts that are being recorded.",
    "freezepoint_oldest_open_rollout_seconds": "Age of the oldest open rollout, by its first record's append time.",
    "freezepoint_replay_bytes": "What a restart would have to read again, over all partitions.",
    "freezepoint_memory_bytes": "Payload of open rollouts in memory, about.",
    "freezepoint_spooled_bytes": "Payload of open rollouts in the spool.",
    "freezepoint_spool_limit_bytes": "worker.spool_bytes_max: from nine tenths of it on intake pauses.",
    "freezepoint_pending_bytes": "What waits to be built or published.",
    "freezepoint_intake_paused": "Partitions whose intake is paused.",
    "freezepoint_intake_stands_still": "1 while the spool is at its limit and nothing in flight can free room.",
}
"""Gauges: metric name -> meaning; the figure has the name's last part."""

FREEZE_TO_PUBLISH = (
    "freezepoint_freeze_to_publish_seconds",
    "From the freeze of a rollout to the commit of its result.",
)


class WorkerMetrics(Collector):
    """The metrics of one worker's figures, as Prometheus reads them."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        counts = self._figures.counts
        for name, (figure, meaning) in COUNTERS.items():
            yield CounterMetricFamily(name, meaning, value=counts[figure])
        for name, (prefix, label, meaning) in LABELLED.items():
            family = CounterMetricFamily(name, meaning, labels=[label])
            for figure, value in sorted(counts.items()):
                if figure.startswith(prefix):
                    family.add_metric([figure.removeprefix(prefix)], value)
            yield family
        standing = self._figures.standing()
        for name, meaning in GAUGES.items():
            yield GaugeMetricFamily(name, meaning, value=standing.get(name.removeprefix("freezepoint_"), 0))
        yield self._latency()

    def _latency(self) -> Metric:
        latency = self._figures.freeze_to_publish
        bounds = [*map(str, LATENCY_BOUNDS_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(latency.buckets), strict=True))
        return HistogramMetricFamily(*FREEZE_TO_PUBLISH, buckets=buckets, sum_value=latency.sum_s)


def exposition(figures: Figures) -> bytes:
    """The worker's metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(figures))
    return generate_latest(registry)
