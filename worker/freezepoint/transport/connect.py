"""From a broker URL to a transport. Clients are imported only when they are used: the reader of one never pays for the other."""

from __future__ import annotations

from pathlib import Path

from freezepoint.errors import ConfigurationError
from freezepoint.settings import Settings
from freezepoint.transport.ports import Broker

KAFKA_SCHEME = "kafka://"
SQLITE_SCHEME = "sqlite:///"


def connect(settings: Settings, *, only_reading: bool = False) -> Broker:
    """The transport that ``settings.broker`` names; it connects on first use.

    :param only_reading: nothing is created: a file that is not there is an error, and one that may not be written no
        hindrance.

    :raises ConfigurationError: no such scheme, or nothing behind it.
    """
    url = settings.broker
    if url.startswith(KAFKA_SCHEME) and url[len(KAFKA_SCHEME) :]:
        from freezepoint.transport.kafka import KafkaTransport  # noqa: PLC0415 - imported when used

        return KafkaTransport(url[len(KAFKA_SCHEME) :], settings.topics, settings.kafka)
    if url.startswith(SQLITE_SCHEME) and url[len(SQLITE_SCHEME) :]:
        from freezepoint.transport.sqlite import SqliteTransport  # noqa: PLC0415 - imported when used

        path = Path(url[len(SQLITE_SCHEME) :])
        return SqliteTransport(path, settings.topics, settings.sqlite, only_reading=only_reading)
    raise ConfigurationError(
        f"broker {url!r} is neither kafka://host:port[,host:port...] nor sqlite:///file; set --broker or FREEZEPOINT_BROKER"
    )
