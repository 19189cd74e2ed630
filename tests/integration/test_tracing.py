"""OpenTelemetry: a span for each published result, with links to where its records came from."""

from __future__ import annotations

import asyncio
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from freezepoint.core.records import OutputRecord
from freezepoint.telemetry.figures import Figures
from freezepoint.telemetry.otel import LINKS_MAX, OpenTelemetryTracer
from freezepoint.transport.ports import Transport
from freezepoint.worker import Worker
from freezepoint_schemas import codec
from freezepoint_schemas.events import InputEvent
from freezepoint_schemas.headers import header
from freezepoint_schemas.topics import Topic
from tests.contract.driving import Cluster
from tests.events import clear, complete, entry
from tests.integration.shell import Shell
from tests.integration.workers import publish, publish_raw, read_all, read_results
from tests.polling import poll_until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def parent(span: int, trace: str = TRACE) -> bytes:
    return f"00-{trace}-{span:016x}-01".encode()


def sent(event: InputEvent, *parents: bytes) -> OutputRecord:
    headers = tuple(("traceparent", value) for value in parents)
    return OutputRecord(Topic.TOKENS, event.rollout_id.encode(), codec.encode_event(event), headers)


class Traced:
    """A worker in this process whose spans are kept in memory."""

    def __init__(self, cluster: Cluster) -> None:
        self._settings = cluster.settings().worker.model_copy(update={"group": cluster.group})
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._tracer = OpenTelemetryTracer(provider, "kafka")

    async def work(self, transport: Transport, **settings: Any) -> None:
        chosen = self._settings.model_copy(update=settings)
        worker = Worker(transport, chosen, figures=Figures(tracer=self._tracer))
        await worker.run(asyncio.Event(), until_idle=True)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        """By rollout id, of which each has one."""
        found = self._exporter.get_finished_spans()
        by_id = {str((span.attributes or {})["freezepoint.rollout.id"]): span for span in found}
        assert len(by_id) == len(found)
        return by_id


def linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


async def test_each_result_has_a_span_that_links_to_its_records(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=2)
    await publish_raw(
        transport,
        [
            sent(entry("a", "c1", [1], [2]), parent(1)),
            sent(entry("a", "c2", [1, 2, 3], [4]), parent(2)),
            sent(entry("a", "c2", [1, 2, 3], [4]), parent(2)),
            sent(complete("a"), parent(3, "0af7651916cd43dd8448eb211c80319c")),
            sent(entry("b", "c", [1], [2])),
            sent(complete("b")),
            sent(complete("empty"), parent(4)),
            sent(entry("open", "c", [1], [2]), parent(5)),
        ],
    )
    traced = Traced(cluster)
    await traced.work(transport)
    spans = traced.spans
    assert spans.keys() == {"a", "b", "empty"}
    assert {name: linked(span) for name, span in spans.items()} == {"a": [1, 2, 3], "b": [], "empty": [4]}
    assert [f"{link.context.trace_id:032x}" for link in spans["a"].links][:2] == [TRACE, TRACE]
    results = {result.rollout_id: result for result in await read_results(transport)}
    for name, span in spans.items():
        attributes = dict(span.attributes or {})
        result = results[name]
        assert span.name == f"process {transport.names[Topic.TOKENS]}"
        assert (span.kind, span.parent) == (SpanKind.CONSUMER, None)
        assert 0 < (span.start_time or 0) <= (span.end_time or 0)
        assert attributes["messaging.destination.partition.id"] == str(result.snapshot.partition)
        assert attributes["messaging.kafka.offset"] == result.snapshot.freeze_offset
        assert attributes["freezepoint.snapshot.id"] == result.snapshot.id
        assert attributes["freezepoint.result.masked"] is result.mask_sample
        assert attributes["freezepoint.result.reasons"] == tuple(result.reasons)
        assert attributes["freezepoint.rollout.closing"] == "rollout_complete"


