"""Builds results from files, without any transport, by the rules the worker has.

Every line goes through the same fold as a record of one partition, so that duplicates, conflicts and bad lines get
here what they get there. Memory holds the rollouts that are open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from freezepoint.core.build import build_result
from freezepoint.core.effects import DeadLetter, Freeze
from freezepoint.core.frozen import FrozenLog
from freezepoint.core.ledger import Verdict
from freezepoint.core.partition import PartitionConfig, PartitionCore
from freezepoint.core.records import InputRecord
from freezepoint.core.rollout import LogLimits
from freezepoint.errors import InputError
from freezepoint.lines import Line, LineError, Source
from freezepoint.settings import WorkerSettings
from freezepoint_schemas import codec
from freezepoint_schemas.events import RolloutComplete
from freezepoint_schemas.headers import ERROR_MESSAGE, header
from freezepoint_schemas.results import Result
from freezepoint_schemas.topics import is_rollout_id

CAPTURE_PATTERN = "*.tokens.jsonl"
_CAPTURE_NAME = re.compile(r"(.+)\.tokens\.jsonl(\.gz)?")


def expanded(paths: Sequence[str]) -> list[str]:
    """The paths, each directory replaced by the capture files in it.

    :raises InputError: a directory without any.
    """
    files: list[str] = []
    for name in paths:
        if not Path(name).is_dir():
            files.append(name)
            continue
        found = sorted(str(path) for end in ("", ".gz") for path in Path(name).glob(CAPTURE_PATTERN + end))
        if not found:
            raise InputError(f"{name}: no {CAPTURE_PATTERN} in this directory")
        files += found
    return files


def captured_rollout(file_name: str) -> str | None:
    """The rollout id in a capture file's name, or None."""
    match = _CAPTURE_NAME.fullmatch(Path(file_name).name)
    return match[1] if match and is_rollout_id(match[1]) else None


@dataclass(slots=True)
class OfflineBuilder:
    """A worker's fold and build over lines of files.

    ``model``: for rollouts whose complete event names none. ``on_lost`` hears of lines that mask their rollout or
    came after its end.
    """

    settings: WorkerSettings
    model: str | None = None
    on_lost: Callable[[str], None] | None = None
    unusable: int = 0
    """Lines that name no rollout."""
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
        """The results of all files: at each complete event, then of what is open in order of first appearance.

        :param on_bad: hears of lines that name no rollout; they are skipped and counted.
        :param on_position: hears the number of the file and how many of its bytes have been read.
        """
        for number, file in enumerate(files):
            default = captured_rollout(file.name)
            heard = None if on_position is None else _of_file(number, on_position)
            for line in file.lines(heard):
                try:
                    rollout_id = _rollout_of(line, default)
                except LineError as error:
                    self.unusable += 1
                    on_bad(error)
                else:
                    yield from self._feed(rollout_id, line.raw, line.where)
        for rollout_id in sorted(self._core.open, key=lambda name: self._core.open[name].first_offset):
            end = codec.encode_event(RolloutComplete(rollout_id=rollout_id))
            yield from self._feed(rollout_id, end, "end of input")

    def _feed(self, rollout_id: str, value: bytes, where: str) -> Iterator[Result]:
        record = InputRecord(0, self._core.next_offset, 0, rollout_id.encode("ascii"), value)
        for effect in self._core.feed(record):
            if isinstance(effect, Freeze):
                result = self._build(effect.log)
                self._core.take([(effect, Verdict.of(result))])
                yield result
            else:
                self._core.take([effect])
                self._lost(effect, rollout_id, where)

    def _build(self, log: FrozenLog) -> Result:
        closing = log.closing
        if self.model is not None and isinstance(closing, RolloutComplete) and closing.model is None:
            log = replace(log, closing=closing.model_copy(update={"model": self.model}))
        return build_result(
            log,
            builder=self.settings.builder,
            delivery=self.settings.delivery,
            trace_tokens_max=self.settings.trace_tokens_max,
        )

    def _lost(self, letter: DeadLetter, rollout_id: str, where: str) -> None:
        if self.on_lost is not None:
            message = (header(letter.record.headers, ERROR_MESSAGE) or b"").decode()
            self.on_lost(f"{where}: rollout {rollout_id}: {letter.reason}: {message}")


def _of_file(number: int, on_position: Callable[[int, int], None]) -> Callable[[int], None]:
    return lambda position: on_position(number, position)


def _rollout_of(line: Line, default: str | None) -> str:
    """The rollout a line belongs to; where the file's name says it, the line need not even be JSON."""
    try:
        body = line.body()
    except LineError:
        if default is None:
            raise
        return default
    return line.rollout_id(body, default)
