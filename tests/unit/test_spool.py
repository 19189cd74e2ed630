"""The memory budget: what is spilled comes back the same, and nothing of it stays behind."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tracemalloc
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from freezepoint import spool as spool_module
from freezepoint.core.effects import Freeze
from freezepoint.core.partition import PartitionCore
from freezepoint.errors import ConfigurationError
from freezepoint.memory import STANDSTILL_S, WARNING_S, MemoryBudget
from freezepoint.outbox import build
from freezepoint.settings import WorkerSettings
from freezepoint.spool import Spool
from freezepoint_schemas import codec
from freezepoint_schemas.events import InputEvent
from tests.events import Bench, clear, complete, entry, intent, record, records_of


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


def is_full(memory: MemoryBudget) -> bool:
    return memory.full


def is_still(memory: MemoryBudget) -> bool:
    return memory.stands_still


def load(rollouts: int, calls: int) -> list[InputEvent]:
    """Interleaved rollouts with duplicates, other encodings and references that are resolved late."""
    rng = random.Random(1)
    events: list[InputEvent] = []
    for number in range(calls):
        for rollout in range(rollouts):
            name, prompt = f"r{rollout}", [rollout, *range(number)]
            call = entry(name, f"c{number}", prompt, [number], routed_experts=[[[number]]] * (number + 2))
            events += [intent(name, f"c{number}"), call]
            if rng.random() < 0.3:
                events.append(call)
    return events


@pytest.mark.parametrize("budget", [0, 20_000, 10**9])
def test_results_do_not_depend_on_the_budget(tmp_path: Path, budget: int) -> None:
    events = load(rollouts=12, calls=8)
    closings: list[InputEvent] = [complete(f"r{number}", n_calls=8) for number in range(12)]
    memory = MemoryBudget(budget, 1 << 30, Spool(tmp_path))
    core = PartitionCore(Bench().config)
    memory.register(core)
    results = []
    for item in records_of([*events, *closings]):
        for effect in core.feed(item):
            assert isinstance(effect, Freeze)
            results.append(build(effect.log, WorkerSettings(), memory.spool).record.value)
        memory.relieve(core)
        assert memory.used_bytes <= max(budget, 0)
    expected = Bench().run(records_of([*events, *closings]))
    assert results == [codec.encode_result(result) for result in expected]
    assert memory.spool.size_bytes == 0
    assert core.memory_bytes == 0
    memory.close()
    assert files_of(tmp_path) == []


def test_what_is_cleared_or_given_up_leaves_the_spool(tmp_path: Path) -> None:
    memory = MemoryBudget(0, 1 << 30, Spool(tmp_path))
    core = PartitionCore(Bench(entries_max=3).config)
    memory.register(core)
    events = [entry("r", "c1", [1], [2]), entry("s", "c1", [1], [2]), entry("t", "c1", [1], [2])]
    for item in records_of(
        [*events, clear("r"), *(entry("s", f"d{number}", [1], [2]) for number in range(3))]
    ):
        core.feed(item)
        memory.relieve(core)
    assert core.open["s"].oversized
    assert memory.spool.size_bytes > 0
    memory.unregister(core)
    assert memory.spool.size_bytes == 0
    memory.close()


def test_the_coldest_log_is_spilled_first(tmp_path: Path) -> None:
    memory = MemoryBudget(3 * 4_000, 1 << 30, Spool(tmp_path))
    core = PartitionCore(Bench().config)
    memory.register(core)
    for offset, name in enumerate(["a", "b", "c", "a", "d"]):
        core.feed(record(offset, name, entry(name, f"c{offset}", [1], [2])))
        memory.relieve(core)
    assert core.open["b"].spilled
    assert not core.open["d"].spilled
    memory.close()


def test_what_waits_to_be_published_has_its_part_of_the_budget(tmp_path: Path) -> None:
    memory = MemoryBudget(20_000, 1 << 30, Spool(tmp_path))
    core = PartitionCore(Bench().config)
    memory.register(core)
    for offset in range(3):
        core.feed(record(offset, f"r{offset}", entry(f"r{offset}", "c", [1], [2])))
    memory.relieve(core)
    assert memory.spool.size_bytes == 0
    memory.hold(16_000)
    memory.relieve(core)
    assert 0 < memory.used_bytes <= 4_000
    memory.hold(16_000)
    memory.relieve(core)
    assert memory.used_bytes == 0
    memory.close()


def test_a_full_spool_says_so_and_recovers_well_below_its_limit(tmp_path: Path) -> None:
    memory = MemoryBudget(0, 2_000, Spool(tmp_path))
    core = PartitionCore(Bench().config)
    memory.register(core)
    for offset in range(10):
        core.feed(record(offset, f"r{offset}", entry(f"r{offset}", "c", [1], [2])))
        memory.relieve(core)
    assert is_full(memory)
    for offset in range(10):
        core.feed(record(10 + offset, f"r{offset}", clear(f"r{offset}")))
        memory.relieve(core)
        assert is_full(memory) or memory.spool.size_bytes <= 1_600
    assert not is_full(memory)
    memory.close()


def fill(memory: MemoryBudget, core: PartitionCore, numbers: Iterable[int]) -> None:
    for number in numbers:
        core.feed(record(core.next_offset, f"r{number}", entry(f"r{number}", "c", [1], [2])))
        memory.relieve(core)


def test_a_full_spool_waits_for_what_is_in_flight_and_then_reads_on_up_to_its_limit(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    memory = MemoryBudget(0, 1 << 30, spool)
    core = PartitionCore(Bench().config)
    memory.register(core)
    fill(memory, core, range(100))
    memory.spool_bytes_max = int(spool.size_bytes / 0.95)
    fill(memory, core, [100])
    assert is_full(memory)

    memory.hold(1)
    for now in range(0, 100, 5):
        memory.look(now)
    assert is_full(memory), "what is in flight may free room"
    memory.drop(1)
    memory.look(100)
    memory.look(100 + STANDSTILL_S - 0.1)
    assert is_full(memory)
    with capture_logs() as lines:
        memory.look(100 + STANDSTILL_S)
        assert not is_full(memory)
        memory.look(100 + 2 * STANDSTILL_S)
        assert [line["event"] for line in lines] == ["spool_reserve_used"], "once"
        fill(memory, core, range(101, 120))
    assert is_full(memory), "the limit is the limit"
    assert not is_still(memory)

    with capture_logs() as lines:
        for now in range(200, 200 + 4 * int(WARNING_S), 5):
            memory.look(now)
    assert {line["event"] for line in lines} == {"intake_stands_still"}
    assert len(lines) == 4, "steadily, and not all the time"
    assert "worker.spool_bytes_max" in lines[0]["message"]
    assert is_still(memory)
    assert is_full(memory)

    while memory.spool.size_bytes > memory.spool_bytes_max:
        end_one(memory, core)
    assert is_full(memory), "no more than every now and then"
    memory.look(1_000)
    assert not is_full(memory), "but although it is not relieved yet"
    assert not is_still(memory)
    memory.close()


def end_one(memory: MemoryBudget, core: PartitionCore) -> None:
    """One rollout less."""
    name = next(iter(core.open))
    core.feed(record(core.next_offset, name, clear(name)))
    memory.relieve(core)


def test_a_full_disk_pauses_intake_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, room = spool_module._pwrite, [40_000]

    def bounded(descriptor: int, block: bytes, offset: int) -> None:
        write(descriptor, block[: room[0]], offset)  # a disk takes what still fits
        room[0] -= len(block)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spool_module, "_pwrite", bounded)
    memory = MemoryBudget(0, 1 << 30, Spool(tmp_path))
    core = PartitionCore(Bench().config)
    memory.register(core)
    calls = [entry(f"r{number}", "c", [number] * 1_000, [2]) for number in range(20)]
    for item in records_of(calls):
        core.feed(item)
        memory.relieve(core)
    assert is_full(memory)
    memory.look(0.0)
    assert is_full(memory)
    assert memory.used_bytes > 0
    room[0] = 1 << 30
    memory.look(0.0)
    assert not is_full(memory)
    assert memory.used_bytes == 0
    found = [call for life in core.open.values() for call in memory.spool.read(life.spilled)]
    assert [codec.encode_event(call) for call in found] == [codec.encode_event(call) for call in calls]
    memory.close()


def test_a_log_is_never_encoded_in_one_piece(tmp_path: Path) -> None:
    """Else spilling one that fills the budget takes the budget twice more."""
    spool = Spool(tmp_path)
    calls = [entry("r", f"c{number}", [number] * 100_000, [2]) for number in range(100)]
    held = sum(call.prompt_token_ids.nbytes for call in calls)
    tracemalloc.start()
    try:
        ref = spool.write(calls)
        _, written = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        found = spool.read([ref])
        _, read = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert written < held / 2
    assert read - before < 1.25 * held
    assert [call.model_call_id for call in found] == [call.model_call_id for call in calls]
    spool.close()


def test_segments_go_with_the_last_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "SEGMENT_BYTES", 1_000)
    spool = Spool(tmp_path)
    refs = [spool.write([entry("r", f"c{number}", [1] * 100, [2])]) for number in range(20)]
    assert len(files_of(tmp_path)) > 3
    assert [found.model_call_id for found in spool.read(refs)] == [f"c{number}" for number in range(20)]
    for ref in refs:
        spool.free([ref])
    assert len(files_of(tmp_path)) <= 1
    spool.write([entry("r", "c", [1], [2])])
    spool.close()


def test_workers_that_start_together_leave_each_others_spools_alone(tmp_path: Path) -> None:
    def live(_: int) -> None:
        Spool(tmp_path).close()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(live, range(120)))
    assert not list(tmp_path.iterdir())


def test_spools_of_dead_workers_are_swept_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    living = Spool(tmp_path)
    ref = living.write([entry("r", "c", [1], [2])])
    abandoned = tmp_path / "freezepoint-spool-dead"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    (abandoned / "00000000").write_bytes(b"old")
    other = Spool(tmp_path)
    assert not abandoned.exists()
    assert len(living.take([ref])) == 1
    living.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigurationError, match="spool_folder"):
        Spool(blocked / "below")


def test_a_spool_whose_folder_is_deleted_goes_on_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary files are tidied up by others; without its lock, even by workers that start."""
    monkeypatch.setattr(spool_module, "SEGMENT_BYTES", 1)
    spool = Spool(tmp_path)
    first = [entry("r", "c1", [1], [2])]
    second = [entry("r", "c2", [1, 2], [3])]
    refs = [spool.write(first)]
    shutil.rmtree(tmp_path)
    with pytest.raises(OSError, match="No such file"):
        spool.write(second)
    tmp_path.mkdir()
    refs.append(spool.write(second))
    Spool(tmp_path).close()
    assert [found.model_call_id for found in spool.read(refs)] == ["c1", "c2"]
    assert len(files_of(tmp_path)) == 1
    spool.free(refs)
    assert not files_of(tmp_path)
    spool.close()
    assert not list(tmp_path.iterdir())
