"""TokenSource: freeze a rollout by its complete event, and read its log back from the tokens topic."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from freezepoint.captured import CaptureSnapshot
from freezepoint.core.partition import PartitionConfig
from freezepoint.core.records import OutputRecord
from freezepoint.core.rollout import LogLimits
from freezepoint.core.snapshot import take_snapshot
from freezepoint.errors import ConfigurationError, ExpiredCaptureError, InputError, InvalidRolloutIdError
from freezepoint.settings import load
from freezepoint.source.batches import Batches
from freezepoint.source.ledger_view import LedgerView
from freezepoint.source.reading import RolloutFold, read_rollouts, start_of
from freezepoint.transport.connect import connect
from freezepoint.transport.ports import Producer, Transport
from freezepoint_schemas import codec
from freezepoint_schemas.events import RolloutComplete
from freezepoint_schemas.reasons import Reason
from freezepoint_schemas.topics import Topic, is_rollout_id

_TIMEOUT_S = 1.0  # of a fold whose clock runs only where the ledger says that a worker's did


@dataclass(frozen=True, slots=True)
class _Request:
    """A freeze that was asked for: the id as the caller knows it, and the event under the id on the broker."""

    asked_id: str
    event: RolloutComplete


class TokenSource:
    """Freezes rollouts and reads them back over Kafka or SQLite; a source as NeMo Gym defines it.

    A worker on the same topics takes the same event for its freeze point, and its result says the same. None is needed:
    without one each partition is read from its beginning. One instance for each event loop; it connects on first use.

    What a freeze costs: the ledger is read once, later what came since; then the rollout's partition from the ledger's
    watermark (below which nothing is open), or from the rollout's first record where the ledger knows it, to the complete
    event. Freezes that are asked for at the same time share all of that. A rollout that a worker froze before is read
    from the beginning of its partition.

    :param broker: ``kafka://host:port,…`` or ``sqlite:///file``; default: the settings' (environment, TOML file).
    :param run: stands before every rollout id on the broker, with a dot, as the sink was told.
    :param topic_prefix: as in the settings.
    :param deadline_s: give up after so many seconds without any progress.
    :param kafka: more of the ``kafka`` settings, by name; likewise ``sqlite`` and ``worker`` (its limits are kept).
    :raises ConfigurationError: an argument cannot be used.
    """

    def __init__(  # noqa: PLR0913 - each is a keyword that a configuration may name
        self,
        *,
        broker: str | None = None,
        run: str = "",
        topic_prefix: str | None = None,
        deadline_s: float = 30.0,
        kafka: Mapping[str, Any] | None = None,
        sqlite: Mapping[str, Any] | None = None,
        worker: Mapping[str, Any] | None = None,
    ) -> None:
        if run and not is_rollout_id(run):
            raise ConfigurationError(
                f"run {run!r} cannot begin a rollout id: letters, digits, '.', '_' and '-', beginning with a letter or digit"
            )
        if deadline_s <= 0:
            raise ConfigurationError("deadline_s must be above 0")
        self._settings = load(
            broker=broker, topic_prefix=topic_prefix, kafka=kafka, sqlite=sqlite, worker=worker
        )
        self._run = run
        self._deadline_s = float(deadline_s)
        self._transport: Transport = connect(self._settings)
        self._producer: Producer | None = None
        self._ledger: LedgerView | None = None
        self._batches = Batches(self._freeze_all)
        self._closed = False

    async def freeze(self, rollout_id: str, **fields: Any) -> CaptureSnapshot:
        """Publish the rollout's complete event and return the log that it freezes.

        Freezing again gives the same snapshot: the first event counts, whoever published it.

        :param fields: of ``RolloutComplete``, for the worker's result: ``n_calls``, ``reward``, ``metadata``, …
        :raises InputError: no rollout id, or a field that a complete event does not have.
        :raises ExpiredCaptureError: it was frozen before and the topic does not hold all of it any more.
        :raises BrokerError: the broker failed; freeze it again.
        :raises ConfigurationError: topics are missing, or the source is closed.
        """
        if self._closed:
            raise ConfigurationError("the source is closed")
        return await self._batches.submit(_Request(rollout_id, self._complete(rollout_id, fields)))

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:  # noqa: ARG002 - Gym's names
        """True: the topic's retention deletes records, nobody else does."""
        return True

    async def close(self) -> None:
        """Release everything; what is under way is cancelled. Closing again does nothing."""
        if not self._closed:
            self._closed = True
            await self._batches.close()
            await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _complete(self, rollout_id: Any, fields: Mapping[str, Any]) -> RolloutComplete:
        name = f"{self._run}.{rollout_id}" if self._run else rollout_id
        if not isinstance(rollout_id, str) or not rollout_id or not is_rollout_id(name):
            raise InvalidRolloutIdError(f"{repr(name)[:80]} is no valid rollout id")
        unknown = sorted(set(fields) - set(RolloutComplete.model_fields))
        if unknown:
            raise InputError(f"a complete event has no {', '.join(unknown)}")
        event = codec.event_from_object(name, {"event": "rollout_complete", **fields})
        assert isinstance(event, RolloutComplete)
        return event

    async def _open(self) -> tuple[Producer, LedgerView]:
        if self._producer is None or self._ledger is None:
            self._producer = await self._transport.producer()
            reader = await self._transport.reader(Topic.LEDGER)
            self._ledger = LedgerView(reader, self._settings.topics, self._deadline_s)
        return self._producer, self._ledger

    async def _freeze_all(self, requests: Sequence[_Request]) -> list[CaptureSnapshot | BaseException]:
        """The ledger is read before the events are published: what it then calls decided is not theirs."""
        producer, ledger = await self._open()
        await ledger.refresh()
        partitions = await self._transport.admin().partitions(Topic.TOKENS)
        positions = await producer.send([_record(request.event) for request in requests])
        folds: list[RolloutFold] = []
        by_partition: defaultdict[int, list[RolloutFold]] = defaultdict(list)
        for request, position in zip(requests, positions, strict=True):
            rollout_id, partition = request.event.rollout_id, position.partition
            decided = ledger.decided(partition, rollout_id)
            start = start_of(decided, ledger.watermark(partition))
            config = self._config(partition, partitions)
            folds.append(RolloutFold(rollout_id, config, decided, start, position.offset))
            by_partition[partition].append(folds[-1])
        failures = await asyncio.gather(
            *(
                read_rollouts(self._transport, partition, own, self._deadline_s)
                for partition, own in by_partition.items()
            ),
            return_exceptions=True,
        )
        failed = dict(zip(by_partition, failures, strict=True))
        return [
            failed[fold.config.partition] or await self._snapshot(request.asked_id, fold)
            for request, fold in zip(requests, folds, strict=True)
        ]

    def _config(self, partition: int, partitions: int) -> PartitionConfig:
        worker = self._settings.worker
        return PartitionConfig(
            topic_name=self._settings.topics[Topic.TOKENS],
            partition=partition,
            partition_count=partitions,
            group=worker.group,
            record_bytes_max=worker.record_bytes_max,
            limits=LogLimits(worker.rollout_bytes_max, worker.rollout_entries_max),
            rollout_timeout_s=_TIMEOUT_S,
        )

    async def _snapshot(self, asked_id: str, fold: RolloutFold) -> CaptureSnapshot | BaseException:
        log = fold.log
        if log is None:  # its own event was not there
            return ExpiredCaptureError(f"the complete event of rollout {fold.rollout_id} is not in the topic")
        taken = await asyncio.to_thread(take_snapshot, log)
        if fold.was_decided and fold.decided.snapshot_id not in (None, taken.id):
            return ExpiredCaptureError(
                f"rollout {fold.rollout_id} was frozen before, and what the topic holds of it is not what its worker saw: "
                "take the result that was published then"
            )
        incomplete = bool(taken.faults - {Reason.NO_RECORDS}) or not isinstance(log.closing, RolloutComplete)
        return CaptureSnapshot(asked_id, taken.id, taken.version, incomplete, log)


def _record(event: RolloutComplete) -> OutputRecord:
    return OutputRecord(Topic.TOKENS, event.rollout_id.encode("ascii"), codec.encode_event(event))
