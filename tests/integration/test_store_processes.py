"""The local store among processes: many that append at once, and some that die in the middle of it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from freezepoint.consumer import trajectories_for_rollout
from freezepoint.errors import FrozenRolloutError
from freezepoint.store import TokenStore
from freezepoint.store.files import ENTRIES
from tests.events import entry
from tests.integration import store_programs

WRITERS = 4
CALLS = 25
KILLS = 12
ROOT = Path(__file__).parents[2]


@contextmanager
def program(name: str, directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, store_programs.__file__, name, str(directory), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def acknowledged(process: subprocess.Popen[str], count: int | None = None) -> list[str]:
    """The next lines it prints: so many, or all until it ends."""
    assert process.stdout is not None
    if count is None:
        return process.stdout.read().split()
    return [process.stdout.readline().strip() for _ in range(count)]


def killed(process: subprocess.Popen[str]) -> list[str]:
    """SIGKILL; what it had acknowledged beyond what was read."""
    process.kill()
    return acknowledged(process)


def test_many_processes_append_to_one_rollout(tmp_path: Path) -> None:
    writers = [program("put", tmp_path, f"w{number}", str(CALLS)) for number in range(WRITERS)]
    processes = [writer.__enter__() for writer in writers]
    try:
        printed = [call_id for process in processes for call_id in acknowledged(process)]
        assert all(process.wait() == 0 for process in processes)
    finally:
        for writer in writers:
            writer.__exit__(None, None, None)
    expected = {f"w{writer}-{number}" for writer in range(WRITERS) for number in range(CALLS)}
    expected |= {f"shared-{number}" for number in range(CALLS)}
    assert set(printed) == expected
    assert len(printed) == WRITERS * CALLS * 2
    assert len((tmp_path / f"r{ENTRIES}").read_bytes().splitlines()) == len(expected)
    snapshot = TokenStore(tmp_path).freeze_now("r")
    assert {item.model_call_id for item in snapshot.entries} == expected
    assert snapshot.version == len(expected) + 1
    assert not snapshot.incomplete


def test_what_was_acknowledged_survives_kills_in_the_middle_of_appends(tmp_path: Path) -> None:
    """Half of the moments to kill at are random; the other half wait until the file has grown by a part of a line."""
    rng = random.Random(1)
    store = TokenStore(tmp_path)
    seen: list[str] = []
    log = tmp_path / f"r{ENTRIES}"
    for turn in range(KILLS):
        with program("put-large", tmp_path, f"w{turn}") as process:
            seen += acknowledged(process, 1 + turn % 3)
            if turn % 2:
                until_growing(log, rng)
            seen += killed(process)
        store.put_now(store_programs.large(f"between-{turn}"))
        seen.append(f"between-{turn}")
    snapshot = store.freeze_now("r")
    found = [item.model_call_id for item in snapshot.entries]
    assert len(found) == len(set(found)) == snapshot.version - 1
    assert set(seen) <= set(found)
    assert len(found) <= len(seen) + KILLS  # written whole, and killed before it could say so
    assert not snapshot.incomplete


def until_growing(log: Path, rng: random.Random) -> None:
    """Until another line is being written, however far by then."""
    size = log.stat().st_size
    while log.stat().st_size < size + rng.randrange(1, 400_000):
        pass


def test_a_freeze_among_writers_parts_what_counts_from_what_was_refused(tmp_path: Path) -> None:
    with (
        program("put-until-frozen", tmp_path, "a") as one,
        program("put-until-frozen", tmp_path, "b") as other,
    ):
        early = acknowledged(one, 3) + acknowledged(other, 3)
        snapshot = TokenStore(tmp_path).freeze_now("r")
        rest = acknowledged(one) + acknowledged(other)
        assert (one.wait(), other.wait()) == (0, 0)
    assert {item.model_call_id for item in snapshot.entries} == {*early, *rest}
    assert snapshot.version == len(early) + len(rest) + 1
    assert TokenStore(tmp_path).freeze_now("r").entries == snapshot.entries


def test_a_kill_between_any_two_steps_leaves_a_rollout_that_can_be_gone_on_with(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    for turn in range(KILLS):
        with program("live", tmp_path) as process:
            acknowledged(process, 1 + turn % 4)
            killed(process)
        try:
            snapshot = store.freeze_now("r")
        except FrozenRolloutError:
            assert not (tmp_path / f"r{ENTRIES}").exists() or store.sweep_retired(-1) == 1
        else:
            lives = {item.model_call_id.split("-")[1] for item in snapshot.entries}
            assert len(lives) <= 1, "two lives in one snapshot"
            assert store.drop_now("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        store.delete("r")
        store.put_now(entry("r", "c", [1], [2]))
        built = trajectories_for_rollout("r", [tmp_path])
        assert built is not None
        assert not built["mask_sample"]
