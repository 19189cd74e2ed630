"""The local store's files: torn and damaged lines, crashes between two steps, directories that NeMo Gym wrote."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from freezepoint.errors import DamagedCaptureError, FrozenRolloutError
from freezepoint.store import TokenStore
from freezepoint.store.files import write_durably
from freezepoint.store.log import line_of
from freezepoint_schemas.events import TokenEntry
from tests.events import entry

FIRST, SECOND = entry("r", "a", [1], [2, 3]), entry("r", "b", [1, 2, 3, 4], [5])


def line(call: TokenEntry) -> bytes:
    return b"".join(line_of(call, {}))


LINE = line(SECOND)


def path(directory: Path, suffix: str = ".tokens.jsonl") -> Path:
    return directory / f"r{suffix}"


def with_content(directory: Path, content: bytes) -> TokenStore:
    path(directory).write_bytes(content)
    return TokenStore(directory)


def call_ids(store: TokenStore) -> list[str]:
    return [item.model_call_id for item in store.freeze_now("r").entries]


# --------------------------------------------------------------------------------------------------- torn and damaged


@pytest.mark.parametrize("length", range(len(LINE) + 1))
def test_a_line_torn_at_any_byte_is_dropped_or_whole(tmp_path: Path, length: int) -> None:
    whole = length >= len(LINE) - 1
    store = with_content(tmp_path, line(FIRST) + LINE[:length])
    reader = TokenStore(tmp_path)
    store.put_now(SECOND)
    store.put_now(FIRST)
    reader.put_now(entry("r", "c", [9], [9]))
    assert [orjson.loads(line)["model_call_id"] for line in path(tmp_path).read_bytes().splitlines()] == [
        "a",
        "b",
        "c",
    ]
    snapshot = store.freeze_now("r")
    assert [item.model_call_id for item in snapshot.entries] == ["a", "b", "c"]
    assert snapshot.version == 4
    assert not snapshot.incomplete
    store.delete("r")
    assert call_ids(with_content(tmp_path, line(FIRST) + LINE[:length])) == (["a", "b"] if whole else ["a"])


@pytest.mark.parametrize("torn", [b"{", b"\0" * 100, b"{\n", b'{"a": 1\n\n', b"\xff\xfe", b"  \n  {"])
def test_what_a_crash_leaves_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    store = with_content(tmp_path, line(FIRST) + torn)
    store.put_now(SECOND)
    assert len([line for line in path(tmp_path).read_bytes().split(b"\n") if line.strip()]) == 2
    assert call_ids(store) == ["a", "b"]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"{", b" "])
def test_a_file_without_a_whole_line_is_empty(tmp_path: Path, content: bytes) -> None:
    snapshot = with_content(tmp_path, content).freeze_now("r")
    assert (snapshot.entries, snapshot.version, snapshot.incomplete) == ((), 1, False)


@pytest.mark.parametrize(
    "damaged",
    [
        b"{\n",
        b"[1]\n",
        b"{}\n",
        b"null\n",
        LINE[:40] + b"\n",
        line(entry("other", "b", [1], [2])),
        b'{"event": "call_intent", "model_call_id": "x"}\n',
        LINE.replace(b'"generation_token_ids":[5]', b'"generation_token_ids":[5,6]'),
        LINE.replace(b'"schema_version":1', b'"schema_version":9'),
    ],
)
def test_a_malformed_line_but_the_last_fails_the_freeze_and_leaves_it_open(
    tmp_path: Path, damaged: bytes
) -> None:
    store = with_content(tmp_path, line(FIRST) + damaged + LINE)
    for act in (lambda: store.freeze_now("r"), lambda: store.put_now(entry("r", "c", [9], [9]))):
        with pytest.raises(DamagedCaptureError, match=f"byte {len(line(FIRST))}"):
            act()
    store.mark_incomplete_now("r", "c")
    assert path(tmp_path).read_bytes() == line(FIRST) + damaged + LINE
    path(tmp_path).write_bytes(line(FIRST) + LINE)
    assert call_ids(store) == ["a", "b"]


def test_the_last_line_is_damaged_where_it_is_whole_and_no_entry(tmp_path: Path) -> None:
    with pytest.raises(DamagedCaptureError):
        with_content(tmp_path, line(FIRST) + b"{}\n").freeze_now("r")


def test_lines_that_are_gone_fail_the_freeze(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    store.put_now(FIRST)
    store.put_now(SECOND)
    store.freeze_now("r")
    path(tmp_path).write_bytes(line(FIRST))
    with pytest.raises(DamagedCaptureError, match="were recorded"):
        store.freeze_now("r")
    path(tmp_path).unlink()
    with pytest.raises(DamagedCaptureError, match="0 bytes"):
        store.freeze_now("r")


def test_a_log_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    """NeMo Gym's delete does not touch the id of a life, and its next life may be the longer one."""
    store = TokenStore(tmp_path)
    store.put_now(FIRST)
    (tmp_path / "new").write_bytes(line(SECOND) + line(entry("r", "c", range(50), [1])))
    (tmp_path / "new").replace(path(tmp_path))
    store.put_now(FIRST)
    assert call_ids(store) == ["b", "c", "a"]


