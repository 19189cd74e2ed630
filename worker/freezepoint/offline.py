"""Builds results from files, without any transport, by the rules the worker has.

Every line goes through the same fold as a record of one partition, so that duplicates, conflicts and bad lines get
here what they get there. Memory holds the rollouts that are open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from freezepoint.building import result_of
from freezepoint.captures import capture_files, captured_rollout, holds_entries, known_beside, untorn
from freezepoint.core.effects import DeadLetter, Freeze
from freezepoint.core.frozen import FrozenLog
from freezepoint.core.ledger import Verdict
from freezepoint.core.partition import PartitionConfig, PartitionCore
from freezepoint.core.records import InputRecord
from freezepoint.core.rollout import LogLimits
from freezepoint.lines import Line, LineError, Source
from freezepoint.settings import WorkerSettings
from freezepoint_schemas import codec
from freezepoint_schemas.events import CaptureIncomplete, RolloutComplete
from freezepoint_schemas.headers import ERROR_MESSAGE, header
from freezepoint_schemas.results import Result


def expanded(paths: Sequence[str]) -> list[str]:
    """The paths, each directory replaced by the files of the rollouts that a token store keeps in it.

    :raises InputError: a directory without any.
    """
    files: list[str] = []
    for name in paths:
        files += capture_files(Path(name)) if Path(name).is_dir() else [name]
    return files


@dataclass(slots=True)
class OfflineBuilder:
    """A worker's fold and build over lines of files.

    ``model``: for rollouts whose complete event names none. ``on_lost`` hears of lines that mask their rollout or
    came after its end, ``on_built`` of every log with its result.
    """

    settings: WorkerSettings
    model: str | None = None
    on_lost: Callable[[str], None] | None = None
    on_built: Callable[[FrozenLog, Result], None] | None = None
    unusable: int = 0
    """Lines that name no rollout. Whose they were nobody knows, so what no event has completed is not taken for whole."""
    _core: PartitionCore = field(init=False)

    def __post_init__(self) -> None:
        limits = LogLimits(self.settings.rollout_bytes_max, self.settings.rollout_entries_max)
        config = PartitionConfig(
            topic_name="files",
            partition=0,
            partition_count=1,
            group=self.settings.group,
            record_bytes_max=self.settings.record_bytes_max,
            limits=limits,
            rollout_timeout_s=self.settings.rollout_timeout_s,
        )
        self._core = PartitionCore(config)

    def results(
        self,
        files: Iterable[Source],
        on_bad: Callable[[LineError], None],
        on_position: Callable[[int, int], None] | None = None,
    ) -> Iterator[Result]:
        """The results of all files: at each complete event, then of what is open in order of first appearance, then of
        a store's rollouts of which nothing was recorded.

        :param on_bad: hears of lines that name no rollout; they are skipped and counted.
        :param on_position: hears the number of the file and how many of its bytes have been read.
        """
        named: list[str] = []
        for number, file in enumerate(files):
            rollout_id = captured_rollout(file.name)
            lines = file.lines(None if on_position is None else _of_file(number, on_position))
            if rollout_id is not None:
                named.append(rollout_id)
                for event in known_beside(file.name, rollout_id):
                    yield from self._feed(rollout_id, codec.encode_event(event), file.name)
                lines = self._untorn(lines) if holds_entries(file.name) else iter(())
            yield from self._lines(lines, rollout_id, on_bad)
        appeared = sorted(self._core.open.values(), key=lambda life: life.first_offset)
        for rollout_id in dict.fromkeys([*(life.rollout_id for life in appeared), *named]):
            if self.unusable:
                mark = CaptureIncomplete(rollout_id=rollout_id, reason="a line of the input is lost")
                yield from self._feed(rollout_id, codec.encode_event(mark), "end of input")
            end = codec.encode_event(RolloutComplete(rollout_id=rollout_id))
            yield from self._feed(rollout_id, end, "end of input")

    def _lines(
        self, lines: Iterable[Line], default: str | None, on_bad: Callable[[LineError], None]
    ) -> Iterator[Result]:
        for line in lines:
            try:
                rollout_id = _rollout_of(line, default)
            except LineError as error:
                self.unusable += 1
                on_bad(error)
            else:
                yield from self._feed(rollout_id, line.raw, line.where)

    def _untorn(self, lines: Iterator[Line]) -> Iterator[Line]:
        torn: list[Line] = []
        yield from untorn(lines, torn)
        for line in torn:
            if self.on_lost is not None:
                self.on_lost(f"{line.where}: a torn line, never acknowledged, is left out")

    def _feed(self, rollout_id: str, value: bytes, where: str) -> Iterator[Result]:
        record = InputRecord(0, self._core.next_offset, 0, rollout_id.encode("ascii"), value)
        for effect in self._core.feed(record):
            if isinstance(effect, Freeze):
                result = self._build(effect.log)
                if self.on_built is not None:
                    self.on_built(effect.log, result)
                self._core.take([(effect, Verdict.of(result))])
                yield result
            else:
                self._core.take([effect])
                self._lost(effect, rollout_id, where)

    def _build(self, log: FrozenLog) -> Result:
        closing = log.closing
        if self.model is not None and isinstance(closing, RolloutComplete) and closing.model is None:
            log = replace(log, closing=closing.model_copy(update={"model": self.model}))
        return result_of(log, self.settings)

    def _lost(self, letter: DeadLetter, rollout_id: str, where: str) -> None:
        if self.on_lost is not None:
            message = (header(letter.record.headers, ERROR_MESSAGE) or b"").decode()
            self.on_lost(f"{where}: rollout {rollout_id}: {letter.reason}: {message}")


def _of_file(number: int, on_position: Callable[[int, int], None]) -> Callable[[int], None]:
    return lambda position: on_position(number, position)


def _rollout_of(line: Line, default: str | None) -> str:
    """The rollout a line belongs to. Where the file's name says it, that counts, whatever the line is or says; a damaged
    line belongs to the rollout that can still be read in it.

    :raises LineError: it names none.
    """
    if default is not None:
        return default
    try:
        body = line.body()
    except LineError:
        found = line.damaged_rollout()
        if found is None:
            raise
        return found
    return line.rollout_id(body)
