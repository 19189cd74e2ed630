"""deploy/kafka-local as people and tests use it: a program, and a broker to start, stop and lose."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kafka_local
from kafka_local import (
    BrokerFailedError,
    LocalKafka,
    LocalKafkaError,
    MissingToolError,
    archive_classes,
    class_archive,
    fetch_jars,
    find_java,
    jar_folder,
    jars_complete,
)
from tests.polling import poll_until

LAUNCHER = Path(kafka_local.__file__)


@contextmanager
def running_program(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The launcher as a process, once it has announced its address, and the broker's port."""
    command = [sys.executable, str(LAUNCHER), *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    ) as program:
        try:
            assert program.stdout is not None
            address = program.stdout.readline().strip()
            assert address.startswith("kafka://127.0.0.1:")
            yield program, int(address.rsplit(":", 1)[1])
        finally:
            program.terminate()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def test_stop_ends_the_broker_and_removes_its_folder(kafka_jars: Path) -> None:
    with LocalKafka() as kafka:
        folder = kafka.folder
        assert folder.is_dir()
        assert listens(kafka.port)
    assert not folder.exists()
    assert not listens(kafka.port)
    kafka.stop()  # harmless


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which files a process has mapped")
def test_brokers_start_from_an_archive_of_classes(kafka_jars: Path) -> None:
    archive_classes()
    archive = class_archive(find_java(), kafka_jars)
    if not archive.exists():
        pytest.skip("this Java writes no archive of classes")
    with LocalKafka() as kafka:
        assert str(archive) in Path(f"/proc/{kafka.pid}/maps").read_text()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_the_program_ends_in_good_order(how: signal.Signals, kafka_jars: Path, tmp_path: Path) -> None:
    with running_program(TMPDIR=str(tmp_path)) as (program, port):
        assert listens(port)
        assert list(tmp_path.glob("kafka-local-*"))
        program.send_signal(how)
        assert program.wait(timeout=30) == 0
    assert not listens(port)
    assert not list(tmp_path.glob("kafka-local-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_the_broker_does_not_outlive_a_killed_parent(kafka_jars: Path, tmp_path: Path) -> None:
    with running_program("--data", str(tmp_path)) as (program, port):
        program.kill()
        program.wait(timeout=30)
        poll_until(lambda: not listens(port), 10, "the broker is gone")


def test_a_broker_that_dies_says_why_and_leaves_nothing(kafka_jars: Path) -> None:
    broken = LocalKafka(extra_properties={"log.retention.ms": "soon"})
    with pytest.raises(BrokerFailedError, match=r"log\.retention\.ms"):
        broken.start()
    assert broken.pid is None


def test_a_taken_port_is_said_in_one_line(kafka_jars: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LocalKafkaError, match=f"127.0.0.1:{port} is taken"):
            LocalKafka(port=port).start()


def test_a_torn_download_is_not_taken_for_a_complete_one(kafka_jars: Path, tmp_path: Path) -> None:
    folder = jar_folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "kafka-clients.jar").write_bytes(b"half of it")
    assert not jars_complete(folder)

    assert fetch_jars(tmp_path) == folder
    assert jars_complete(folder)
    assert not (folder / "kafka-clients.jar").exists()
    next(folder.glob("*.jar")).write_bytes(b"torn later")
    assert not jars_complete(folder)


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(MissingToolError, match="java not found"):
        find_java()
    with pytest.raises(MissingToolError, match="mvn not found"):
        fetch_jars(tmp_path / "jars")


@pytest.mark.parametrize("written", ["1.8.0_402", "11.0.2"])
def test_an_old_java_is_refused(written: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{written}\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(MissingToolError, match="Java 17 or newer"):
        find_java()
