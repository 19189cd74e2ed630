"""A request the client does not have: IncrementalAlterConfigs (KIP-339). AlterConfigs, which it has, resets every
configuration of the topic that is not sent along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from aiokafka.errors import IncompatibleBrokerVersion
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
