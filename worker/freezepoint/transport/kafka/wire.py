"""Requests the client does not have. IncrementalAlterConfigs (KIP-339): AlterConfigs, which it has, resets every
configuration of the topic that is not sent along. What a user may do to a topic or a group (KIP-430)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.admin import DescribeGroupsResponse_v3
from aiokafka.protocol.api import RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Int8, Int16, Int32, Schema, String

TOPIC_RESOURCE = 2
SET = 0


class IncrementalAlterConfigsResponse(Response):  # type: ignore[misc] # the client is untyped
    API_KEY = 44
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "responses",
            Array(
                ("error_code", Int16),
                ("error_message", String("utf-8")),
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
            ),
        ),
    )


class _Request(RequestStruct):  # type: ignore[misc] # the client is untyped
    API_KEY = 44
    API_VERSION = 0
    RESPONSE_TYPE = IncrementalAlterConfigsResponse
    SCHEMA = Schema(
        (
            "resources",
            Array(
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
                (
                    "configs",
                    Array(("name", String("utf-8")), ("config_operation", Int8), ("value", String("utf-8"))),
                ),
            ),
        ),
        ("validate_only", Boolean),
    )


class SetTopicConfigs:
    """Sets the given values of one topic and touches no other. To the client's connection it is a request like its own."""

    API_KEY: ClassVar[int] = 44

    def __init__(self, topic: str, values: Mapping[str, str]) -> None:
        self._resources = [(TOPIC_RESOURCE, topic, [(name, SET, value) for name, value in values.items()])]

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> Any:
        if self.API_KEY not in versions:
            raise IncompatibleBrokerVersion(
                "the broker cannot alter configurations incrementally (Kafka 2.3 can)"
            )
        return _Request(self._resources, False)


class TopicRightsResponse(Response):  # type: ignore[misc] # the client is untyped
    API_KEY = 3
    API_VERSION = 8
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            Array(
                ("node_id", Int32),
                ("host", String("utf-8")),
                ("port", Int32),
                ("rack", String("utf-8")),
            ),
        ),
        ("cluster_id", String("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            Array(
                ("error_code", Int16),
                ("topic", String("utf-8")),
                ("is_internal", Boolean),
                (
                    "partitions",
                    Array(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", Array(Int32)),
                        ("isr", Array(Int32)),
                        ("offline_replicas", Array(Int32)),
                    ),
                ),
                ("operations", Int32),
            ),
        ),
        ("cluster_operations", Int32),
    )


class TopicRights(RequestStruct):  # type: ignore[misc] # the client is untyped
    """Metadata of topics with what this user may do to each (KIP-430); creates none."""

    API_KEY = 3
    API_VERSION = 8
    RESPONSE_TYPE = TopicRightsResponse
    SCHEMA = Schema(
        ("topics", Array(String("utf-8"))),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_operations", Boolean),
        ("include_topic_operations", Boolean),
    )

    @classmethod
    def of(cls, topics: Sequence[str]) -> TopicRights:
        return cls(list(topics), False, False, True)

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> Any:
        return if_answered(self, versions, "tell a user's rights on topics (Kafka 2.3 can)")


class GroupRightsResponse(Response):  # type: ignore[misc] # the client is untyped
    API_KEY = 15
    API_VERSION = 3
    SCHEMA = DescribeGroupsResponse_v3.SCHEMA


class GroupRights(RequestStruct):  # type: ignore[misc] # the client is untyped
    """A group's state with what this user may do to it. The client's own request of this version reads the answer by the
    layout of the version before, without the rights."""

    API_KEY = 15
    API_VERSION = 3
    RESPONSE_TYPE = GroupRightsResponse
    SCHEMA = Schema(("groups", Array(String("utf-8"))), ("include_authorized_operations", Boolean))

    @classmethod
    def of(cls, group: str) -> GroupRights:
        return cls([group], True)

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> Any:
        return if_answered(self, versions, "tell a user's rights on groups (Kafka 2.3 can)")


def if_answered(request: RequestStruct, versions: Mapping[int, tuple[int, int]], what: str) -> RequestStruct:
    """The request, in the one version that we know of it.

    :raises IncompatibleBrokerVersion: the broker does not answer that; ``what`` it then cannot do.
    """
    first, last = versions.get(request.API_KEY, (0, -1))
    if not first <= request.API_VERSION <= last:
        raise IncompatibleBrokerVersion(f"the broker cannot {what}")
    return request
