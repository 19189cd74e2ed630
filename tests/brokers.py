"""Where the tests' Kafka broker comes from: the environment, Docker, or a JVM; see CONTRIBUTING.md."""

import contextlib
import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NoReturn

import pytest

from kafka_local import (
    LocalKafka,
    LocalKafkaError,
    MissingToolError,
    archive_classes,
    check_machine,
    fetch_jars,
)

SERVERS_ENV = "KAFKA_BOOTSTRAP_SERVERS"
REQUIRED_ENV = "FREEZEPOINT_REQUIRE_BROKER"


@dataclass(frozen=True)
class Broker:
    """What was found: `detail` is the address, a version, or what is missing."""

    source: Literal["environment", "docker", "jvm", "none"]
    detail: str

    def __str__(self) -> str:
        return f"{self.source} ({self.detail})"


@cache
def find_broker() -> Broker:
    """The first source that can serve, in the documented order. Starts and fetches nothing."""
    if servers := os.environ.get(SERVERS_ENV):
        return Broker("environment", servers)
    if docker := _docker_version():
        return Broker("docker", docker)
    try:
        return Broker("jvm", check_machine())
    except MissingToolError as error:
        return Broker("none", f"{SERVERS_ENV} is not set, no Docker daemon answers, and {error}")


def prefetch_jars() -> None:
    """Fetch the jars before the first test, whose time limit need not cover a download, and make them quick to start from."""
    with contextlib.suppress(LocalKafkaError):  # the test that needs them reports it
        check_machine()
        archive_classes()


def require_jars() -> Path:
    """The folder of a local broker's jars; skips or fails where none can run."""
    try:
        check_machine()
        return fetch_jars()
    except MissingToolError as error:
        give_up(str(error))


@contextmanager
def running_broker(broker: Broker) -> Iterator[str]:
    """Bootstrap servers (`host:port[,host:port]`) of `broker`, started and stopped here if it is ours."""
    match broker.source:
        case "environment":
            yield broker.detail
        case "docker":
            with _docker_broker() as servers:
                yield servers
        case "jvm":
            require_jars()
            with LocalKafka() as kafka:
                yield kafka.bootstrap
        case "none":
            give_up(broker.detail)


def give_up(reason: str) -> NoReturn:
    """Skip for want of a broker, or fail where one is required."""
    if os.environ.get(REQUIRED_ENV) == "1":
        pytest.fail(f"no broker available, and {REQUIRED_ENV}=1: {reason}", pytrace=False)
    pytest.skip(f"no broker available: {reason}")


def _docker_version() -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not ours to mend
        try:
            return _ask_docker()
        finally:
            # A failed docker.from_env leaves an open socket in a reference cycle; found later, it would fail a test.
            gc.collect()


def _ask_docker() -> str | None:
    import docker
    from docker.errors import DockerException

    try:
        with contextlib.closing(docker.from_env(timeout=5)) as client:
            return str(client.version()["Version"])
    except (DockerException, OSError):
        return None


@contextmanager
def _docker_broker() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not ours to mend
        from testcontainers.community.kafka import KafkaContainer

        container = KafkaContainer().with_kraft()
        # The settings of deploy/kafka-local that tests can see.
        container.with_env("KAFKA_AUTO_CREATE_TOPICS_ENABLE", "false")
        container.with_env("KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR", "1")
        container.with_env("KAFKA_TRANSACTION_STATE_LOG_MIN_ISR", "1")
        container.start(timeout=90)
    try:
        yield container.get_bootstrap_server()
    finally:
        container.stop()