async def test_a_result_carries_its_spans_context(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    await publish(transport, [entry("a", "c", [1], [2]), complete("a")])
    traced = Traced(cluster)
    await traced.work(transport)
    [record] = await read_all(transport, Topic.TRAJECTORIES)
    context = traced.spans["a"].get_span_context()
    assert context is not None
    carried = (header(record.headers, "traceparent") or b"").decode()
    assert carried.startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-")
    assert [result.rollout_id for result in await read_results(transport)] == ["a"]


async def test_links_are_of_one_life_distinct_bounded_and_by_the_standard(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    wrong = (
        b"",
        b"nonsense",
        b"00-" + b"0" * 32 + b"-0000000000000001-01",
        b"\xff\xfe",
        b"ff-" + parent(1)[3:],
    )
    await publish_raw(
        transport,
        [
            *(sent(entry("wrong", f"c{number}", [1], [2]), value) for number, value in enumerate(wrong)),
            sent(complete("wrong")),
            sent(entry("again", "c", [1], [2]), parent(1)),
            sent(clear("again"), parent(2)),
            sent(entry("again", "c", [1], [2]), parent(3)),
            sent(complete("again")),
            sent(entry("late", "c", [1], [2]), parent(1)),
            sent(complete("late")),
            sent(entry("late", "d", [1], [2]), parent(2)),
            sent(entry("grouped", "c", [1], [2]), parent(1)),
            sent(clear("grouped", group_id="g"), parent(2)),
            sent(complete("grouped"), parent(3)),
            *(
                sent(entry("many", f"c{number}", [1], [2]), parent(number + 1))
                for number in range(LINKS_MAX + 9)
            ),
            sent(complete("many")),
        ],
    )
    traced = Traced(cluster)
    await traced.work(transport)
    spans = traced.spans
    assert linked(spans["wrong"]) == []
    assert linked(spans["again"]) == [3]
    assert linked(spans["late"]) == [1]
    assert linked(spans["grouped"]) == [2, 3]
    assert linked(spans["many"]) == list(range(1, LINKS_MAX + 1))
    assert (spans["many"].attributes or {})["freezepoint.links.dropped"] == 9


async def test_a_timeout_has_a_span_and_a_takeover_links_again(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    await publish_raw(transport, [sent(entry("idle", "c", [1], [2]), parent(7))])
    first, second = Traced(cluster), Traced(cluster)
    await first.work(transport)
    assert first.spans == {}
    await publish_raw(transport, [sent(complete("idle"), parent(8))])
    await second.work(transport)
    assert linked(second.spans["idle"]) == [7, 8]
    await publish_raw(transport, [sent(entry("lone", "c", [1], [2]), parent(9))])
    third = Traced(cluster)
    stop = asyncio.Event()
    chosen = third._settings.model_copy(update={"rollout_timeout_s": 0.5})
    running = asyncio.create_task(Worker(transport, chosen, figures=Figures(tracer=third._tracer)).run(stop))
    async with asyncio.timeout(60):
        while "lone" not in third.spans:
            await asyncio.sleep(0.1)
    stop.set()
    await running
    assert (third.spans["lone"].attributes or {})["freezepoint.rollout.closing"] == "timed_out"
    assert linked(third.spans["lone"]) == [9]


# ------------------------------------------------------------------------------------------------- switched on or off


def test_nothing_of_it_is_imported_unless_it_is_switched_on(shell: Shell, events: Path) -> None:
    shell.ok("publish", "--complete", str(events))
    program = (
        "import sys, asyncio; from freezepoint.app import run_worker; from freezepoint.settings import Settings\n"
        "import freezepoint.cli.commands, freezepoint.cli.run\n"
        "assert asyncio.run(run_worker(Settings(), until_idle=True)).results == 2\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=shell.folder,
        env=shell.environment(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()


def test_switched_on_without_the_extra_says_what_to_install(shell: Shell) -> None:
    program = "import sys; sys.modules['opentelemetry'] = None; from freezepoint.cli import main; main()"
    environment = {**shell.environment(), "FREEZEPOINT_TRACING__ENABLED": "true"}
    done = subprocess.run(
        [sys.executable, "-c", program, "run", "--until-idle"],
        cwd=shell.folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: tracing.enabled takes OpenTelemetry (")
    assert "pip install 'freezepoint[otel]'" in done.stderr


class _Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an exporter sends."""

    taken: list[bytes]

    def do_POST(self) -> None:
        self.taken.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """A test is quiet."""


@contextmanager
def collecting() -> Iterator[tuple[int, Sequence[bytes]]]:
    """A collector's port, and the bodies that it was sent."""
    taken: list[bytes] = []
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Collector", (_Collector,), {"taken": taken})
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1], taken
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_command_exports_to_where_the_environment_says(shell: Shell, events: Path) -> None:
    shell.ok("publish", "--complete", str(events))
    with collecting() as (port, taken):
        environment = {
            "FREEZEPOINT_TRACING__ENABLED": "true",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_HEADERS": "authorization=geheim",
            "OTEL_SERVICE_NAME": "trajectories",
        }
        ran = shell.ok("run", "--until-idle", environment=environment)
        poll_until(lambda: bool(taken), 10, "the collector was sent something")
    exported = [
        found for body in taken for found in ExportTraceServiceRequest.FromString(body).resource_spans
    ]
    assert sum(len(scope.spans) for found in exported for scope in found.scope_spans) == 2
    attributes = [attribute for found in exported for attribute in found.resource.attributes]
    names = {found.value.string_value for found in attributes if found.key == "service.name"}
    assert names == {"trajectories"}
    assert "geheim" not in ran.err


def test_a_collector_that_is_away_costs_no_result(shell: Shell, events: Path) -> None:
    shell.ok("publish", "--complete", str(events))
    environment = {
        "FREEZEPOINT_TRACING__ENABLED": "true",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=geheim",
    }
    ran = shell.ok("run", "--until-idle", environment=environment)
    assert "2 results published" in ran.err
    assert "geheim" not in ran.err
