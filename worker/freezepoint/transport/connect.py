"""From a broker URL to a transport. Clients are imported only when they are used: the reader of one never pays for the other."""

from __future__ import annotations

import re
from pathlib import Path

from freezepoint.addresses import names_a_host
from freezepoint.errors import ConfigurationError
from freezepoint.settings import Settings
from freezepoint.transport.ports import Broker

KAFKA_SCHEME = "kafka://"
SQLITE_SCHEME = "sqlite:///"
PREFIX_CHARS_MAX = 200
"""Kafka's names end at 249 characters, and ours come behind the prefix."""
_SERVER = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]]+)(?::(\d{1,5}))?")
_PREFIX = re.compile(rf"[A-Za-z0-9._-]{{0,{PREFIX_CHARS_MAX}}}")


def connect(settings: Settings, *, only_reading: bool = False) -> Broker:
    """The transport that ``settings.broker`` names; it connects on first use.

    :param only_reading: nothing is created: a file that is not there is an error, and one that may not be written no
        hindrance.

    :raises ConfigurationError: no such scheme or nothing behind it, a server that is none, or a prefix no topic can have.
    """
    url = settings.broker
    if not _PREFIX.fullmatch(settings.topic_prefix):
        raise ConfigurationError(
            f"topic prefix {settings.topic_prefix[:80]!r} cannot begin a topic's name: letters, digits, '.', '_' and '-' can, "
            f"at most {PREFIX_CHARS_MAX}; set --topic-prefix or FREEZEPOINT_TOPIC_PREFIX"
        )
    if url.startswith(KAFKA_SCHEME) and url[len(KAFKA_SCHEME) :]:
        from freezepoint.transport.kafka import KafkaTransport  # noqa: PLC0415 - imported when used

        return KafkaTransport(_servers(url), settings.topics, settings.kafka)
    if url.startswith(SQLITE_SCHEME) and url[len(SQLITE_SCHEME) :]:
        from freezepoint.transport.sqlite import SqliteTransport  # noqa: PLC0415 - imported when used

        path = Path(url[len(SQLITE_SCHEME) :])
        return SqliteTransport(path, settings.topics, settings.sqlite, only_reading=only_reading)
    raise ConfigurationError(
        f"broker {url!r} is neither kafka://host:port[,host:port...] nor sqlite:///file; set --broker or FREEZEPOINT_BROKER"
    )


def _servers(url: str) -> str:
    """What stands behind the scheme, checked: a port that there is not fails only after minutes of trying, or not at all."""
    servers = url[len(KAFKA_SCHEME) :]
    for server in servers.split(","):
        match = _SERVER.fullmatch(server)
        if match is None or not names_a_host(match[1]) or not 0 < int(match[2] or 9092) < 1 << 16:
            raise ConfigurationError(
                f"broker {url!r}: {server!r} is no host:port; write kafka://host:port[,host:port...] in --broker or "
                "FREEZEPOINT_BROKER"
            )
    return servers
