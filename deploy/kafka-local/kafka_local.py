"""One Apache Kafka broker on this machine, from jars: no Docker, no installation.

As a program it runs a broker until Ctrl-C:

    python deploy/kafka-local/kafka_local.py [--port 9092] [--data DIR] [--jars DIR]

As a library it gives tests a broker they may kill and restart:

    with LocalKafka() as kafka:
        ...  # clients connect to kafka.bootstrap
        kafka.kill()
        kafka.restart()

Needs `java` (17 or newer) and, for the first run, `mvn`. Standard library only.
"""

import argparse
import ctypes
import fcntl
import hashlib
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

HERE = Path(__file__).resolve().parent
POM = HERE / "pom.xml"
LOG_CONFIG = HERE / "log4j2.properties"
JARS_ENV = "FREEZEPOINT_KAFKA_JARS"
JAVA_VERSION_MIN = 17
HEAP_MB_MAX = 512
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 20.0
LOG_TAIL_LINES = 25
ANSWER_BYTES = 12  # of a Metadata answer: size, correlation id, number of brokers

# Ports are taken below every system's ephemeral range. Above it, a client that keeps reconnecting to a broker
# that is down can be handed the broker's own port as its source port and end up connected to itself.
PORTS = range(20_000, 30_000)

# Any base64 UUID will do; a fixed one lets data written by one run be served by the next.
CLUSTER_ID = "ZnJlZXplcG9pbnQtbG9jYQ"


class LocalKafkaError(Exception):
    """The local broker cannot be run."""


class MissingToolError(LocalKafkaError):
    """Java or Maven is missing or too old, or Maven could not fetch the jars: this machine cannot run a broker."""


class BrokerFailedError(LocalKafkaError):
    """The broker was started, and died or did not answer. The message ends with its last log lines."""


# --------------------------------------------------------------------------------------------------- tools and jars


