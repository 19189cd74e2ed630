"""Frozen logs of masked rollouts, kept as files."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from freezepoint import evidence
from freezepoint.building import result_of
from freezepoint.captures import capture_files
from freezepoint.core.frozen import FrozenLog, TimedOut
from freezepoint.errors import ConfigurationError
from freezepoint.evidence import MARKER, STALE_S, EvidenceFolder, EvidenceKeeper, NotKeptError
from freezepoint.lines import sources
from freezepoint.memory import MemoryBudget
from freezepoint.offline import OfflineBuilder
from freezepoint.outbox import build
from freezepoint.settings import WorkerSettings
from freezepoint.store.files import ENTRIES
from freezepoint_schemas.reasons import Reason
from freezepoint_schemas.results import Result
from freezepoint_schemas.topics import is_rollout_id
from tests.events import cancelled, clear, comparable, complete
from tests.frozen_logs import calls, frozen, referring
from tests.polling import poll_until

FORK = "m:[1,2]->[3] x:[1,2,3,4]->[5] y:[1,2,3,9]->[6]"
DAY_S = 86_400.0


def folder_in(tmp_path: Path, bytes_max: int = 1 << 20, age_s_max: float = DAY_S) -> EvidenceFolder:
    return EvidenceFolder(tmp_path / "evidence", bytes_max, age_s_max)


def rebuilt(path: Path) -> Result:
    with sources([str(path)]) as files:
        [result] = OfflineBuilder(WorkerSettings()).results(files, lambda error: pytest.fail(str(error)))
    return result


def kept(folder: EvidenceFolder) -> list[str]:
    """All that is in the folder, but for the marker."""
    return sorted(path.name for path in folder.folder.iterdir() if path.name != MARKER)


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
    assert path.name == "r.tokens.jsonl"
    assert comparable(rebuilt(path)) == comparable(result_of(log, WorkerSettings()))


def test_prompts_by_reference_are_kept_as_they_came(tmp_path: Path) -> None:
    m, x, y = calls(FORK)
    log = frozen([m, referring(x, m), y])
    path = folder_in(tmp_path).keep(log)
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
    assert rebuilt(path).mask_sample


def _aged(folder: EvidenceFolder, rollout_id: str, age_s: float) -> Path:
    path = folder.keep(frozen(calls(FORK), complete(rollout_id), rollout_id=rollout_id))
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
    folder.trim()
    assert kept(folder) == ["b.tokens.jsonl", "c.tokens.jsonl", "notes.txt"]


def test_a_log_above_the_limit_is_not_kept(tmp_path: Path) -> None:
    folder = folder_in(tmp_path, bytes_max=10)
    with pytest.raises(NotKeptError, match="evidence_bytes_max"):
        folder.keep(frozen(calls(FORK)))
    assert kept(folder) == []


def test_only_masked_rollouts_are_offered(tmp_path: Path) -> None:
    settings = WorkerSettings(evidence_dir=tmp_path)
    keeper = EvidenceKeeper.of(settings)
    assert keeper is not None
    build(frozen(calls("a:[1]->[2]"), rollout_id="good"), settings, evidence=keeper)
    build(frozen(calls(FORK), rollout_id="bad"), settings, evidence=keeper)
    keeper.close()
    assert kept(keeper.folder) == ["bad.tokens.jsonl"]
    assert (keeper.kept, keeper.dropped) == (1, 0)


def test_without_a_folder_nothing_is_kept() -> None:
    memory = MemoryBudget.of(WorkerSettings())
    assert memory.evidence is None
    memory.close()


def test_a_folder_that_cannot_be_written_any_more_fails_nothing(tmp_path: Path) -> None:
    settings = WorkerSettings(evidence_dir=tmp_path / "evidence")
    keeper = EvidenceKeeper.of(settings)
    shutil.rmtree(tmp_path / "evidence")
    (tmp_path / "evidence").write_text("in the way")
    with capture_logs() as logs:
        built = build(frozen(calls(FORK)), settings, evidence=keeper)
        assert keeper is not None
        keeper.close()
        keeper.offer(frozen(calls(FORK)))
    assert built.verdict.masked
    assert keeper.dropped == 2
    assert [line["event"] for line in logs if line["event"] == "evidence_not_kept"] == [
        "evidence_not_kept"
    ] * 2


def test_what_cannot_be_kept_up_with_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freezepoint.evidence.WAITING_BYTES_MAX", 1)
    gate = threading.Event()
    monkeypatch.setattr(EvidenceFolder, "claim", lambda _: gate.wait())
    (tmp_path / "evidence").mkdir()
    keeper = EvidenceKeeper(folder_in(tmp_path))
    keeper.offer(frozen(calls(FORK)))
    keeper.offer(frozen(calls(FORK), rollout_id="second"))
    gate.set()
    keeper.close()
    assert (keeper.kept, keeper.dropped) == (1, 1)


def test_nothing_is_deleted_that_it_did_not_write(tmp_path: Path) -> None:
    """Whatever lies in the folder, old and large as it may be."""
    folder = folder_in(tmp_path, bytes_max=1_000)
    _aged(folder, "old", 2 * DAY_S)
    foreign = [
        "download.part",
        "notes.txt",
        "x.tokens.jsonl.gz",
        "-no-id.tokens.jsonl",
        "a.intents",
        ".hidden",
    ]
    for name in foreign:
        (folder.folder / name).write_bytes(b"x" * 2_000)
        os.utime(folder.folder / name, (1, 1))
    (folder.folder / "folder.tokens.jsonl").mkdir()
    (folder.folder / "link.tokens.jsonl").symlink_to(folder.folder / "notes.txt")
    folder.trim()
    assert kept(folder) == sorted([*foreign, "folder.tokens.jsonl", "link.tokens.jsonl"])


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    """A token store's files have the same names."""
    live = tmp_path / "live.tokens.jsonl"
    live.write_text("{}\n")
    os.utime(live, (1, 1))
    settings = WorkerSettings(evidence_dir=tmp_path, evidence_bytes_max=0)
    with pytest.raises(
        ConfigurationError, match=r"evidence_dir .* has other files in it \(live.tokens.jsonl\)"
    ):
        MemoryBudget.of(settings)
    folder = EvidenceFolder(tmp_path, 0, 1.0)
    folder.trim()
    with pytest.raises(ConfigurationError, match="new or empty"):
        folder.keep(frozen(calls(FORK)))
    assert [path.name for path in tmp_path.iterdir()] == ["live.tokens.jsonl"]


