"""OpenTelemetry tracing: a span per rollout from its freeze to the commit of its result. Needs ``freezepoint[otel]``.

By the semantic conventions for messaging: the worker processes the tokens topic. The span is a root, since a rollout has many
producers and no one parent; it links to those of its records that carry a W3C ``traceparent`` header. The result carries the
span's own, so that a trainer can link to it. Where spans go is OpenTelemetry's own to configure (``OTEL_…`` variables).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from freezepoint import __version__
from freezepoint.core.frozen import FrozenLog, TimedOut
from freezepoint.core.ledger import Verdict
from freezepoint.core.records import InputRecord
from freezepoint.core.rollout import RolloutLog
from freezepoint.telemetry.tracing import PartitionTracer
from freezepoint_schemas.headers import Headers, header
from freezepoint_schemas.topics import rollout_id_of_key

LINKS_MAX: Final = 128
"""As many links as the SDK keeps by default; the first ones."""
FLUSH_MS_MAX: Final = 5_000
TRACE_HEADERS: Final = ("traceparent", "tracestate")

_PROPAGATOR: Final = TraceContextTextMapPropagator()


def exporting_provider() -> TracerProvider:
    """Spans by OTLP over HTTP, in batches, to where the environment says; localhost by default."""
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "freezepoint"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class OpenTelemetryTracer:
    """See ``RolloutTracer``. ``system``: what OpenTelemetry calls the broker."""

    def __init__(self, provider: TracerProvider, system: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("freezepoint", __version__)
        self._system = system

    def partition(self, topic: str, partition: int, group: str) -> PartitionTracer:
        attributes = {
            "messaging.system": self._system,
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": topic,
            "messaging.destination.partition.id": str(partition),
            "messaging.consumer.group.name": group,
        }
        return _Partition(self, f"process {topic}", attributes)

    def start(self, name: str, attributes: dict[str, str], frozen: _Frozen) -> Span:
        """A root span that began when the rollout froze."""
        return self._tracer.start_span(
            name,
            context=Context(),
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=[Link(context) for context in frozen.links],
            start_time=frozen.at_ns,
        )

    def close(self) -> None:
        self._provider.force_flush(FLUSH_MS_MAX)
        self._provider.shutdown()


@dataclass(slots=True)
class _Frozen:
    """A rollout between its freeze and the commit of its result. ``dropped``: links beyond the limit."""

    at_ns: int
    links: list[SpanContext]
    dropped: int
    span: Span | None = None


@dataclass(slots=True)
class _Links:
    """The distinct contexts that an open rollout's records came in."""

    found: dict[tuple[int, int], SpanContext] = field(default_factory=dict)
    dropped: int = 0

    def add(self, context: SpanContext) -> None:
        place = (context.trace_id, context.span_id)
        if place in self.found:
            return
        if len(self.found) < LINKS_MAX:
            self.found[place] = context
        else:
            self.dropped += 1


class _Partition:
    """See ``PartitionTracer``."""

    def __init__(self, tracer: OpenTelemetryTracer, name: str, attributes: dict[str, str]) -> None:
        self._tracer = tracer
        self._name = name
        self._attributes = attributes
        self._links: dict[str, _Links] = {}
        self._frozen: dict[tuple[str, int], _Frozen] = {}
        """By rollout id and freeze offset: several may time out at one."""

    def read(self, record: InputRecord) -> None:
        context = _context_of(record)
        rollout_id = None if context is None else rollout_id_of_key(record.key)
        if context is not None and rollout_id is not None:
            self._links.setdefault(rollout_id, _Links()).add(context)

    def froze(self, log: FrozenLog) -> None:
        links = self._links.pop(log.rollout_id, None) or _Links()
        self._frozen[log.rollout_id, log.freeze_offset] = _Frozen(
            time.time_ns(), list(links.found.values()), links.dropped
        )

    def folded(self, record: InputRecord, still_open: Mapping[str, RolloutLog]) -> None:
        rollout_id = rollout_id_of_key(record.key) if self._links else None
        if rollout_id is None or rollout_id not in self._links:
            return
        life = still_open.get(rollout_id)
        if life is None or life.first_offset == record.offset:
            del self._links[rollout_id]  # what is known is of the life before
            if life is not None:
                self.read(record)

    def publishing(self, log: FrozenLog, verdict: Verdict) -> Headers:
        frozen = self._frozen[log.rollout_id, log.freeze_offset]
        span = frozen.span = self._tracer.start(self._name, self._attributes, frozen)
        span.set_attributes(
            {
                "messaging.kafka.offset": log.freeze_offset,
                "freezepoint.rollout.id": log.rollout_id,
                "freezepoint.rollout.first_offset": log.first_offset,
                "freezepoint.rollout.closing": _closing(log),
                "freezepoint.snapshot.id": verdict.snapshot_id,
                "freezepoint.result.masked": verdict.masked,
                "freezepoint.result.reasons": [str(reason) for reason in verdict.reasons],
                "freezepoint.links.dropped": frozen.dropped,
            }
        )
        return tuple(_headers_of(span))

    def published(self, log: FrozenLog) -> None:
        frozen = self._frozen.pop((log.rollout_id, log.freeze_offset))
        if frozen.span is not None:
            frozen.span.end()


def _closing(log: FrozenLog) -> str:
    return "timed_out" if isinstance(log.closing, TimedOut) else log.closing.event


def _context_of(record: InputRecord) -> SpanContext | None:
    """Where the record came from; None where it does not say, or not by the standard."""
    if not record.headers:
        return None
    carrier = {
        name: value.decode("latin-1")
        for name in TRACE_HEADERS
        if (value := header(record.headers, name)) is not None
    }
    if "traceparent" not in carrier:
        return None
    context = get_current_span(_PROPAGATOR.extract(carrier, Context())).get_span_context()
    return context if context.is_valid else None


def _headers_of(span: Span) -> Iterator[tuple[str, bytes]]:
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    for name, value in carrier.items():
        yield name, value.encode("latin-1")