def find_java() -> str:
    """Path of a Java 17+ launcher, `JAVA_HOME` first; raises MissingToolError."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home, "bin"))) if home else None
    java = java or shutil.which("java")
    if java is None:
        raise MissingToolError(f"java not found: install a JRE, version {JAVA_VERSION_MIN} or newer")
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    found = re.search(r'version "(\d+)(?:\.(\d+))?', answer.stderr + answer.stdout)
    if found is None:
        raise MissingToolError(f"{java} -version gave no version: {_last_line(answer.stderr)}")
    # Up to Java 8 versions were written 1.8.
    version = int(found[2] or 0) if found[1] == "1" else int(found[1])
    if version < JAVA_VERSION_MIN:
        raise MissingToolError(f"{java} is version {version}: Kafka needs Java {JAVA_VERSION_MIN} or newer")
    return java


def check_machine(cache: Path | None = None) -> str:
    """The Java launcher, when a broker can run here without more installing; raises MissingToolError."""
    java = find_java()
    if not jars_complete(jar_folder(cache)):
        _find_maven()
    return java


def default_jar_cache() -> Path:
    return Path(os.environ.get(JARS_ENV) or HERE / ".jars")


def jar_folder(cache: Path | None = None) -> Path:
    """Where the jars of this pom.xml belong; another pom.xml, for a newer Kafka, gets another folder."""
    digest = hashlib.sha256(POM.read_bytes()).hexdigest()[:12]
    return (cache or default_jar_cache()).resolve() / f"kafka-{digest}"


def jars_complete(folder: Path) -> bool:
    """Whether `folder` holds every jar at its full size, by the list written after the last one was checked."""
    try:
        lines = (folder / "complete").read_text().splitlines()
        return bool(lines) and all(
            (folder / name).stat().st_size == int(size) for size, name in map(str.split, lines)
        )
    except (OSError, ValueError):
        return False


def fetch_jars(cache: Path | None = None) -> Path:
    """Folder with all jars, fetched by Maven unless a complete one is there; raises MissingToolError.

    Safe to call from several processes at once: one downloads, the others wait for it.
    """
    folder = jar_folder(cache)
    if jars_complete(folder):
        return folder
    maven = _find_maven()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder.parent):
        if not jars_complete(folder):
            _fetch_into(folder, maven)
    return folder


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed, or we are killed
        yield


def _fetch_into(folder: Path, maven: str) -> None:
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        _copy_dependencies(maven, partial)
        _write_list(partial)
        _put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _find_maven() -> str:
    maven = shutil.which("mvn")
    if maven is None:
        raise MissingToolError("mvn not found: install Apache Maven, which fetches the Kafka jars")
    return maven


def _copy_dependencies(maven: str, target: Path) -> None:
    command = [maven, "--batch-mode", "--quiet", "--file", str(POM)]
    command += ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={target}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stdout.splitlines() if line.startswith("[ERROR]")]
        reason = errors[0].removeprefix("[ERROR]").strip() if errors else _last_line(done.stdout)
        raise MissingToolError(f"Maven could not fetch the Kafka jars: {reason}")


def _write_list(folder: Path) -> None:
    jars = sorted(folder.glob("*.jar"))
    torn = [jar.name for jar in jars if not zipfile.is_zipfile(jar)]
    if torn or not jars:
        raise MissingToolError(
            f"Maven fetched no usable jars ({', '.join(torn) or 'none at all'}): try again"
        )
    (folder / "complete").write_text("".join(f"{jar.stat().st_size} {jar.name}\n" for jar in jars))


def _put_in_place(partial: Path, folder: Path) -> None:
    if folder.exists() and not jars_complete(folder):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        partial.rename(folder)
    except OSError:
        if not jars_complete(folder):
            raise


def class_archive(java: str, jars: Path) -> Path:
    """Where the classes belong that a broker loads: as this Java reads them from these files, not from copies of them."""
    files = [Path(java).resolve(), *sorted(jars.glob("*.jar"))]
    marks = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return jars / f"classes-{hashlib.sha256(repr(marks).encode()).hexdigest()[:12]}.jsa"


def archive_classes(cache: Path | None = None) -> None:
    """Let every later broker start in two thirds of the time. Takes a few seconds, once for these jars and this Java;
    without effect where their folder may only be read.

    :raises LocalKafkaError: no broker can run here.
    """
    archive = class_archive(find_java(), fetch_jars(cache))
    if archive.exists() or not os.access(archive.parent, os.W_OK):
        return
    with _alone_in(archive.parents[1]):
        if not archive.exists():
            _write_archive(archive, LocalKafka(jars=cache))


def _write_archive(archive: Path, kafka: "LocalKafka") -> None:
    for old in archive.parent.glob("classes-*"):
        old.unlink()
    partial = archive.with_suffix(".partial")
    kafka.java_options = [f"-XX:ArchiveClassesAtExit={partial}"]
    with kafka:
        if kafka.end(signal.SIGTERM, START_SECONDS_MAX) == 128 + signal.SIGTERM:  # not cut off while it wrote
            partial.replace(archive)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"


# -------------------------------------------------------------------------------------------------------- the broker


_formatted: dict[tuple[Path, frozenset[tuple[str, str]]], dict[str, bytes]] = {}
"""The files of a storage that was formatted with these jars and settings: a JVM less for each further broker."""


class LocalKafka:
    """One KRaft broker, its own controller, on 127.0.0.1.

    Args:
        port: where clients connect; a free one is chosen when None, and kept over restarts.
        data: folder for logs and settings, kept afterwards; when None a temporary one, removed by `stop`.
        jars: cache folder for the jars; when None `FREEZEPOINT_KAFKA_JARS` or `.jars` beside this file.
        extra_properties: broker settings that win over the ones chosen here.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        data: Path | None = None,
        jars: Path | None = None,
        extra_properties: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or _free_port()
        self._controller_port = _free_port(other_than=self.port)
        self._wanted_data = data
        self.jars = jars
        self._extra_properties = dict(extra_properties or {})
        self.java_options: list[str] = []
        self._folder: Path | None = None
        self._child: _Child | None = None

    @property
    def bootstrap(self) -> str:
        """`127.0.0.1:port`, as clients want it; the same after a restart."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the running broker, for tests that send signals of their own."""
        return self._child.pid if self._child and not self._child.exited.is_set() else None

    @property
    def folder(self) -> Path:
        """Where data, settings and the broker's log are."""
        if self._folder is None:
            raise LocalKafkaError("the broker has no folder yet: call start() first")
        return self._folder

    def start(self) -> Self:
        """Fetch what is missing, format the storage once, start, and return when the broker answers.

        Raises:
            MissingToolError: this machine cannot run a broker.
            LocalKafkaError: the port is taken, or the broker runs already.
            BrokerFailedError: the broker died or gave no answer within 60 s.
        """
        if self.pid is not None:
            raise LocalKafkaError(f"the broker runs already, as process {self.pid}")
        java, jars = find_java(), fetch_jars(self.jars)
        if not _is_free(self.port):
            raise LocalKafkaError(f"{self.bootstrap} is taken or not permitted: choose another port")
        try:
            self._prepare_folder(java, jars)
            shared = class_archive(java, jars)
            options = [f"-XX:SharedArchiveFile={shared}"] if shared.exists() else self.java_options
            command = _java_command(java, jars, "kafka.Kafka", str(self._properties_file), options=options)
            self._child = _Child(command, self._log_file)
            self._child.start()
            self._await_answer(self._child)
        except BaseException:
            # Also for Ctrl-C while it starts: leave neither a process nor a temporary folder behind.
            self.kill()
            if not self._was_ready:
                self._remove_folder()
            raise
        self._ready_file.touch()
        return self

    def stop(self) -> None:
        """Stop in good order, forcibly after 20 s, and remove a temporary folder. Harmless when not running."""
        self.end(signal.SIGTERM)
        self._remove_folder()

    def kill(self) -> None:
        """SIGKILL, as a crash would; the data stays for `restart`. Harmless when not running."""
        self.end(signal.SIGKILL)

    def restart(self) -> Self:
        """Start again on the same data and port; a running broker is first stopped in good order."""
        self.end(signal.SIGTERM)
        return self.start()

    def wait(self) -> None:
        """Return when the broker has ended, for whatever reason."""
        if self._child is not None:
            self._child.exited.wait()

    def log_tail(self) -> str:
        """The broker's last log lines."""
        try:
            lines = self._log_file.read_text(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _properties_file(self) -> Path:
        return self.folder / "server.properties"

    @property
    def _log_file(self) -> Path:
        return self.folder / "broker.log"

    @property
    def _ready_file(self) -> Path:
        return self.folder / "was-ready"

    @property
    def _was_ready(self) -> bool:
        return self._folder is not None and self._ready_file.exists()

    def _prepare_folder(self, java: str, jars: Path) -> None:
        if self._folder is None:
            self._folder = (self._wanted_data or Path(tempfile.mkdtemp(prefix="kafka-local-"))).resolve()
            self._folder.mkdir(parents=True, exist_ok=True)
        settings = self._settings(self._folder / "data") | self._extra_properties
        self._properties_file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        data = self._folder / "data"
        if (data / "meta.properties").exists():
            return
        formatted = _formatted.setdefault((jars, frozenset(self._extra_properties.items())), {})
        if not formatted:
            self._format(java, jars)
            formatted |= {path.name: path.read_bytes() for path in data.iterdir()}
        data.mkdir(exist_ok=True)
        for name, content in formatted.items():
            (data / name).write_bytes(content)

    def _format(self, java: str, jars: Path) -> None:
        arguments = ["format", "--cluster-id", CLUSTER_ID, "--config", str(self._properties_file)]
        command = _java_command(java, jars, "kafka.tools.StorageTool", *arguments)
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode != 0:
            raise BrokerFailedError(f"Kafka could not format {self._folder}:\n{done.stdout.strip()}")

    def _settings(self, data: Path) -> dict[str, str]:
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://127.0.0.1:{self._controller_port}",
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(data),
            # One broker can hold one replica.
            "default.replication.factor": "1",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            # Few partitions of the internal topics: they are created on first use, while somebody waits.
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.num.partitions": "4",
            "share.coordinator.state.topic.num.partitions": "4",
            # A misspelt topic is an error, and a group of one does not wait for others.
            "auto.create.topics.enable": "false",
            "group.initial.rebalance.delay.ms": "0",
            # After a crash the broker may register again only when its former session is over (9 s by default).
            "broker.session.timeout.ms": "2000",
            "broker.heartbeat.interval.ms": "500",
        }

    def _await_answer(self, child: "_Child") -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        # Waiting for the child's end is the pause between two questions: a dead broker is noticed at once.
        while not child.exited.wait(0.05):
            if _broker_answers(self.port):
                return
            if time.monotonic() > deadline:
                reason = f"gave no answer on {self.bootstrap} within {START_SECONDS_MAX:.0f} s"
                raise BrokerFailedError(f"the broker {reason}; its last log lines:\n{self.log_tail()}")
        raise BrokerFailedError(f"the broker ended with {child.code}; its last log lines:\n{self.log_tail()}")

    def end(self, how: signal.Signals, seconds_max: float = STOP_SECONDS_MAX) -> int | None:
        """Send a signal, and SIGKILL if that takes too long; the exit code. Harmless when not running."""
        child, self._child = self._child, None
        if child is None:
            return None
        child.send(how)
        if not child.exited.wait(seconds_max):
            child.send(signal.SIGKILL)
            child.exited.wait()
        return child.code

    def _remove_folder(self) -> None:
        if self._wanted_data is None and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _java_command(
    java: str, jars: Path, main: str, *arguments: str, options: Sequence[str] = ()
) -> list[str]:
    # The serial collector and the first compiler tier start fastest, which matters more here than throughput.
    tuning = [f"-Xmx{HEAP_MB_MAX}m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
    logging = f"-Dlog4j2.configurationFile={LOG_CONFIG}"
    return [java, *tuning, *options, logging, "-cp", f"{jars}/*", main, *arguments]


def _broker_answers(port: int) -> bool:
    """Whether a Metadata request is answered with at least one broker, that is: registered and unfenced."""
    client = b"kafka-local"
    # Metadata version 1: key, version, correlation id, client id, and an empty list of topics.
    body = struct.pack(f">hhih{len(client)}si", 3, 1, 1, len(client), client, 0)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2.0) as connection:
            connection.sendall(struct.pack(">i", len(body)) + body)
            answer = connection.makefile("rb").read(ANSWER_BYTES)
    except OSError:
        return False
    return len(answer) == ANSWER_BYTES and struct.unpack(">iii", answer)[2] > 0


