"""Frozen logs of masked rollouts, kept as files."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from freezepoint import evidence
from freezepoint.building import result_of
from freezepoint.core.frozen import FrozenLog, TimedOut
from freezepoint.evidence import EvidenceFolder, EvidenceKeeper
from freezepoint.lines import sources
from freezepoint.memory import MemoryBudget
from freezepoint.offline import OfflineBuilder
from freezepoint.outbox import build
from freezepoint.settings import WorkerSettings
from freezepoint.store.files import ENTRIES
from freezepoint_schemas.reasons import Reason
from freezepoint_schemas.results import Result
from tests.events import cancelled, clear, comparable, complete
from tests.frozen_logs import calls, frozen, referring

FORK = "m:[1,2]->[3] x:[1,2,3,4]->[5] y:[1,2,3,9]->[6]"
DAY_S = 86_400.0


def folder_in(tmp_path: Path, bytes_max: int = 1 << 20, age_s_max: float = DAY_S) -> EvidenceFolder:
    return EvidenceFolder(tmp_path / "evidence", bytes_max, age_s_max)


def rebuilt(path: Path) -> Result:
    with sources([str(path)]) as files:
        [result] = OfflineBuilder(WorkerSettings()).results(files, lambda error: pytest.fail(str(error)))
    return result


def kept(folder: EvidenceFolder) -> list[str]:
    return sorted(path.name for path in folder.folder.iterdir())


def many_facts() -> dict[str, Any]:
    return {
        "intents": frozenset({"lost", "withdrawn"}),
        "cancelled": frozenset({"withdrawn"}),
        "marks": frozenset({("c", "no token ids")}),
        "dispatch": clear("r", group_id="g", group_size=4),
    }


@pytest.mark.parametrize(
    "log",
    [
        frozen(calls(FORK)),
        frozen(calls(FORK), complete("r", n_calls=7, reward=1.0, terminal_call_id="x", metadata={"a": 1})),
        frozen(calls(FORK), cancelled("r", reason="crashed"), **many_facts()),
        frozen([]),
    ],
)
def test_what_is_kept_builds_the_same_result(tmp_path: Path, log: FrozenLog) -> None:
    path = folder_in(tmp_path).keep(log)
    assert path is not None
    assert path.name == "r.tokens.jsonl"
    assert comparable(rebuilt(path)) == comparable(result_of(log, WorkerSettings()))


def test_prompts_by_reference_are_kept_as_they_came(tmp_path: Path) -> None:
    m, x, y = calls(FORK)
    log = frozen([m, referring(x, m), y])
    path = folder_in(tmp_path).keep(log)
    assert path is not None
    assert comparable(rebuilt(path)) == comparable(result_of(log, WorkerSettings()))


@pytest.mark.parametrize(
    "log",
    [
        frozen(calls("a:[1]->[2]"), faults=frozenset({Reason.UNDECODABLE_RECORD})),
        FrozenLog("r", 0, 0, 9, TimedOut(), tuple(calls("a:[1]->[2]"))),
    ],
)
def test_what_has_no_event_stays_masked(tmp_path: Path, log: FrozenLog) -> None:
    path = folder_in(tmp_path).keep(log)
    assert path is not None
    assert rebuilt(path).mask_sample


def _aged(folder: EvidenceFolder, rollout_id: str, age_s: float) -> Path:
    path = folder.keep(frozen(calls(FORK), complete(rollout_id), rollout_id=rollout_id))
    assert path is not None
    now = path.stat().st_mtime
    os.utime(path, (now - age_s, now - age_s))
    return path


def test_what_is_too_old_goes(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    _aged(folder, "old", 2 * DAY_S)
    _aged(folder, "young", DAY_S / 2)
    folder.trim()
    assert kept(folder) == ["young.tokens.jsonl"]


def test_the_oldest_go_when_there_is_too_much(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    size = _aged(folder, "a", 30).stat().st_size
    _aged(folder, "b", 20)
    (folder.folder / "notes.txt").write_text("not ours")
    folder.bytes_max = 2 * size + size // 2
    _aged(folder, "c", 10)
    assert kept(folder) == ["b.tokens.jsonl", "c.tokens.jsonl", "notes.txt"]


def test_a_log_above_the_limit_is_not_kept(tmp_path: Path) -> None:
    folder = folder_in(tmp_path, bytes_max=10)
    assert folder.keep(frozen(calls(FORK))) is None
    assert kept(folder) == []


def test_only_masked_rollouts_are_offered(tmp_path: Path) -> None:
    settings = WorkerSettings(evidence_dir=tmp_path)
    keeper = EvidenceKeeper.of(settings)
    assert keeper is not None
    build(frozen(calls("a:[1]->[2]"), rollout_id="good"), settings, evidence=keeper)
    build(frozen(calls(FORK), rollout_id="bad"), settings, evidence=keeper)
    keeper.close()
    assert [path.name for path in tmp_path.iterdir()] == ["bad.tokens.jsonl"]
    assert (keeper.kept, keeper.dropped) == (1, 0)


def test_without_a_folder_nothing_is_kept() -> None:
    memory = MemoryBudget.of(WorkerSettings())
    assert memory.evidence is None
    memory.close()


def test_a_folder_that_cannot_be_written_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    settings = WorkerSettings(evidence_dir=tmp_path / "file" / "evidence")
    keeper = EvidenceKeeper.of(settings)
    with capture_logs() as logs:
        built = build(frozen(calls(FORK)), settings, evidence=keeper)
        assert keeper is not None
        keeper.close()
        keeper.offer(frozen(calls(FORK)))
    assert built.verdict.masked
    assert keeper.dropped == 2
    assert [line["event"] for line in logs] == ["evidence_not_kept"] * 2


def test_what_cannot_be_kept_up_with_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freezepoint.evidence.WAITING_BYTES_MAX", 1)
    keeper = EvidenceKeeper(folder_in(tmp_path))
    gate = threading.Event()
    keeper._thread.submit(gate.wait)
    keeper.offer(frozen(calls(FORK)))
    keeper.offer(frozen(calls(FORK), rollout_id="second"))
    gate.set()
    keeper.close()
    assert (keeper.kept, keeper.dropped) == (1, 1)


def test_the_files_are_named_as_a_store_names_them() -> None:
    assert evidence.ENTRIES == ENTRIES
