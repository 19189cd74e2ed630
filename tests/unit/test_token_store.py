"""The local store: what each method does to one rollout, on the real file system."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from freezepoint.captured import CapturedEntry, CaptureSnapshot
from freezepoint.errors import (
    ConflictingEntryError,
    DecodeError,
    FrozenRolloutError,
    InputError,
    InvalidRolloutIdError,
)
from freezepoint.store import TokenStore
from freezepoint.store.log import line_of
from freezepoint_schemas.events import TokenEntry
from tests.events import entry
from tests.frozen_logs import referring

IO_COUNTERS = Path("/proc/thread-self/io")


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return TokenStore(tmp_path / "captures")


def call(call_id: str = "c1", generation: tuple[int, ...] = (4, 5), **fields: Any) -> TokenEntry:
    return entry("r", call_id, [1, 2, 3], generation, **fields)


def call_ids(snapshot: CaptureSnapshot) -> list[str]:
    return [item.model_call_id for item in snapshot.entries]


def lines(store: TokenStore, rollout_id: str = "r") -> list[dict[str, Any]]:
    path = store.directory / f"{rollout_id}.tokens.jsonl"
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


# -------------------------------------------------------------------------------------------------------- recording


async def test_the_same_again_is_no_error_and_changes_nothing(store: TokenStore) -> None:
    await store.put(call())
    await store.put(call())
    await store.put(call().model_copy())
    snapshot = await store.freeze("r")
    assert call_ids(snapshot) == ["c1"]
    assert snapshot.version == 2
    assert not snapshot.incomplete
    assert len(lines(store)) == 1


@pytest.mark.parametrize(
    "other",
    [
        call(generation=(4, 6)),
        call(generation=(4,)),
        call(model="other"),
        call(created_at=1.0),
        call(routed_experts=[[[1]]]),
        call(output_items=[{"type": "message", "content": "?"}]),
        call(parent_call_id="c0"),
        entry("r", "c1", [1, 2], (4, 5)),
        call(generation_log_probs=[-0.25, -0.5000001]),
    ],
)
def test_any_difference_is_an_error_and_the_first_is_kept(store: TokenStore, other: TokenEntry) -> None:
    store.put_now(call())
    with pytest.raises(ConflictingEntryError, match="c1"):
        store.put_now(other)
    snapshot = store.freeze_now("r")
    assert snapshot.incomplete
    assert [item.model_dump() for item in snapshot.entries] == [as_captured(call()).model_dump()]
    assert snapshot.version == 3


def as_captured(item: TokenEntry) -> CapturedEntry:
    return CapturedEntry.model_validate(item.model_dump(exclude={"event"}))


def test_every_form_of_an_entry_is_taken_and_is_the_same(store: TokenStore) -> None:
    whole = call()
    fields = whole.model_dump(exclude={"event"})
    assert isinstance(fields["prompt_token_ids"], list)
    store.put_now(whole)
    store.put_now(fields)
    store.put_now({"event": "token_entry", **fields})
    store.put_now(SimpleNamespace(**fields))
    store.put_now(as_captured(whole))
    store.put_now({**fields, "generation_log_probs": np.array(fields["generation_log_probs"])})
    snapshot = store.freeze_now("r")
    assert len(snapshot.entries) == 1
    assert not snapshot.incomplete
    store.delete("r")
    store.put_now(snapshot.entries[0])
    assert store.freeze_now("r").entries == snapshot.entries


def test_a_line_is_a_capture_line_of_the_reference_with_what_it_does_not_know(store: TokenStore) -> None:
    store.put_now(
        {**call(routed_experts=[[[7]], [[1]]]).model_dump(), "cum_len": 5, "digest": "d", "none": None}
    )
    assert lines(store) == [
        {
            "schema_version": 1,
            "rollout_id": "r",
            "model_call_id": "c1",
            "model": "",
            "prompt_token_ids": [1, 2, 3],
            "generation_token_ids": [4, 5],
            "generation_log_probs": [-0.25, -0.5],
            "routed_experts": [[[7]], [[1]]],
            "output_items": [{"type": "message", "content": "c1"}],
            "token_item_index": 0,
            "created_at": 0.0,
            "cum_len": 5,
            "digest": "d",
        }
    ]


def test_numbers_come_back_as_they_were(store: TokenStore) -> None:
    log_probs = [-0.1, -1e-300, -np.pi, -0.0, 1e-9, -float(np.float32(0.1)), -123456.789]
    tokens = [0, 2**31 - 1, 1, 2, 3, 4, 5]
    routes = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)[:, ::2]
    item = entry("r", "c", tokens, tokens, generation_log_probs=log_probs, routed_experts=routes)
    store.put_now(item)
    [found] = store.freeze_now("r").entries
    assert found.generation_log_probs == log_probs
    assert found.prompt_token_ids == found.generation_token_ids == tokens
    assert found.routed_experts == routes.tolist()


def test_a_later_version_of_the_reference_is_taken_where_its_prompt_is_proved_whole(
    store: TokenStore,
) -> None:
    fields = call().model_dump()
    store.put_now({**fields, "schema_version": 3, "cum_len": 5})
    for wrong in ({"cum_len": 4}, {}, {"schema_version": 4, "cum_len": 5}):
        with pytest.raises(DecodeError):
            store.put_now({**fields, "model_call_id": "c2", "schema_version": 3, **wrong})
    assert call_ids(store.freeze_now("r")) == ["c1"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_call_id": ""},
        {"prompt_token_ids": [-1]},
        {"generation_log_probs": [0.0]},
        {"generation_log_probs": [0.0, float("nan")]},
        {"token_item_index": 5},
        {"event": "call_intent"},
        {"unknown": object()},
        {"rollout_id": None},
    ],
)
def test_what_is_no_entry_leaves_no_trace(store: TokenStore, wrong: dict[str, Any]) -> None:
    with pytest.raises((InputError, TypeError)):
        store.put_now({**call().model_dump(), **wrong})
    assert list(store.directory.iterdir()) == []


@pytest.mark.parametrize(
    "rollout_id",
    ["", "../x", "a/b", "/x", ".", "..", ".x", "-x", "a b", "a\n", "a\0", "é", "x" * 238, None, 3],
)
async def test_what_is_no_rollout_id_is_refused_everywhere(store: TokenStore, rollout_id: Any) -> None:
    with pytest.raises(InvalidRolloutIdError):
        await store.put({**call().model_dump(), "rollout_id": rollout_id})
    with pytest.raises(InvalidRolloutIdError):
        await store.begin_call(rollout_id, "c")
    with pytest.raises(InvalidRolloutIdError):
        await store.cancel_call(rollout_id, "c")
    with pytest.raises(InvalidRolloutIdError):
        await store.mark_incomplete(rollout_id)
    with pytest.raises(InvalidRolloutIdError):
        await store.freeze(rollout_id)
    with pytest.raises(InvalidRolloutIdError):
        await store.drop(rollout_id, snapshot_id="", version=0)
    with pytest.raises(InvalidRolloutIdError):
        store.delete(rollout_id)
    assert [path.name for path in store.directory.parent.rglob("*")] == ["captures"]


def test_the_longest_rollout_id_works(store: TokenStore) -> None:
    rollout_id = "x" * 237
    store.put_now(entry(rollout_id, "c", [1], [2]))
    store.begin_call_now(rollout_id, "c")
    store.mark_incomplete_now(rollout_id, "c")
    snapshot = store.freeze_now(rollout_id)
    assert store.drop_now(rollout_id, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    assert store.sweep_retired(0) == 1


@pytest.mark.parametrize("model_call_id", ["", "x" * 1025, "\ud800"])
def test_what_is_no_call_id_is_refused(store: TokenStore, model_call_id: str) -> None:
    with pytest.raises(DecodeError):
        store.begin_call_now("r", model_call_id)
    if model_call_id:
        with pytest.raises(DecodeError):
            store.mark_incomplete_now("r", model_call_id)
    assert list(store.directory.iterdir()) == []


@pytest.mark.parametrize(
    "call_id", ["c", "-c", "--", " c ", "a\nb", 'say "x"', '"', "é", "\x85", "\u2028", "-"]
)
def test_an_announced_call_that_is_not_recorded_masks(store: TokenStore, call_id: str) -> None:
    store.put_now(call("c0"))
    store.begin_call_now("r", call_id)
    assert TokenStore(store.directory).freeze_now("r").incomplete
    store.delete("r")
    store.begin_call_now("r", call_id)
    store.cancel_call_now("r", call_id)
    assert not store.freeze_now("r").incomplete
    store.delete("r")
    store.begin_call_now("r", call_id)
    store.put_now(call(call_id))
    assert not store.freeze_now("r").incomplete


def test_a_call_announced_again_after_it_was_withdrawn_counts(store: TokenStore) -> None:
    store.begin_call_now("r", "c")
    store.cancel_call_now("r", "c")
    store.begin_call_now("r", "c")
    assert store.freeze_now("r").incomplete


# -------------------------------------------------------------------------------------------------- freezing, dropping


def test_the_version_counts_calls_marks_and_the_freeze(store: TokenStore) -> None:
    for number in range(3):
        store.put_now(call(f"c{number}"))
    first = store.freeze_now("r")
    assert first.version == 4
    assert len(first.snapshot_id) == 32
    again = TokenStore(store.directory).freeze_now("r")
    assert (again.snapshot_id, again.version, again.entries) == (first.snapshot_id, 4, first.entries)


def test_a_mark_after_the_freeze_keeps_the_id_and_raises_the_version(store: TokenStore) -> None:
    store.put_now(call())
    stale = store.freeze_now("r")
    store.mark_incomplete_now("r", "c2")
    fresh = store.freeze_now("r")
    assert fresh.snapshot_id == stale.snapshot_id
    assert fresh.version == stale.version + 1
    assert fresh.incomplete
    assert not stale.incomplete
    assert not store.drop_now("r", snapshot_id=stale.snapshot_id, version=stale.version)
    assert call_ids(store.freeze_now("r")) == ["c1"]
    assert store.drop_now("r", snapshot_id=fresh.snapshot_id, version=fresh.version)


def test_marks_before_and_after_calls_are_counted(store: TokenStore) -> None:
    store.mark_incomplete_now("r")
    store.put_now(call("a"))
    store.mark_incomplete_now("r", "b")
    store.put_now(call("c"))
    snapshot = store.freeze_now("r")
    assert snapshot.version == 5
    assert snapshot.log.marks == {("", ""), ("b", "")}


def test_nothing_is_recorded_after_the_freeze(store: TokenStore) -> None:
    store.put_now(call())
    before = store.freeze_now("r")
    late_ones: list[Callable[[], None]] = [
        lambda: store.put_now(call("c2")),
        lambda: store.put_now(call()),
        lambda: store.begin_call_now("r", "c2"),
        lambda: store.cancel_call_now("r", "c2"),
    ]
    for late in late_ones:
        with pytest.raises(FrozenRolloutError, match="frozen"):
            late()
    after = store.freeze_now("r")
    assert (after, after.entries) == (before, before.entries)


def test_an_unknown_rollout_gives_an_empty_snapshot(store: TokenStore) -> None:
    snapshot = store.freeze_now("r")
    assert (snapshot.entries, snapshot.version, snapshot.incomplete) == ((), 1, False)
    with pytest.raises(FrozenRolloutError):
        store.put_now(call())


def test_two_drops_with_the_same_arguments_are_both_true(store: TokenStore) -> None:
    store.put_now(call())
    snapshot = store.freeze_now("r")
    named = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
    assert not store.drop_now("r", snapshot_id="0" * 32, version=snapshot.version)
    assert not store.drop_now("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version + 1)
    assert store.drop_now("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    assert store.drop_now("r", **named)  # type: ignore[arg-type]
    assert not store.drop_now("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version + 1)
    assert not store.drop_now("other", snapshot_id="", version=0)


def test_an_open_rollout_is_not_dropped(store: TokenStore) -> None:
    store.put_now(call())
    assert not store.drop_now("r", snapshot_id="", version=0)
    store.mark_incomplete_now("r")
    assert not store.drop_now("r", snapshot_id="", version=1)
    assert call_ids(store.freeze_now("r")) == ["c1"]


def test_a_tombstone_refuses_everything_until_it_is_deleted(store: TokenStore) -> None:
    drop(store, call(), intent="c1")
    assert sorted(path.name for path in store.directory.iterdir()) == ["r.tokens.lock", "r.tokens.state.json"]
    for late in (
        lambda: store.put_now(call()),
        lambda: store.begin_call_now("r", "c"),
        lambda: store.mark_incomplete_now("r"),
        lambda: store.freeze_now("r"),
    ):
        with pytest.raises(FrozenRolloutError, match="retired"):
            late()
    store.delete("r")
    store.put_now(call(generation=(9,)))
    snapshot = store.freeze_now("r")
    assert snapshot.entries[0].generation_token_ids == [9]
    assert snapshot.version == 2


def drop(store: TokenStore, item: TokenEntry, intent: str | None = None) -> None:
    if intent is not None:
        store.begin_call_now(item.rollout_id, intent)
    store.put_now(item)
    snapshot = store.freeze_now(item.rollout_id)
    assert store.drop_now(item.rollout_id, snapshot_id=snapshot.snapshot_id, version=snapshot.version)


def test_each_life_has_an_id_of_its_own(store: TokenStore) -> None:
    seen = set()
    for _ in range(3):
        store.put_now(call())
        snapshot = store.freeze_now("r")
        assert snapshot.version == 2
        seen.add(snapshot.snapshot_id)
        store.delete("r")
    assert len(seen) == 3


def test_deleting_what_is_not_there_leaves_no_trace(store: TokenStore) -> None:
    store.delete("r")
    assert list(store.directory.iterdir()) == []


def test_a_delete_forgets_everything(store: TokenStore) -> None:
    store.begin_call_now("r", "lost")
    store.mark_incomplete_now("r", "lost")
    store.put_now(call())
    store.delete("r")
    store.delete("r")
    snapshot = store.freeze_now("r")
    assert (snapshot.entries, snapshot.incomplete, snapshot.version) == ((), False, 1)


def test_old_tombstones_are_swept_and_nothing_else(store: TokenStore) -> None:
    for name in ("old", "young"):
        drop(store, entry(name, "c", [1], [2]))
    for name in ("frozen", "open", "marked"):
        store.put_now(entry(name, "c", [1], [2]))
    store.freeze_now("frozen")
    store.mark_incomplete_now("marked")
    (store.directory / "damaged.tokens.state.json").write_bytes(b"{")
    (store.directory / "no id.tokens.state.json").write_bytes(b"{}")
    for path in store.directory.iterdir():
        if not path.name.startswith("young"):
            os.utime(path, (0, 0))
    assert store.sweep_retired(3600) == 1
    assert store.sweep_retired(3600) == 0
    assert not list(store.directory.glob("old.*"))
    assert {path.name.partition(".")[0] for path in store.directory.iterdir()} == {
        "young", "frozen", "open", "marked", "damaged", "no id",
    }  # fmt: skip
    store.put_now(entry("old", "c", [1], [3]))
    assert store.freeze_now("old").entries[0].generation_token_ids == [3]
    with pytest.raises(FrozenRolloutError):
        store.put_now(entry("young", "c", [1], [2]))


# ------------------------------------------------------------------------------------------------------ several users


def test_another_store_on_the_directory_sees_everything_at_once(store: TokenStore) -> None:
    other = TokenStore(store.directory)
    for number in range(10):
        (store, other)[number % 2].put_now(call(f"c{number}"))
        (other, store)[number % 2].put_now(call(f"c{number}"))
    with pytest.raises(ConflictingEntryError):
        other.put_now(call("c0", (9,)))
    assert len(lines(store)) == 10
    store.delete("r")
    other.put_now(call("c0", (9,)))
    store.put_now(call("c0", (9,)))
    assert [line["generation_token_ids"] for line in lines(store)] == [[9]]


def test_a_life_like_the_last_one_is_not_taken_for_it(store: TokenStore) -> None:
    """Inode, size and even the bytes may be the same: what was known of the last life does not hold."""
    other = TokenStore(store.directory)
    other.put_now(call("a"))
    store.delete("r")
    store.put_now(call("b"))
    other.put_now(call("a"))
    assert call_ids(store.freeze_now("r")) == ["b", "a"]


def test_a_swept_life_is_not_taken_for_the_next_one(store: TokenStore) -> None:
    other = TokenStore(store.directory)
    other.put_now(call("a"))
    snapshot = store.freeze_now("r")
    assert store.drop_now("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    assert store.sweep_retired(0) == 1
    store.put_now(call("b"))
    other.put_now(call("a"))
    assert call_ids(store.freeze_now("r")) == ["b", "a"]


@pytest.mark.skipif(not IO_COUNTERS.exists(), reason="the kernel does not count what a process reads")
def test_an_append_reads_only_what_others_wrote(store: TokenStore) -> None:
    items = [entry("r", f"c{number}", range(2_000), [1]) for number in range(60)]
    size = sum(map(len, line_of(items[0], {})))
    start = bytes_read()
    for item in items[:50]:
        store.put_now(item)
    assert bytes_read() - start < size
    other = TokenStore(store.directory)
    start = bytes_read()
    for item in items[50:]:
        other.put_now(item)
    assert bytes_read() - start < 55 * size
    start = bytes_read()
    store.put_now(items[0])
    assert 10 * size < bytes_read() - start < 12 * size


def bytes_read() -> int:
    """What this process has read from files so far."""
    return int(IO_COUNTERS.read_text().split()[1])


def test_what_is_known_in_memory_is_bounded(tmp_path: Path) -> None:
    store = TokenStore(tmp_path, rollouts_indexed_max=3)
    for turn in range(3):
        for number in range(10):
            store.put_now(entry(f"r{number}", f"c{turn}", [1], [2]))
    assert len(store._indexes) == 3
    assert all(store.freeze_now(f"r{number}").version == 4 for number in range(10))


async def test_many_at_once_in_one_process(store: TokenStore) -> None:
    items = [entry(f"r{number % 3}", f"c{number}", [1], [2]) for number in range(60)]
    await asyncio.gather(*(store.put(item) for item in items + items))
    snapshots = await asyncio.gather(*(store.freeze(f"r{number}") for number in range(3)))
    assert [snapshot.version for snapshot in snapshots] == [21] * 3
    assert [len(lines(store, f"r{number}")) for number in range(3)] == [20] * 3


def test_one_freeze_of_many_wins_and_all_agree(store: TokenStore) -> None:
    start = threading.Barrier(8)
    snapshots: list[CaptureSnapshot] = []
    recorded: list[str] = []

    def put(number: int) -> None:
        start.wait()
        try:
            store.put_now(call(f"c{number}"))
            recorded.append(f"c{number}")
        except FrozenRolloutError:
            pass

    def freeze() -> None:
        start.wait()
        snapshots.append(store.freeze_now("r"))

    threads = [threading.Thread(target=put, args=(number,)) for number in range(4)]
    threads += [threading.Thread(target=freeze) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(snapshots) == 4
    assert len({(snapshot.snapshot_id, snapshot.version) for snapshot in snapshots}) == 1
    assert all(sorted(call_ids(snapshot)) == sorted(recorded) for snapshot in snapshots)


async def test_a_closed_store_may_be_used_again(store: TokenStore) -> None:
    async with store:
        await store.put(call())
    await store.close()
    await store.put(call())
    assert len(lines(store)) == 1


# ------------------------------------------------------------------------------------------------------- by reference


def test_a_prompt_by_reference_is_whole_in_the_snapshot(store: TokenStore) -> None:
    first = call("a", (4, 5))
    second = entry("r", "b", [1, 2, 3, 4, 5, 6], [7])
    store.put_now(referring(second, first))
    store.put_now(first)
    store.put_now(second)
    store.put_now(referring(second, first))
    snapshot = store.freeze_now("r")
    assert not snapshot.incomplete
    assert snapshot.version == 3
    assert {item.model_call_id: item.prompt_token_ids for item in snapshot.entries} == {
        "a": [1, 2, 3],
        "b": [1, 2, 3, 4, 5, 6],
    }
    assert all(item.prompt_prefix is None for item in snapshot.entries)


def test_a_reference_that_leads_nowhere_masks(store: TokenStore) -> None:
    first, second = call("a"), entry("r", "b", [1, 2, 3, 4, 5, 6], [7])
    store.put_now(referring(second, first))
    snapshot = store.freeze_now("r")
    assert snapshot.incomplete
    assert snapshot.entries[0].prompt_prefix is not None


def test_a_reference_to_other_tokens_than_the_whole_prompt_masks(store: TokenStore) -> None:
    first, second = call("a"), entry("r", "b", [1, 2, 3, 4, 5, 6], [7])
    store.put_now(first)
    store.put_now(second)
    store.put_now(referring(entry("r", "b", [1, 2, 3, 4, 5, 9], [7]), first))
    snapshot = store.freeze_now("r")
    assert snapshot.incomplete
    assert snapshot.entries[1].prompt_token_ids == [1, 2, 3, 4, 5, 6]
