"""The reference's functions by name: what they return, what masks, which ids and directories they find."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from freezepoint.captured import CaptureSnapshot
from freezepoint.consumer import (
    clear_token_captures_for_rollouts,
    rollout_id_of,
    token_id_capture_dirs_from_config,
    trajectories_for_rollout,
    trajectories_from_source,
)
from freezepoint.errors import BrokerUnavailableError, ConfigurationError, InvalidRolloutIdError
from freezepoint.store import TokenStore
from freezepoint_schemas.events import TokenEntry
from tests.events import cancelled, entry
from tests.frozen_logs import frozen, referring

FIRST, SECOND = entry("r", "a", [1], [2, 3]), entry("r", "b", [1, 2, 3, 4], [5])


class Source:
    """Freezes to what it was given, or raises it."""

    def __init__(self, snapshot: Any) -> None:
        self.snapshot = snapshot
        self.asked: list[str] = []

    async def freeze(self, rollout_id: str) -> Any:
        self.asked.append(rollout_id)
        if isinstance(self.snapshot, Exception):
            raise self.snapshot
        return self.snapshot

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return True

    async def close(self) -> None:
        pass


def given(*entries: object, incomplete: bool = False) -> Source:
    return Source(SimpleNamespace(entries=entries, incomplete=incomplete, snapshot_id="s", version=3))


def test_none_only_without_a_directory(tmp_path: Path) -> None:
    assert trajectories_for_rollout("r", []) is None
    built = trajectories_for_rollout("r", [tmp_path])
    assert built is not None
    snapshot = built.pop("_capture_snapshot")
    assert built.pop("error") == "No call of this rollout was recorded."
    assert built == {
        "rollout_id": "r",
        "builder": "prefix_merging",
        "rebuilt_response": None,
        "mask_sample": True,
        "metrics": {"n_calls": 0},
    }
    assert snapshot["version"] == 1


def test_the_first_directory_is_the_one(tmp_path: Path) -> None:
    TokenStore(tmp_path / "2").put_now(FIRST)
    built = trajectories_for_rollout("r", [str(tmp_path / "1"), str(tmp_path / "2")])
    assert built is not None
    assert built["metrics"] == {"n_calls": 0}


def test_a_rollout_that_was_built_can_be_dropped_by_what_the_result_says(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    store.put_now(FIRST)
    store.put_now(SECOND)
    built = trajectories_for_rollout("r", [tmp_path], model="policy")
    assert built is not None
    assert not built["mask_sample"]
    assert built["rebuilt_response"]["model"] == "policy"
    assert built["rebuilt_response"]["usage"] == {"input_tokens": 1, "output_tokens": 3}
    assert store.drop_now("r", **built["_capture_snapshot"])
    late = trajectories_for_rollout("r", [tmp_path])
    assert late is not None
    assert late["mask_sample"]
    assert "retired" in late["error"]
    assert "_capture_snapshot" not in late


@pytest.mark.parametrize("how", ["mark", "intent", "conflict"])
def test_an_incomplete_capture_masks_and_says_so(tmp_path: Path, how: str) -> None:
    store = TokenStore(tmp_path)
    store.put_now(FIRST)
    if how == "mark":
        store.mark_incomplete_now("r", "b")
    elif how == "intent":
        store.begin_call_now("r", "b")
    else:
        with pytest.raises(ValueError, match="another payload"):
            store.put_now(entry("r", "a", [1], [9]))
    built = trajectories_for_rollout("r", [tmp_path])
    assert built is not None
    assert built["mask_sample"]
    assert built["metrics"]["capture_incomplete"] is True
    assert built["rebuilt_response"]["output"][0]["generation_token_ids"] == [2, 3]


def test_a_damaged_capture_and_a_bad_id_mask(tmp_path: Path) -> None:
    (tmp_path / "r.tokens.jsonl").write_bytes(b"{\n{}\n")
    for rollout_id in ("r", "../r", ""):
        built = trajectories_for_rollout(rollout_id, [tmp_path])
        assert built is not None
        assert built["mask_sample"]
        assert built["rebuilt_response"] is None
        assert built["metrics"] == {"n_calls": 0}
        assert built["error"].partition(":")[0] in {"DamagedCaptureError", "InvalidRolloutIdError"}


@pytest.mark.parametrize("builder", ["per_request", "unknown"])
def test_a_builder_that_cannot_deliver_masks(tmp_path: Path, builder: str) -> None:
    TokenStore(tmp_path).put_now(FIRST)
    built = trajectories_for_rollout("r", [tmp_path], builder=builder)
    assert built is not None
    assert (built["builder"], built["mask_sample"], built["metrics"]) == (builder, True, {"n_calls": 1})
    assert built["error"]


async def test_a_store_is_a_source(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    await store.put(FIRST)
    built = await trajectories_from_source("r", store)
    assert built == trajectories_for_rollout("r", [tmp_path])
    assert await store.drop("r", **built["_capture_snapshot"])


async def test_an_unreadable_rollout_is_one_line_however_logs_are_set_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = structlog.get_config()
    structlog.reset_defaults()
    try:
        await trajectories_from_source("r", Source(BrokerUnavailableError("no answer\nat all")))
    finally:
        structlog.configure(**before)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert "capture_unreadable" in said[0]
    assert "BrokerUnavailableError: no answer" in said[0]


async def test_a_source_that_fails_masks() -> None:
    built = await trajectories_from_source("r", Source(BrokerUnavailableError("no answer\nat all")))
    assert built["error"] == "BrokerUnavailableError: no answer"
    assert built["mask_sample"]
    assert "_capture_snapshot" not in built


@pytest.mark.parametrize("bad", [{}, {"model_call_id": "c"}, object(), None])
async def test_a_source_whose_entries_are_none_masks(bad: object) -> None:
    built = await trajectories_from_source("r", given(FIRST, bad))
    assert built["mask_sample"]
    assert built["_capture_snapshot"] == {"snapshot_id": "s", "version": 3}


async def test_an_incomplete_source_masks() -> None:
    built = await trajectories_from_source("r", given(FIRST, incomplete=True))
    assert built["mask_sample"]
    assert built["metrics"]["capture_incomplete"] is True
    empty = await trajectories_from_source("r", given(incomplete=True))
    assert empty["metrics"] == {"n_calls": 0, "capture_incomplete": True}


async def test_repeats_of_a_source_are_left_out_and_contradictions_mask() -> None:
    assert not (await trajectories_from_source("r", given(FIRST, FIRST, SECOND)))["mask_sample"]
    built = await trajectories_from_source("r", given(FIRST, entry("r", "a", [1], [9])))
    assert built["mask_sample"]
    assert built["rebuilt_response"]["output"][0]["generation_token_ids"] == [2, 3]


async def test_a_sources_entries_may_be_named_otherwise() -> None:
    """A source that puts a run's name before ids, and a caller that does not know of it."""
    built = await trajectories_from_source("0-1", given(FIRST, SECOND))
    assert built["rollout_id"] == "0-1"
    assert built["rebuilt_response"]["id"] == "proj-0-1"