def _free_port(other_than: int | None = None) -> int:
    for port in random.sample(PORTS, 200):
        if port != other_than and _is_free(port):
            return port
    raise LocalKafkaError(f"no free port between {PORTS.start} and {PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the JVM does, so that a port in TIME_WAIT counts as free for both or for none.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class _Child:
    """A child process with a thread of its own, which starts it and waits for its end.

    On Linux the kernel kills the child when the thread that started it ends. A thread that lives exactly as long
    as the child makes that mean: when we are killed. A caller's thread (of a pool, say) might end much sooner.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        self.exited = threading.Event()
        self.code: int | None = None
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        self._spawned = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="kafka-local", daemon=True).start()
        self._spawned.wait()
        if self._failure is not None:
            raise BrokerFailedError(f"cannot run {self._command[0]}: {self._failure}") from self._failure

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, how: signal.Signals) -> None:
        if self._process is not None and not self.exited.is_set():
            self._process.send_signal(how)

    def _run(self) -> None:
        try:
            with self._log.open("ab") as log:
                # A session of its own: Ctrl-C in a terminal reaches us, and we stop it in good order.
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_die_with_parent(),  # noqa: PLW1509 - calls one already loaded C function
                )
        except OSError as error:
            self._failure = error
            self.exited.set()
            self._spawned.set()
            return
        self._spawned.set()
        self.code = self._process.wait()
        self.exited.set()


def _die_with_parent() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    set_parent_death_signal = 1

    def ask_the_kernel() -> None:
        prctl(set_parent_death_signal, signal.SIGKILL)

    return ask_the_kernel


# ------------------------------------------------------------------------------------------------------- the program


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run one Kafka broker on 127.0.0.1 until Ctrl-C.")
    parser.add_argument("--port", type=int, help="where clients connect (default: a free port)")
    parser.add_argument("--data", type=Path, help="keep the data here (default: a temporary folder, removed)")
    parser.add_argument(
        "--jars", type=Path, help=f"cache folder for the jars (default: ${JARS_ENV} or .jars)"
    )
    parser.add_argument("--fetch", action="store_true", help="only fetch the jars")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if options.fetch:
            print(fetch_jars(options.jars))
            return 0
        return _serve(LocalKafka(port=options.port, data=options.data, jars=options.jars))
    except LocalKafkaError as error:
        print(f"kafka-local: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _serve(kafka: LocalKafka) -> int:
    if not jars_complete(jar_folder(kafka.jars)):
        print("kafka-local: fetching the Kafka jars (once, 45 MB)", file=sys.stderr)
    try:
        kafka.start()
        print(f"kafka://{kafka.bootstrap}", flush=True)
        kafka.wait()
        print(f"kafka-local: the broker ended by itself:\n{kafka.log_tail()}", file=sys.stderr)
    except KeyboardInterrupt:
        return 0
    finally:
        # A second Ctrl-C must not leave the folder behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kafka.stop()
    return 1


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