def test_a_log_cut_by_hand_is_read_anew(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    store.put_now(FIRST)
    store.put_now(SECOND)
    path(tmp_path).write_bytes(line(FIRST))
    store.put_now(SECOND)
    assert call_ids(store) == ["a", "b"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version": "1"}', b'{"version": -1}', b'{"frozen": 1}']
)
def test_a_damaged_state_file_stops_everything_but_a_delete(tmp_path: Path, content: bytes) -> None:
    store = TokenStore(tmp_path)
    store.put_now(FIRST)
    path(tmp_path, ".tokens.state.json").write_bytes(content)
    for act in (
        lambda: store.put_now(SECOND),
        lambda: store.freeze_now("r"),
        lambda: store.mark_incomplete_now("r"),
        lambda: store.begin_call_now("r", "c"),
        lambda: store.drop_now("r", snapshot_id="", version=0),
    ):
        with pytest.raises(DamagedCaptureError, match="state"):
            act()
    store.delete("r")
    store.put_now(SECOND)
    assert call_ids(store) == ["b"]


# ------------------------------------------------------------------------------------------------------------- crashes


def test_a_drop_that_broke_off_is_finished_by_the_next_one(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    store.put_now(FIRST)
    snapshot = store.freeze_now("r")
    content = path(tmp_path).read_bytes()
    assert store.drop_now("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    path(tmp_path).write_bytes(content)  # as if it had stopped before the payload was removed
    with pytest.raises(FrozenRolloutError):
        store.freeze_now("r")
    assert store.drop_now("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    assert not path(tmp_path).exists()
    path(tmp_path).write_bytes(content)
    assert store.sweep_retired(0) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_was_not_put_in_place_does_not_count(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    store.put_now(FIRST)
    path(tmp_path, ".tokens.state.new").write_bytes(b'{"frozen": true, "ret')
    store.put_now(SECOND)
    assert call_ids(store) == ["a", "b"]
    assert not path(tmp_path, ".tokens.state.new").exists()


@pytest.mark.parametrize("torn", [b"lost", b"first\nlost", b"first\n-oth"])
def test_a_torn_announcement_is_ended_before_the_next_one(tmp_path: Path, torn: bytes) -> None:
    store = with_content(tmp_path, line(FIRST))
    path(tmp_path, ".tokens.intents").write_bytes(torn)
    store.begin_call_now("r", "next")
    assert path(tmp_path, ".tokens.intents").read_bytes() == torn + b"\nnext\n"
    assert store.freeze_now("r").incomplete


def test_a_write_that_fails_leaves_the_file_as_long_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"before")
    descriptor = os.open(file, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="descriptor") as raised:
            write_durably(descriptor, [b"aft", b"er"])
    finally:
        os.close(descriptor)
    assert raised.value.errno == errno.EBADF
    assert file.read_bytes() == b"before"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_and_the_call_may_be_put_again(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    path(tmp_path).symlink_to("/dev/full")
    with pytest.raises(OSError, match="space") as raised:
        store.put_now(FIRST)
    assert raised.value.errno == errno.ENOSPC
    path(tmp_path).unlink()
    store.put_now(FIRST)
    assert call_ids(store) == ["a"]


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        TokenStore(tmp_path / "file" / "captures")


# ------------------------------------------------------------------------------------------------------------ NeMo Gym


def gym_line(item: TokenEntry, **more: Any) -> bytes:
    """A line as the reference writes it: sorted keys, nulls, its own fields."""
    fields = {**item.model_dump(exclude={"event"}), "cum_len": None, "digest": "d" * 64, **more}
    fields.pop("prompt_prefix")
    return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)


def gym_state(*lines: bytes, **more: Any) -> bytes:
    digests = {orjson.loads(line)["model_call_id"]: hashlib.sha256(line).hexdigest() for line in lines}
    state = {
        "frozen": False,
        "retired": False,
        "incomplete": False,
        "snapshot_id": "",
        "version": len(lines),
        "entry_digests": digests,
        "indexed_size": sum(len(line) + 1 for line in lines),
    }
    return orjson.dumps(state | more, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


@pytest.mark.parametrize("indexed", [None, 0, 1, 2])
def test_a_directory_of_the_reference_is_read_and_gone_on_with(tmp_path: Path, indexed: int | None) -> None:
    written = [gym_line(FIRST), gym_line(SECOND)]
    store = with_content(tmp_path, b"".join(line + b"\n" for line in written))
    if indexed is not None:  # its state may lag behind its log
        path(tmp_path, ".tokens.state.json").write_bytes(gym_state(*written[:indexed]))
    store.put_now(orjson.loads(written[0]))
    store.put_now(entry("r", "c", [9], [9]))
    snapshot = store.freeze_now("r")
    assert [item.model_call_id for item in snapshot.entries] == ["a", "b", "c"]
    assert snapshot.version == 4
    assert not snapshot.incomplete
    assert TokenStore(tmp_path).freeze_now("r").version == 4


def test_a_snapshot_of_the_reference_keeps_its_id_and_version(tmp_path: Path) -> None:
    written = [gym_line(FIRST)]
    store = with_content(tmp_path, written[0] + b"\n")
    frozen = {"frozen": True, "snapshot_id": "f" * 32, "version": 7, "incomplete": True}
    path(tmp_path, ".tokens.state.json").write_bytes(gym_state(*written, **frozen))
    snapshot = store.freeze_now("r")
    assert (snapshot.snapshot_id, snapshot.version, snapshot.incomplete) == ("f" * 32, 7, True)
    store.mark_incomplete_now("r")
    state = orjson.loads(path(tmp_path, ".tokens.state.json").read_bytes())
    assert state == {**orjson.loads(gym_state(*written, **frozen)), "version": 8}


def test_what_came_behind_the_freeze_of_the_reference_raises_the_version(tmp_path: Path) -> None:
    """Its fence is no lock across hosts: a write that raced the freeze stays, and a drop of the snapshot fails."""
    store = with_content(tmp_path, gym_line(FIRST) + b"\n" + gym_line(SECOND) + b"\n")
    frozen = {"frozen": True, "snapshot_id": "f" * 32, "version": 2}
    path(tmp_path, ".tokens.state.json").write_bytes(gym_state(gym_line(FIRST), **frozen))
    snapshot = store.freeze_now("r")
    assert (snapshot.snapshot_id, snapshot.version) == ("f" * 32, 3)
    assert not store.drop_now("r", snapshot_id="f" * 32, version=2)
    assert store.drop_now("r", snapshot_id="f" * 32, version=3)


@pytest.mark.parametrize(
    ("suffix", "content", "incomplete"),
    [
        (".tokens.incomplete", b"", True),
        (".tokens.incomplete", b"c9\n", True),
        (".tokens.incomplete", b"\n", True),
        (".tokens.intents", b"c9\n", True),
        (".tokens.intents", b"c9", True),
        (".tokens.intents", b"a\nc9\n-c9\n", False),
        (".tokens.intents", b"\n", False),
        (".capture.jsonl", b"{", False),
    ],
)
def test_files_beside_the_entries(tmp_path: Path, suffix: str, content: bytes, incomplete: bool) -> None:
    store = with_content(tmp_path, gym_line(FIRST) + b"\n")
    path(tmp_path, suffix).write_bytes(content)
    assert store.freeze_now("r").incomplete is incomplete


def test_old_lines_with_their_arrays_on_an_item_are_read(tmp_path: Path) -> None:
    line = orjson.loads(gym_line(FIRST))
    arrays = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    line["output_items"] = [
        {"type": "reasoning"},
        {"type": "message", **{name: line[name] for name in arrays}},
    ]
    line["token_item_index"] = None
    [found] = with_content(tmp_path, orjson.dumps(line)).freeze_now("r").entries
    assert found.token_item_index == 1
    assert found.output_items == [{"type": "reasoning"}, {"type": "message"}]


def test_contradictory_lines_keep_the_first_and_mask(tmp_path: Path) -> None:
    """No store writes such; two that share no lock may."""
    other = entry("r", "a", [1], [9])
    store = with_content(tmp_path, gym_line(FIRST) + b"\n" + gym_line(other) + b"\n")
    snapshot = store.freeze_now("r")
    assert snapshot.incomplete
    assert [item.generation_token_ids for item in snapshot.entries] == [[2, 3]]
    assert snapshot.version == 3
    assert store.freeze_now("r").version == 3


def test_a_packed_line_is_read(tmp_path: Path) -> None:
    from freezepoint_schemas import codec

    [found] = with_content(tmp_path, codec.encode_event(FIRST, packed=True)).freeze_now("r").entries
    assert found.prompt_token_ids == [1]