async def test_our_snapshots_are_built_from_their_log() -> None:
    log = frozen([FIRST, referring(SECOND, FIRST)])
    whole = await trajectories_from_source("r", Source(CaptureSnapshot("r", "s", 3, False, log)))
    assert not whole["mask_sample"]
    assert whole["rebuilt_response"]["output"][1]["prompt_token_ids"] == [1, 2, 3, 4]
    given_up = frozen([FIRST], cancelled("r"))
    built = await trajectories_from_source("r", Source(CaptureSnapshot("r", "s", 3, True, given_up)))
    assert built["mask_sample"]


@pytest.mark.parametrize(
    ("record", "rollout_id"),
    [
        ({"_ng_task_index": 12, "_ng_rollout_index": 0}, "12-0"),
        ({"_ng_task_index": 12, "_ng_rollout_index": 3, "_ng_attempt_index": 0}, "12-3"),
        ({"_ng_task_index": 12, "_ng_rollout_index": 3, "_ng_attempt_index": 2}, "12-3-a2"),
        ({"_ng_task_index": "12", "_ng_rollout_index": "3", "_ng_attempt_index": "2"}, "12-3-a2"),
        (
            {"_ng_rollout_id": "own", "_ng_task_index": 1, "_ng_rollout_index": 2, "_ng_attempt_index": 3},
            "own",
        ),
        ({"_ng_rollout_id": 7}, "7"),
        ({"_ng_task_index": 12}, None),
        ({"_ng_rollout_index": 12}, None),
        ({}, None),
        (None, None),
        (SimpleNamespace(_ng_task_index=1, _ng_rollout_index=2, _ng_attempt_index=None), "1-2"),
    ],
)
def test_the_id_of_a_row(record: object, rollout_id: str | None) -> None:
    assert rollout_id_of(record) == rollout_id


