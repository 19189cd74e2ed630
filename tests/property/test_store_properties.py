"""The local store equals a naive model of it, whatever is done to a rollout by whom and whatever a crash leaves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from freezepoint.captured import CaptureSnapshot
from freezepoint.consumer import trajectories_for_rollout
from freezepoint.core.projection import response_form
from freezepoint.errors import ConflictingEntryError, FrozenRolloutError
from freezepoint.lines import sources
from freezepoint.offline import OfflineBuilder, expanded
from freezepoint.settings import WorkerSettings
from freezepoint.store import TokenStore
from freezepoint.store.log import line_of
from freezepoint_schemas.events import TokenEntry
from tests.events import entry

CALLS = ("a", "b", "c")


def call(call_id: str, variant: int) -> TokenEntry:
    number = CALLS.index(call_id)
    return entry("r", call_id, [1, 2, 3, 4][: 2 * number + 1], [2 * number + 2], created_at=float(variant))


@dataclass
class Model:
    """One rollout, as simply as it can be said."""

    entries: dict[str, int] = field(default_factory=dict)
    intents: set[str] = field(default_factory=set)
    incomplete: bool = False
    changes: int = 0
    life: int = 0
    frozen: bool = False
    retired: bool = False

    def require(self, *, unfrozen: bool) -> None:
        if self.retired or (unfrozen and self.frozen):
            raise FrozenRolloutError

    def put(self, call_id: str, variant: int) -> None:
        self.require(unfrozen=True)
        if self.entries.setdefault(call_id, variant) != variant:
            self.incomplete = True
            self.changes += 1
            raise ConflictingEntryError

    def announce(self, call_id: str, *, withdrawn: bool) -> None:
        self.require(unfrozen=True)
        (self.intents.discard if withdrawn else self.intents.add)(call_id)

    def mark(self) -> None:
        self.require(unfrozen=False)
        self.incomplete = True
        self.changes += 1

    def freeze(self) -> tuple[dict[str, int], bool, int]:
        self.require(unfrozen=False)
        self.frozen = True
        return dict(self.entries), self.lost, self.version

    @property
    def lost(self) -> bool:
        return self.incomplete or bool(self.intents - self.entries.keys())

    @property
    def version(self) -> int:
        return len(self.entries) + self.changes + self.frozen

    def drop(self, life: int, version: int) -> bool:
        if not self.frozen or (life, version) != (self.life, self.version):
            return False
        self.retired = True
        return True

    def delete(self) -> None:
        self.__init__(life=self.life + 1)  # type: ignore[misc]


OPERATIONS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(CALLS), st.sampled_from([0, 0, 0, 1])),
    st.tuples(st.just("announce"), st.sampled_from(CALLS), st.booleans()),
    st.sampled_from(
        [("mark",), ("freeze",), ("freeze",), ("drop", 0), ("drop", 0), ("drop", 1), ("delete",), ("sweep",)]
    ),
    st.tuples(st.just("torn"), st.integers(1, 30)),
    st.sampled_from([("restart",), ("other",)]),
)


class Bench:
    """Two processes' stores on one directory, the model, and the snapshots that were taken, newest first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stores = [TokenStore(directory), TokenStore(directory)]
        self.model = Model()
        self.snapshots: list[tuple[CaptureSnapshot, int]] = []
        self.ids: dict[int, str] = {}

    @property
    def store(self) -> TokenStore:
        return self.stores[0]

    def do(self, name: str, *arguments: Any) -> None:
        getattr(self, f"do_{name}")(*arguments)

    def both(self, real: Callable[[], object], naive: Callable[[], object]) -> object:
        outcomes = [outcome(real), outcome(naive)]
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    def do_put(self, call_id: str, variant: int) -> None:
        self.both(
            lambda: self.store.put_now(call(call_id, variant)), lambda: self.model.put(call_id, variant)
        )

    def do_announce(self, call_id: str, withdrawn: bool) -> None:
        real = self.store.cancel_call_now if withdrawn else self.store.begin_call_now
        self.both(lambda: real("r", call_id), lambda: self.model.announce(call_id, withdrawn=withdrawn))

    def do_mark(self) -> None:
        self.both(lambda: self.store.mark_incomplete_now("r"), self.model.mark)

    def do_freeze(self) -> None:
        def real() -> tuple[dict[str, int], bool, int]:
            snapshot = self.store.freeze_now("r")
            self.snapshots.insert(0, (snapshot, self.model.life))
            assert self.ids.setdefault(self.model.life, snapshot.snapshot_id) == snapshot.snapshot_id
            entries = {item.model_call_id: int(item.created_at) for item in snapshot.entries}
            assert len(entries) == len(snapshot.entries)
            return entries, snapshot.incomplete, snapshot.version

        self.both(real, self.model.freeze)

    def do_drop(self, age: int) -> None:
        if len(self.snapshots) > age:
            snapshot, life = self.snapshots[age]
            self.both(
                lambda: self.store.drop_now("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version),
                lambda: self.model.drop(life, snapshot.version),
            )

    def do_delete(self) -> None:
        self.store.delete("r")
        self.model.delete()

    def do_sweep(self) -> None:
        assert self.store.sweep_retired(-1) == self.model.retired
        if self.model.retired:
            self.model.delete()

    def do_torn(self, length: int) -> None:
        """A process dies in the middle of an append, which only an open rollout sees."""
        log = self.directory / "r.tokens.jsonl"
        if log.exists() and not self.model.frozen:
            with log.open("ab") as file:
                file.write(b"".join(line_of(call("a", 9), {}))[:length])

    def do_restart(self) -> None:
        self.stores[0] = TokenStore(self.directory)

    def do_other(self) -> None:
        self.stores.reverse()


def outcome(act: Callable[[], object]) -> object:
    try:
        return act()
    except (ConflictingEntryError, FrozenRolloutError) as error:
        return type(error)


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATIONS, max_size=25))
def test_the_store_equals_the_model(operations: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        assert len(set(bench.ids.values())) == len(bench.ids)
        for operation in operations:
            bench.do(*operation)
        bench.do_freeze()
        assert len(set(bench.ids.values())) == len(bench.ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(OPERATIONS, max_size=15))
def test_a_build_of_the_directory_says_what_the_consumer_says(operations: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        for operation in operations:
            bench.do(*operation)
        if bench.model.retired:
            return
        bench.do_freeze()
        with sources(expanded([directory])) as files:
            [result] = OfflineBuilder(WorkerSettings(), model="m").results(files, lambda error: None)
        consumed = trajectories_for_rollout("r", [directory], model="m")
        assert consumed is not None
        del consumed["_capture_snapshot"]
        assert consumed == response_form(result)
