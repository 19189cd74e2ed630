"""What a reader knows of its partitions: what is open in each, what is stored for the group, what came before."""

from __future__ import annotations

from collections import OrderedDict

from freezepoint.core.records import InputRecord
from freezepoint.reader.acks import AckWatermark, Claim
from freezepoint.reader.counts import ReaderCounts
from freezepoint.reader.results import ReadResult, ResultDecoder
from freezepoint.reader.trajectory import DeliveryId, Trajectory
from freezepoint.settings import ReaderSettings


class PartitionBook:
    """One for a reader. A partition that is started anew gets a new watermark, and claims on the old one are void."""

    def __init__(self, settings: ReaderSettings, counts: ReaderCounts) -> None:
        self._counts = counts
        self._decoder = ResultDecoder(settings.result_bytes_max)
        self._watermarks: dict[int, AckWatermark] = {}
        self._stored: dict[int, int] = {}
        self._known: OrderedDict[DeliveryId, Claim] = OrderedDict()
        self._known_max = settings.remembered_results_max

    def __contains__(self, partition: int) -> bool:
        """Whether its delivery has begun."""
        return partition in self._watermarks

    def start(self, partition: int, offset: int) -> None:
        """Delivery of the partition begins anew there."""
        self.drop(frozenset({partition}))
        self._watermarks[partition] = AckWatermark(offset)
        self._stored[partition] = offset

    def drop(self, partitions: frozenset[int]) -> None:
        """They are not ours any more. Results that were not acknowledged are new to us when they come again."""
        dropped = {
            self._watermarks.pop(partition) for partition in partitions if partition in self._watermarks
        }
        for partition in partitions:
            self._stored.pop(partition, None)
            self._decoder.forget(partition)
        open_ids = [
            name
            for name, claim in self._known.items()
            if claim.watermark in dropped and claim.watermark.is_open(claim.first_offset)
        ]
        for name in open_ids:
            del self._known[name]

    def take(self, record: InputRecord) -> ReadResult | None:
        """The result that this record is or completes. :raises BadResultError: it is none."""
        self._watermarks[record.partition].position = record.offset + 1
        return self._decoder.take(record)

    def open(self, read: ReadResult) -> Claim:
        """The claim of a result just read."""
        watermark = self._watermarks[read.partition]
        watermark.open(read.first_offset)
        return Claim(watermark, read.partition, read.first_offset)

    def is_repeat(self, trajectory: Trajectory) -> bool:
        """Whether it was read before, and acknowledged or not yet; remembered from now on in any case."""
        name = trajectory.delivery_id
        if name in self._known:
            self._known.move_to_end(name)
            return True
        self._known[name] = trajectory.claim
        if len(self._known) > self._known_max:
            self._known.popitem(last=False)
        return False

    def ack(self, claim: Claim) -> bool:
        """Whether it was open, in a partition that is ours."""
        if self._watermarks.get(claim.partition) is not claim.watermark:
            return False
        return claim.watermark.ack(claim.first_offset)

    def ack_by_trainer(self, claim: Claim) -> None:
        """As :meth:`ack`, counted."""
        if self._watermarks.get(claim.partition) is not claim.watermark:
            self._counts.lost_acks += 1
        elif claim.watermark.ack(claim.first_offset):
            self._counts.acked += 1

    def uncommitted(self) -> dict[int, int]:
        """Where the group could go on and does not yet, by partition."""
        lows = {
            partition: watermark.low(self._decoder.first_open(partition))
            for partition, watermark in self._watermarks.items()
        }
        return {partition: low for partition, low in lows.items() if low > self._stored[partition]}

    def committed(self, offsets: dict[int, int]) -> None:
        """These are stored."""
        for partition, offset in offsets.items():
            if partition in self._stored:
                self._stored[partition] = max(offset, self._stored[partition])
