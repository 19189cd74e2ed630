"""The example of the README on both transports: what the trainer gets is what the server sampled, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.end_to_end.__main__ import GROUP_SIZE, GROUPS, collect
from examples.end_to_end.model_server import ModelServer
from examples.end_to_end.serving import serving
from examples.end_to_end.trainer import arrays_of, groups, step
from freezepoint.capture import CaptureMiddleware
from freezepoint.sink import TokenSink
from freezepoint_schemas.results import Result
from tests.contract.driving import Cluster
from tests.integration.workers import worker


def assert_sampled(result: Result, model: ModelServer) -> int:
    """Every span of every trace is a generation of the server, behind the prompt it had. How many there are."""
    sampled = {(tuple(sample.prompt), tuple(sample.generation)): sample.log_probs for sample in model.samples}
    count = 0
    for trace in result.traces:
        arrays = arrays_of(trace)
        tokens = arrays.token_ids.tolist()
        for span in trace.spans:
            key = (tuple(tokens[: span.start]), tuple(tokens[span.start : span.end]))
            assert np.array_equal(arrays.log_probs[span.start : span.end], sampled[key])
            count += 1
    return count


@pytest.mark.timeout(180)
async def test_the_arrays_are_what_the_server_sampled(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics()
    options: dict[str, Any] = {"broker": cluster.url, "topic_prefix": cluster.names.prefix, "run": "demo"}
    model = ModelServer(refusals=2)
    with worker(cluster.environment(), tmp_path / "worker.log"):
        app = CaptureMiddleware(model, sink=TokenSink(**options))
        async with serving(app) as url, TokenSink(**options) as collector:
            await collect(url, collector)
        got = [group async for group in groups(transport, GROUPS)]
    assert {result.rollout_id for group in got for result in group} == {
        f"demo.{task}-{attempt}" for task in range(GROUPS) for attempt in range(GROUP_SIZE)
    }
    for group in got:
        assert len(group) == GROUP_SIZE
        for result in group:
            killed = result.rollout_id.endswith("-1")
            assert [str(reason) for reason in result.reasons][:1] == (
                ["capture_incomplete"] if killed else []
            )
            assert assert_sampled(result, model) == 5  # one generation a turn, whatever was retried
        numbers = step(group)
        assert (numbers["masked"], numbers["tokens"] > 0) == (1, True)
