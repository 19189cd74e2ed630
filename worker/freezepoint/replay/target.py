"""Where rebuilt results go: a results topic that no worker publishes to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from freezepoint.core.records import OutputRecord
from freezepoint.errors import ConfigurationError, InputError, MissingTopicError
from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from freezepoint.transport.ports import Producer
from freezepoint_schemas import codec
from freezepoint_schemas.results import Result
from freezepoint_schemas.topics import Topic


class ResultsElsewhere:
    """Publishes results again: at least once, each known by (rollout id, partition, freeze offset) like the first time."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    async def publish(self, result: Result) -> None:
        key = result.rollout_id.encode("ascii")
        await self._producer.send([OutputRecord(Topic.TRAJECTORIES, key, codec.encode_result(result))])


@asynccontextmanager
async def results_elsewhere(settings: Settings, topic_prefix: str) -> AsyncIterator[ResultsElsewhere]:
    """The results topic of another prefix on the same broker.

    :raises InputError: it is the prefix that a worker of these settings publishes to.
    :raises ConfigurationError: the topic is missing, or a worker publishes to it: its ledger is in use.
    """
    if topic_prefix == settings.topic_prefix:
        raise InputError(
            f"prefix {topic_prefix!r} is the worker's own: its results topic takes one result for each life. Name another"
        )
    async with connect(settings.model_copy(update={"topic_prefix": topic_prefix})) as broker:
        name = broker.names[Topic.TRAJECTORIES]
        mend = f"freezepoint topics apply --topic-prefix {topic_prefix}"
        try:
            await broker.extents(Topic.TRAJECTORIES)
        except MissingTopicError:
            raise MissingTopicError(f"topic {name} does not exist; create it: {mend}") from None
        try:
            ledger = await broker.extents(Topic.LEDGER)
        except MissingTopicError:
            ledger = {}
        if any(extent.end for extent in ledger.values()):
            raise ConfigurationError(
                f"{name} belongs to a worker ({broker.names[Topic.LEDGER]} is in use): name another prefix"
            )
        producer = await broker.producer()
        try:
            yield ResultsElsewhere(producer)
        finally:
            await producer.close()
