"""Small makers of results for tests, without a worker, and the reader's objects around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from freezepoint.core.records import OutputRecord
from freezepoint.reader.acks import AckWatermark, Claim
from freezepoint.reader.trajectory import Trajectory
from freezepoint.training import DeliveryName, view
from freezepoint.transport.ports import Transport
from freezepoint_schemas import codec
from freezepoint_schemas.events import InputEvent
from freezepoint_schemas.reasons import Reason
from freezepoint_schemas.results import Result, SnapshotInfo, Span, Trace
from freezepoint_schemas.topics import Topic
from tests.events import Bench, records_of


def trace(
    tokens: Sequence[int],
    spans: Sequence[tuple[int, int]],
    *,
    role: str = "main",
    log_probs: Sequence[float] | None = None,
    versions: Sequence[int | str | None] = (),
) -> Trace:
    """A trace; without ``log_probs`` made-up ones."""
    sampled = sum(end - start for start, end in spans)
    return Trace(
        trace_id=f"t:{role}",
        role=role,
        token_ids=list(tokens),  # type: ignore[arg-type] # the model decodes either encoding
        log_probs=[-0.125 * (n + 1) for n in range(sampled)] if log_probs is None else list(log_probs),  # type: ignore[arg-type]
        spans=[
            Span(
                call_id=f"c{n}",
                start=start,
                end=end,
                policy_version=versions[n] if n < len(versions) else None,
            )
            for n, (start, end) in enumerate(spans)
        ],
    )


def result(
    rollout_id: str,
    *,
    traces: Sequence[Trace] | None = None,
    reasons: Sequence[str] = (),
    freeze_offset: int = 0,
    version: int | str | None = None,
    **fields: Any,
) -> Result:
    """A result, masked if it has reasons; by default with one trace of three tokens, two of them sampled."""
    return Result(
        rollout_id=rollout_id,
        mask_sample=bool(reasons),
        reasons=[Reason(reason) for reason in reasons],
        builder="prefix_merging",
        delivery=fields.pop("delivery", "single_response"),
        snapshot=SnapshotInfo(id="s", version=1, partition=0, first_offset=0, freeze_offset=freeze_offset),
        traces=[trace([1, 2, 3], [(1, 3)], versions=[version])] if traces is None else list(traces),
        metrics=fields.pop("metrics", {"n_calls": 1, "roots": 1, "chains": 1}),
        **fields,
    )


def built(*events: InputEvent) -> Result:
    """What a worker makes of these events, the last of which closes the rollout."""
    (made,) = Bench().run(records_of(events))
    return made


def trajectory(
    made: Result,
    *,
    offset: int = 0,
    partition: int = 0,
    size_bytes: int = 100,
    delivery: DeliveryName | None = None,
) -> Trajectory:
    """As a reader would hand it out."""
    claim = Claim(AckWatermark(0), partition, offset)
    return Trajectory(made, view(made, delivery), partition, offset, size_bytes, claim)


def output(made: Result, *, partition: int | None = None) -> OutputRecord:
    """The record that a worker publishes."""
    return OutputRecord(
        Topic.TRAJECTORIES, made.rollout_id.encode(), codec.encode_result(made), partition=partition
    )


async def publish_results(
    transport: Transport, results: Iterable[Result], *, partition: int | None = None
) -> None:
    """Put results on the trajectories topic, as if a worker had."""
    producer = await transport.producer()
    try:
        await producer.send([output(made, partition=partition) for made in results])
    finally:
        await producer.close()
