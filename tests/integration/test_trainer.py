"""Trainers as real processes behind real workers: deaths, sharing, interrupts, groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from freezepoint.reader import TrajectoryReader
from freezepoint.training import collate
from freezepoint_schemas.events import InputEvent
from tests.contract.driving import PARTITIONS, WAIT_S, Cluster
from tests.events import cancelled, clear, complete, entry
from tests.integration.workers import publish, run_until_idle, worker
from tests.polling import poll_until

PROGRAM = Path(__file__).with_name("trainer_process.py")


class TrainerProcess:
    """Runs ``trainer_process.py``. Its output is a file, so that a full pipe never stops it."""

    def __init__(self, cluster: Cluster, log: Path, *options: str) -> None:
        self.log = log
        self.errors = log.with_suffix(".err")
        with log.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", str(PROGRAM), f"{cluster.group}-trainer", *options],
                env={**os.environ, **cluster.environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )

    @property
    def read(self) -> list[str]:
        """The names of what it has read, sorted."""
        lines = self.log.read_text().splitlines()
        return sorted(line.removeprefix("read ") for line in lines if line.startswith("read "))

    def until_read(self, count: int) -> list[str]:
        poll_until(
            lambda: len(self.read) >= count or self.process.poll() is not None, WAIT_S, f"{count} are read"
        )
        assert len(self.read) >= count, self.errors.read_text()
        return self.read

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def interrupt(self) -> int:
        """Ctrl-C; its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(WAIT_S)


@contextmanager
def trainer(cluster: Cluster, log: Path, *options: str) -> Iterator[TrainerProcess]:
    running = TrainerProcess(cluster, log, *options)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.kill()


def finished(*rollouts: str, **fields: object) -> list[InputEvent]:
    """Whole rollouts of one call each."""
    return [
        event
        for name in rollouts
        for event in (entry(name, "c1", [1, 2], [3, 4]), complete(name, n_calls=1, **fields))
    ]


async def test_a_trainer_killed_between_reading_and_acknowledging(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics()
    names = [f"r{n}" for n in range(8)]
    await publish(transport, finished(*names))
    run_until_idle(cluster.environment(), tmp_path / "worker.log")
    with trainer(cluster, tmp_path / "dies", "hold") as dies:
        assert dies.until_read(8) == names
        dies.kill()
    with trainer(cluster, tmp_path / "lives", "ack") as lives:
        assert lives.until_read(8) == names, "all of it again"


async def test_two_trainers_share_and_one_dies(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics()
    with worker(cluster.environment(), tmp_path / "worker.log") as running:
        running.until_acquired(PARTITIONS)
        with (
            trainer(cluster, tmp_path / "one", "ack") as one,
            trainer(cluster, tmp_path / "two", "hold") as two,
        ):
            sent: set[str] = set()
            while not (one.read and two.read):
                names = [f"r{len(sent) + number:03}" for number in range(8)]
                await publish(transport, finished(*names))
                sent.update(names)
                poll_until(lambda: sent <= {*one.read, *two.read}, WAIT_S, "all is read by one of both")
            two.kill()
            missing = set(two.read)
            assert missing
            poll_until(
                lambda: missing <= set(one.read), WAIT_S, "what the dead one had not acknowledged is read"
            )
            assert set(one.read) == sent


async def test_ctrl_c_ends_a_waiting_trainer_at_once(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics()
    await publish(transport, finished("r"))
    run_until_idle(cluster.environment(), tmp_path / "worker.log")
    with trainer(cluster, tmp_path / "out", "ack") as waiting:
        waiting.until_read(1)
        assert waiting.interrupt() == -signal.SIGINT
        errors = waiting.errors.read_text()
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert errors.count("Traceback") == 1, errors


async def test_a_program_that_forgets_to_close_ends_quietly(cluster: Cluster, tmp_path: Path) -> None:
    transport = await cluster.with_topics()
    await publish(transport, finished("r"))
    run_until_idle(cluster.environment(), tmp_path / "worker.log")
    with trainer(cluster, tmp_path / "out", "forget") as forgetful:
        assert forgetful.process.wait(WAIT_S) == 0
        assert forgetful.read == ["r"]
        assert forgetful.errors.read_text() == ""


async def test_groups_behind_a_worker_with_a_stuck_and_a_cancelled_rollout(
    cluster: Cluster, tmp_path: Path
) -> None:
    """GRPO: one prompt whole (a rollout of it cancelled), one with a rollout that never ends."""
    transport = await cluster.with_topics()
    stuck: list[InputEvent] = [clear("p2.2", group_id="p2", group_size=3), entry("p2.2", "c1", [1], [2])]
    await publish(
        transport,
        [
            *finished("p1.0", "p1.1", group_id="p1", group_size=3, reward=1.0),
            cancelled("p1.2", group_id="p1", group_size=3),
            *finished("p2.0", "p2.1", group_id="p2", group_size=3, reward=0.5),
            *stuck,
        ],
    )
    run_until_idle(cluster.environment(), tmp_path / "worker.log")
    async with TrajectoryReader(settings=cluster.settings(), group=f"{cluster.group}-trainer") as reader:
        found = {}
        async for group in reader.groups(deadline=2.0):
            found[group.group_id] = group
            reader.ack(group)
            if len(found) == 2:
                break
        await reader.commit()
        assert reader.counts.masked_by_reason == {"no_records": 1, "rollout_cancelled": 1}
    whole, part = found["p1"], found["p2"]
    assert (whole.complete, whole.missing, len(whole), len(whole.masked)) == (True, 0, 2, 1)
    assert (part.complete, part.missing, [member.rollout_id for member in part]) == (
        False,
        1,
        ["p2.0", "p2.1"],
    )
    batch = collate([*whole, *part])
    assert batch.token_ids.tolist() == [[1, 2, 3, 4]] * 4
    assert batch.loss_mask.tolist() == [[False, False, True, True]] * 4
    assert batch.log_probs.tolist() == [[0, 0, -0.25, -0.5]] * 4
    assert np.array_equal(batch.rewards, [1, 1, 0.5, 0.5])

    await publish(transport, [complete("p2.2", n_calls=1, group_id="p2", group_size=3)])
    run_until_idle(cluster.environment(), tmp_path / "worker-2.log")
    with TrajectoryReader(
        settings=cluster.settings(), group=f"{cluster.group}-trainer", follow=False
    ).blocking() as rest:
        assert [(group.group_id, group.missing) for group in rest.groups()] == [("p2", 2)]