def test_stale_captures_of_rows_are_cleared(tmp_path: Path) -> None:
    directories = [tmp_path / "1", tmp_path / "2"]
    for directory in directories:
        for name in ("0-0", "0-1", "0-1-a1", "other"):
            store = TokenStore(directory)
            store.put_now(entry(name, "a", [1], [2]))
            store.freeze_now(name)
    rows = [
        {"_ng_task_index": 0, "_ng_rollout_index": 0},
        {"_ng_task_index": 0, "_ng_rollout_index": 1, "_ng_attempt_index": 1},
        {"no": "id"},
    ]
    clear_token_captures_for_rollouts(rows, directories)
    clear_token_captures_for_rollouts(rows, [])
    for directory in directories:
        left = sorted(path.name.partition(".")[0] for path in directory.glob("*.tokens.jsonl"))
        assert left == ["0-1", "other"]
        TokenStore(directory).put_now(entry("0-0", "a", [1], [9]))
    with pytest.raises(InvalidRolloutIdError):
        clear_token_captures_for_rollouts([{"_ng_rollout_id": "../x"}], directories)


@pytest.mark.parametrize(
    ("config", "directories"),
    [
        (None, []),
        ({}, []),
        ({"token_id_capture": None}, []),
        ({"token_id_capture": {"dir": "/captures"}}, []),
        ({"token_id_capture": {"enabled": True, "dir": "/captures"}}, [Path("/captures")]),
        ({"token_id_capture": {"enabled": True}, "model_call_capture_dir": "/calls"}, [Path("/calls")]),
        (
            {"token_id_capture": {"enabled": True, "dir": Path("/a")}, "model_call_capture_dir": "/b"},
            [Path("/a")],
        ),
        ({"token_id_capture": {"enabled": True, "sink": "freezepoint.sink:TokenSink", "dir": "/a"}}, []),
        ({"token_id_capture": {"enabled": True, "rebuild_response": False}}, []),
    ],
)
def test_the_directory_of_a_configuration(config: Any, directories: list[Path]) -> None:
    assert token_id_capture_dirs_from_config(config) == directories


@pytest.mark.parametrize("block", [{"enabled": True}, {"enabled": True, "dir": "relative"}])
def test_a_configuration_that_keeps_nothing_is_refused(block: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"token_id_capture\.dir"):
        token_id_capture_dirs_from_config({"token_id_capture": block})


def test_a_snapshots_entries_are_plain(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    routed: TokenEntry = entry("r", "c", [1], [2], routed_experts=[[[1]], [[2]]])
    store.put_now(routed)
    [item] = store.freeze_now("r").entries
    assert type(item.prompt_token_ids) is list
    assert type(item.generation_token_ids[0]) is int
    assert item.model_copy(update={"prompt_token_ids": [9]}).prompt_token_ids == [9]
    assert item.model_dump()["routed_experts"] == [[[1]], [[2]]]


def test_what_is_expected_is_one_line_in_the_log(tmp_path: Path) -> None:
    """And what is not has its traceback."""
    store = TokenStore(tmp_path)
    for call in (FIRST, SECOND):
        store.put_now(call)
    path = tmp_path / "r.tokens.jsonl"
    path.write_bytes(b"damaged" + path.read_bytes())
    with capture_logs() as logs:
        trajectories_for_rollout("r", [tmp_path])
        trajectories_for_rollout("no/id", [tmp_path])
        trajectories_for_rollout("r", [path])
    assert [line["event"] for line in logs] == ["capture_unreadable"] * 3
    assert all(line["exc_info"] is None and "\n" not in line["error"] for line in logs)
    assert logs[0]["error"].startswith("DamagedCaptureError: ")


async def test_a_bug_of_a_source_is_logged_whole() -> None:
    bug = ZeroDivisionError("a bug")
    with capture_logs() as logs:
        await trajectories_from_source("r", Source(bug))
    assert [line["exc_info"] for line in logs] == [bug]
