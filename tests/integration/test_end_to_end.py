"""The example of the README on both transports: what the trainer gets is what the server sampled, token for token."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.end_to_end.__main__ import GROUP_SIZE, GROUPS, collect, main
from examples.end_to_end.model_server import ModelServer
from examples.end_to_end.serving import serving
from examples.end_to_end.trainer import step
from freezepoint.capture import CaptureMiddleware
from freezepoint.demo import apart
from freezepoint.errors import BrokerError, MissingTopicError
from freezepoint.reader import Trajectory, TrajectoryReader
from freezepoint.settings import Settings
from freezepoint.sink import TokenSink
from freezepoint_schemas.topics import Topic
from tests.contract.driving import Cluster
from tests.documents import ROOT
from tests.integration.workers import worker


def assert_sampled(trajectory: Trajectory, model: ModelServer) -> int:
    """Every span of every trace is a generation of the server, behind the prompt it had. How many there are."""
    sampled = {(tuple(sample.prompt), tuple(sample.generation)): sample.log_probs for sample in model.samples}
    count = 0
    for trace in trajectory.result.traces:
        arrays = trajectory.to_arrays(trace, float_type="float64")
        tokens = arrays.token_ids.tolist()
        for span in trace.spans:
            key = (tuple(tokens[: span.start]), tuple(tokens[span.start : span.end]))
            assert np.array_equal(arrays.log_probs[span.start : span.end], sampled[key])
            count += 1
    return count


@pytest.mark.timeout(180)
async def test_the_arrays_are_what_the_server_sampled(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.with_topics()
    options: dict[str, Any] = {"broker": cluster.url, "topic_prefix": cluster.names.prefix, "run": "demo"}
    model = ModelServer(refusals=2)
    with worker(cluster.environment(), tmp_path / "worker.log"):
        app = CaptureMiddleware(model, sink=TokenSink(**options))
        async with serving(app) as url, TokenSink(**options) as collector:
            await collect(url, collector)
        reader = TrajectoryReader(settings=cluster.settings(), group=f"{cluster.group}-trainer", run="demo")
        async with reader:
            got = []
            async for group in reader.groups(deadline=120):
                got.append(group)
                reader.ack(group)
                if len(got) == GROUPS:
                    break
    assert {member.rollout_id for group in got for member in group.members} == {
        f"demo.{task}-{attempt}" for task in range(GROUPS) for attempt in range(GROUP_SIZE)
    }
    for group in got:
        assert group.complete
        (killed,) = group.masked
        assert killed.rollout_id.endswith("-1")
        assert killed.reasons[0] == "capture_incomplete"
        for member in group.members:
            assert assert_sampled(member, model) == 5  # one generation a turn, whatever was retried
        numbers = step(group)
        assert (numbers["masked"], numbers["tokens"] > 0) == (1, True)


def run_example(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.end_to_end"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_without_its_libraries_it_says_how_to_install_them() -> None:
    program = "import sys; sys.modules['openai'] = None; import examples.end_to_end"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stderr.splitlines()) == (
        1,
        ["error: openai not installed: .venv/bin/pip install -c constraints.txt -e '.[dev]'"],
    )


@pytest.mark.timeout(240)
async def test_the_command_runs_again_and_again_and_keeps_to_topics_of_its_own(cluster: Cluster) -> None:
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), **cluster.environment()}
    for _ in range(2):
        ran = await asyncio.to_thread(run_example, environment)
        assert ran.returncode == 0, ran.stderr
        assert sorted(line.split()[0] for line in ran.stdout.splitlines()) == [
            f"group-{task}" for task in range(GROUPS)
        ]
    with pytest.raises(MissingTopicError):  # those that the settings name
        await cluster.transport().admin().partitions(Topic.TOKENS)


@pytest.mark.parametrize(
    ("level", "deadline_s", "why"), [("info", 0.5, "still at it after 0.5 s"), ("none", 120.0, "exit code 2")]
)
async def test_the_command_ends_when_the_worker_does_not_deliver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, deadline_s: float, why: str
) -> None:
    monkeypatch.setenv("FREEZEPOINT_LOG_LEVEL", level)
    settings = Settings(broker=f"sqlite:///{tmp_path / 'freezepoint.db'}")
    with pytest.raises(BrokerError, match=why):
        await main(apart(settings, "example"), deadline_s)
