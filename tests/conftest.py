import os
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import kafka_local
from kafka_local import LocalKafka
from tests.brokers import find_broker, prefetch_jars, require_jars, running_broker

BROKER_FIXTURES = {"kafka_bootstrap", "kafka_jars"}


def pytest_configure() -> None:
    """A shell lets what it runs in the background ignore interrupts, and the processes that tests interrupt would inherit it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _take_own_ports()


def _take_own_ports() -> None:
    """Brokers that are down, or not up yet, keep their ports: no two of pytest-xdist's workers may choose the same."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        kafka_local.PORTS = kafka_local.PORTS[int(worker.removeprefix("gw")) :: workers]


def pytest_report_header() -> str:
    return f"kafka broker: {find_broker()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that uses a broker is marked `kafka`, so that nobody has to remember to."""
    for item in items:
        if BROKER_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.kafka)


def pytest_collection_finish(session: pytest.Session) -> None:
    fixtures = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if session.config.option.collectonly:
        return
    if "kafka_jars" in fixtures or ("kafka_bootstrap" in fixtures and find_broker().source == "jvm"):
        prefetch_jars()


@pytest.fixture(scope="session")
def kafka_bootstrap() -> Iterator[str]:
    """Servers of a real broker, `host:port[,host:port]`, shared by the whole session."""
    with running_broker(find_broker()) as servers:
        yield servers


@pytest.fixture(scope="session")
def kafka_jars() -> Path:
    """The jars of a local broker, for tests that start their own; skips where none can run."""
    return require_jars()


@pytest.fixture
def local_kafka(kafka_jars: Path) -> Iterator[LocalKafka]:
    """A running broker that is this test's alone, for `kill()` and `restart()`."""
    with LocalKafka() as kafka:
        yield kafka


@pytest.fixture
def unique_prefix(request: pytest.FixtureRequest) -> str:
    """Begins the names of this test's topics, groups and transactional ids on the shared broker."""
    readable = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40]
    return f"{readable}-{uuid.uuid4().hex[:8]}"
