"""Results for trainers. Reading guide: ``trainer`` (what is used), ``engine`` (reading, on a loop of its own), ``book`` and
``acks`` (what a restart reads again), ``groups`` (prompt groups), ``results`` (records to results, with or without a
group)."""

from freezepoint.reader.counts import ReaderCounts
from freezepoint.reader.results import BadResultError, ReadResult, ResultReader
from freezepoint.reader.trainer import BlockingReader, TrajectoryReader
from freezepoint.reader.trajectory import DeliveryId, Lag, RolloutGroup, Trajectory

__all__ = [
    "BadResultError",
    "BlockingReader",
    "DeliveryId",
    "Lag",
    "ReadResult",
    "ReaderCounts",
    "ResultReader",
    "RolloutGroup",
    "Trajectory",
    "TrajectoryReader",
]