@pytest.mark.parametrize("existing", [[], ["lost+found"], [MARKER], [MARKER, "a.tokens.jsonl"]])
def test_a_folder_that_is_new_empty_or_marked_is_taken(tmp_path: Path, existing: list[str]) -> None:
    folder = folder_in(tmp_path)
    for name in existing:
        folder.folder.mkdir(exist_ok=True)
        (folder.folder / name).touch()
    folder.claim()
    folder.claim()
    assert (folder.folder / MARKER).exists()


def test_what_a_crash_left_goes_in_time(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    folder.claim()
    for name, age_s in ((".freezepoint-0123456789abcdef.part", 2), (".freezepoint-fedcba9876543210.part", 0)):
        (folder.folder / name).write_text("{")
        moment = time.time() - age_s * STALE_S
        os.utime(folder.folder / name, (moment, moment))
    folder.trim()
    assert kept(folder) == [".freezepoint-fedcba9876543210.part"]


def test_age_counts_while_nothing_new_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "TRIM_INTERVAL_S", 0.01)
    folder = folder_in(tmp_path)
    _aged(folder, "before", 2 * DAY_S)
    keeper = EvidenceKeeper(folder)
    poll_until(lambda: kept(folder) == [], 30, "what was too old at the start goes")
    _aged(folder, "later", 2 * DAY_S)
    poll_until(lambda: kept(folder) == [], 30, "what grew too old goes")
    keeper.close()


@pytest.mark.parametrize("length", [1, 200, 242, 243, 255])
def test_ids_of_any_length_are_kept_or_refused_with_the_reason(tmp_path: Path, length: int) -> None:
    name = "x" * length
    assert is_rollout_id(name)
    entries = [call.model_copy(update={"rollout_id": name}) for call in calls(FORK)]
    log = frozen(entries, complete(name), rollout_id=name)
    keeper = EvidenceKeeper(folder_in(tmp_path))
    keeper.folder.claim()
    with capture_logs() as logs:
        keeper.offer(log)
        keeper.close()
    if length <= 242:
        assert kept(keeper.folder) == [f"{name}.tokens.jsonl"]
        [path] = capture_files(keeper.folder.folder)
        assert rebuilt(Path(path)).mask_sample
    else:
        assert kept(keeper.folder) == []
        [line] = logs
        assert "longer than 255 bytes" in line["why"]


def test_workers_that_share_a_folder_do_not_fail_each_other(tmp_path: Path) -> None:
    keepers = [EvidenceKeeper(folder_in(tmp_path, bytes_max=3_000)) for _ in range(3)]
    with capture_logs() as logs:
        for number in range(200):
            for which, keeper in enumerate(keepers):
                keeper.offer(frozen(calls(FORK), rollout_id=f"w{which}-{number}"))
        for keeper in keepers:
            keeper.close()
    assert logs == []
    assert [keeper.kept for keeper in keepers] == [200] * 3
    folder = keepers[0].folder
    assert sum(path.stat().st_size for path in folder.folder.iterdir() if path.name != MARKER) <= 3_000


def test_a_later_masked_life_replaces_the_earlier_file(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    folder.keep(frozen(calls(FORK)))
    path = folder.keep(frozen(calls("a:[1]->[2] b:[9]->[8]")))
    assert kept(folder) == ["r.tokens.jsonl"]
    assert rebuilt(path).metrics["n_calls"] == 2


def test_the_files_are_named_as_a_store_names_them() -> None:
    assert evidence.ENTRIES == ENTRIES
