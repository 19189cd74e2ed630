"""Building from files: the worker's rules without a worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from freezepoint.captures import captured_rollout
from freezepoint.errors import InputError
from freezepoint.lines import sources
from freezepoint.offline import OfflineBuilder, expanded
from freezepoint.settings import WorkerSettings
from freezepoint.simulate import Profile, differences, simulate
from freezepoint.store import TokenStore
from freezepoint_schemas import codec
from freezepoint_schemas.events import InputEvent
from freezepoint_schemas.reasons import Reason
from freezepoint_schemas.results import Result
from tests.events import cancelled, clear, complete, entry, incomplete, intent


class Built:
    """What came of building some files."""

    def __init__(self, names: Sequence[str], *, model: str | None = None, **settings: Any) -> None:
        self.lost: list[str] = []
        self.bad: list[str] = []
        builder = OfflineBuilder(WorkerSettings(**settings), model, self.lost.append)
        with sources(names) as files:
            self.results: list[Result] = list(
                builder.results(files, lambda error: self.bad.append(str(error)))
            )
        assert builder.unusable == len(self.bad)

    @property
    def ids(self) -> list[str]:
        return [result.rollout_id for result in self.results]

    def reasons(self, rollout_id: str) -> list[Reason]:
        [result] = [result for result in self.results if result.rollout_id == rollout_id]
        return result.reasons


def write(path: Path, *lines: InputEvent | bytes) -> str:
    raw = [line if isinstance(line, bytes) else codec.encode_event(line) for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return str(path)


def call(rollout_id: str, number: int = 1) -> InputEvent:
    """The n-th call of a chain."""
    prompt = list(range(1, 2 * number))
    return entry(rollout_id, f"c{number}", prompt, [2 * number])


def test_what_has_no_end_freezes_at_the_end_of_input_in_order_of_appearance(tmp_path: Path) -> None:
    name = write(tmp_path / "x", call("b"), call("a"), call("c"), complete("c"), call("b", 2))
    built = Built([name])
    assert built.ids == ["c", "b", "a"]
    assert all(not result.mask_sample for result in built.results)
    assert built.results[1].metrics["n_calls"] == 2


def test_rollouts_may_be_spread_over_files(tmp_path: Path) -> None:
    built = Built([write(tmp_path / "2", call("a", 2)), write(tmp_path / "1", call("a", 1))])
    assert built.ids == ["a"]
    assert built.results[0].metrics["generated_tokens_delivered"] == 2


def test_a_damaged_line_masks_the_rollout_it_names_and_else_all_that_nobody_completed(tmp_path: Path) -> None:
    torn = codec.encode_event(call("b", 2))[:60]
    built = Built([write(tmp_path / "x", call("a"), call("b"), torn, call("c"))])
    assert {name: built.reasons(name) for name in built.ids} == {
        "a": [],
        "b": [Reason.UNDECODABLE_RECORD],
        "c": [],
    }
    built = Built([write(tmp_path / "y", call("a"), complete("a"), b'{"rollout_', call("b"))])
    assert {name: built.reasons(name) for name in built.ids} == {"a": [], "b": [Reason.CAPTURE_INCOMPLETE]}


def test_a_line_in_a_rollouts_file_belongs_to_it_whatever_it_says(tmp_path: Path) -> None:
    """Another rollout's entry in it is a sign that something went wrong, and never one of that rollout's calls."""
    write(tmp_path / "a.tokens.jsonl", call("a"), entry("b", "c1", [1], [2]))
    write(tmp_path / "b.tokens.jsonl", entry("b", "c9", [1, 2, 5], [6]))
    built = Built([str(tmp_path / name) for name in ("a.tokens.jsonl", "b.tokens.jsonl")])
    assert {name: built.reasons(name) for name in built.ids} == {"a": [Reason.FOREIGN_RECORD], "b": []}
    (result,) = [result for result in built.results if result.rollout_id == "b"]
    assert [span.call_id for trace in result.traces for span in trace.spans] == ["c9"]


def test_the_workers_rules_hold(tmp_path: Path) -> None:
    name = write(
        tmp_path / "x",
        call("dup"),
        call("dup"),
        call("conflict"),
        entry("conflict", "c1", [1], [9]),
        call("intent"),
        intent("intent", "c9"),
        call("mark"),
        incomplete("mark"),
        call("cancelled"),
        cancelled("cancelled"),
        complete("nothing"),
        call("bad"),
        b'{"rollout_id":"bad","event":"token_entry","model_call_id":"c2"}',
        b'{"rollout_id":"unknown","event":"nonsense"}',
    )
    built = Built([name])
    assert built.reasons("dup") == []
    assert built.reasons("conflict") == [Reason.CONFLICTING_ENTRY]
    assert built.reasons("intent") == [Reason.DANGLING_INTENT]
    assert built.reasons("mark") == [Reason.CAPTURE_INCOMPLETE]
    assert built.reasons("cancelled") == [Reason.ROLLOUT_CANCELLED]
    assert built.reasons("nothing") == [Reason.NO_RECORDS]
    assert built.reasons("bad") == [Reason.INVALID_ENTRY]
    assert built.reasons("unknown") == [Reason.UNDECODABLE_RECORD]
    assert not built.bad
    assert [text.split(": ")[:3] for text in built.lost] == [
        [f"{name}:13", "rollout bad", "invalid_entry"],
        [f"{name}:14", "rollout unknown", "undecodable_record"],
    ]


def test_what_comes_after_the_end_is_late_and_a_clear_begins_anew(tmp_path: Path) -> None:
    name = write(
        tmp_path / "x",
        call("a"),
        complete("a"),
        call("a", 2),
        clear("a"),
        call("a"),
        call("a", 2),
        complete("a"),
    )
    built = Built([name])
    assert [(result.rollout_id, result.metrics["n_calls"]) for result in built.results] == [
        ("a", 1),
        ("a", 2),
    ]
    [late] = built.lost
    assert late.startswith(f"{name}:3: rollout a: late_after_freeze: ")


def test_lines_that_name_no_rollout_are_reported_and_harm_none_that_was_completed(tmp_path: Path) -> None:
    name = write(
        tmp_path / "x", call("a"), b"{", b"[]", b'{"prompt_token_ids":[1]}', call("a", 2), complete("a")
    )
    built = Built([name])
    assert built.ids == ["a"]
    assert built.reasons("a") == []
    assert [text.split(": ")[0] for text in built.bad] == [f"{name}:{number}" for number in (2, 3, 4)]


def test_a_capture_files_name_names_the_rollout(tmp_path: Path) -> None:
    bare = codec.encode_event(call("x")).replace(b'"rollout_id":"x",', b"")
    write(tmp_path / "run1.0-0.tokens.jsonl", bare)
    write(tmp_path / "run1.0-1.tokens.jsonl", b"{damaged", call("run1.0-1"))
    write(tmp_path / "notes.txt", b"not looked at")
    built = Built(expanded([str(tmp_path)]))
    assert built.ids == ["run1.0-0", "run1.0-1"]
    assert built.reasons("run1.0-0") == []
    assert built.reasons("run1.0-1") == [Reason.UNDECODABLE_RECORD]
    assert not built.bad


def test_an_empty_directory_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no \*\.tokens\.jsonl"):
        expanded([str(tmp_path)])


@pytest.mark.parametrize(
    ("name", "rollout_id"),
    [
        ("a/b/0-0.tokens.jsonl", "0-0"),
        ("0-0-a1.tokens.jsonl.gz", "0-0-a1"),
        ("0-0.jsonl", None),
        (" .tokens.jsonl", None),
        ("<stdin>", None),
    ],
)
def test_ids_in_file_names(name: str, rollout_id: str | None) -> None:
    assert captured_rollout(name) == rollout_id


def test_the_model_is_for_those_that_name_none(tmp_path: Path) -> None:
    name = write(
        tmp_path / "x",
        call("a"),
        complete("a", model="own"),
        call("b"),
        complete("b"),
        call("c"),
        cancelled("c"),
    )
    built = Built([name], model="given")
    assert [result.model for result in built.results] == ["own", "given", ""]


def test_builder_and_delivery(tmp_path: Path) -> None:
    name = write(tmp_path / "x", call("a"), entry("a", "other", [90], [91]))
    assert Built([name]).reasons("a") == [Reason.MULTIPLE_ROOTS, Reason.MULTIPLE_CHAINS]
    assert Built([name], delivery="all_traces").reasons("a") == []
    assert Built([name], builder="per_request").reasons("a") == [Reason.BUILDER_NOT_DELIVERABLE]
    built = Built([name], builder="per_request", delivery="all_traces")
    assert [trace.role for trace in built.results[0].traces] == ["req-0", "req-1"]


def test_limits_hold(tmp_path: Path) -> None:
    name = write(tmp_path / "x", call("a"), call("a", 2), call("b"))
    built = Built([name], rollout_entries_max=1)
    assert built.reasons("a") == [Reason.ROLLOUT_TOO_LARGE]
    assert built.reasons("b") == []


def test_simulated_rollouts_are_built_as_their_truth_says(tmp_path: Path) -> None:
    simulated = list(simulate(Profile(rollouts=100, seed=4)))
    built = Built([write(tmp_path / "x", *(item.event for item in simulated))])
    truths = {item.truth.rollout_id: item.truth for item in simulated if item.truth is not None}
    assert built.ids == list(truths)
    assert [differences(truths[result.rollout_id], result) for result in built.results] == [[]] * 100


def test_a_stores_directory_is_read_with_all_it_knows(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    for name in ("fine", "marked", "lost", "cancelled", "frozen", "dropped", "torn", "shorter", "damaged"):
        store.put_now(call(name))
        store.put_now(call(name, 2))
    store.mark_incomplete_now("marked", "c3")
    store.mark_incomplete_now("only-marked")
    store.begin_call_now("lost", "c3")
    store.begin_call_now("only-announced", "c1")
    store.begin_call_now("cancelled", "c3")
    store.cancel_call_now("cancelled", "c3")
    store.freeze_now("frozen")
    store.freeze_now("empty")
    snapshot = store.freeze_now("dropped")
    assert store.drop_now("dropped", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    torn = tmp_path / "torn.tokens.jsonl"
    torn.write_bytes(torn.read_bytes() + b'{"model_call_id": "c3", "prompt')
    store.freeze_now("shorter")
    shorter = tmp_path / "shorter.tokens.jsonl"
    shorter.write_bytes(shorter.read_bytes().splitlines(keepends=True)[0])
    (tmp_path / "damaged.tokens.state.json").write_bytes(b"[1]")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    built = Built(expanded([str(tmp_path)]))
    assert {result.rollout_id: result.reasons for result in built.results} == {
        "cancelled": [],
        "damaged": [Reason.CAPTURE_INCOMPLETE],
        "empty": [Reason.NO_RECORDS],
        "fine": [],
        "frozen": [],
        "lost": [Reason.DANGLING_INTENT],
        "marked": [Reason.CAPTURE_INCOMPLETE],
        "only-announced": [Reason.DANGLING_INTENT],
        "only-marked": [Reason.CAPTURE_INCOMPLETE],
        "shorter": [Reason.CAPTURE_INCOMPLETE],
        "torn": [],
    }
    assert [result.metrics["n_calls"] for result in built.results if result.rollout_id == "torn"] == [2]
    assert built.lost == [f"{torn}:3: a torn line, never acknowledged, is left out"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
