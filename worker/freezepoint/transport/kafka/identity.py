"""What a topic is, whatever it is called: its id (KIP-516), which a topic deleted and created again does not keep. The
client's metadata requests end before the version that tells it."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any, ClassVar
from uuid import UUID

from aiokafka import errors as kafka
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import RequestStruct, Response
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

from freezepoint.transport.kafka.wire import if_answered

NOBODY = UUID(int=0)


class _Uuid(AbstractType[UUID]):  # type: ignore[misc] # the client is untyped
    @classmethod
    def encode(cls, value: UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> UUID:
        return UUID(bytes=data.read(16))


class _Answer(Response):  # type: ignore[misc] # the client is untyped
    API_KEY = 3
    API_VERSION = 10
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString("utf-8")),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_operations", Int32),
        ("tags", TaggedFields),
    )


class _Question(RequestStruct):  # type: ignore[misc] # the client is untyped
    FLEXIBLE_VERSION = True
    API_KEY = 3
    API_VERSION = 10
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(("topic_id", _Uuid), ("name", CompactString("utf-8")), ("tags", TaggedFields)),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_operations", Boolean),
        ("include_topic_operations", Boolean),
        ("tags", TaggedFields),
    )


class TopicIds:
    """Asks for one topic's id. To the client's connection it is a request like its own."""

    API_KEY: ClassVar[int] = 3

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> Any:
        """:raises IncompatibleBrokerVersion: topics have no ids before Kafka 2.8."""
        question = _Question([(NOBODY, self._topic, {})], False, False, False, {})
        return if_answered(question, versions, "tell topic ids (Kafka 2.8 can)")


def id_in(answer: Any) -> str | None:
    """The id, if the topic is there and has one."""
    ((code, name, topic_id, *_),) = answer.topics
    error = kafka.for_code(code)
    if error not in (kafka.NoError, kafka.UnknownTopicOrPartitionError):
        raise error(name)
    return str(topic_id) if topic_id != NOBODY else None
