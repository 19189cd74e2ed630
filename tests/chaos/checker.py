"""The independent checker: what the tokens topic demands against what the committed topics hold, every difference by name.

It reads with plain consumers, folds by :mod:`tests.chaos.fold`, builds by the plain builder, and trusts nothing else.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from freezepoint.core.build import build_result
from freezepoint.simulate import Truth
from freezepoint.simulate import differences as differences_from_truth
from freezepoint_schemas import codec
from freezepoint_schemas.headers import (
    ERROR_CLASS,
    ERROR_MESSAGE,
    ERROR_OFFSET,
    ERROR_PARTITION,
    ERROR_TOPIC,
    ORIGINAL_PART,
    ORIGINAL_SIZE,
)
from freezepoint_schemas.ledger import CARRY_MARK, PROGRESS_KEY, LedgerRecord, ProgressRecord
from freezepoint_schemas.results import Result
from tests.chaos.fold import NaiveFold, Place, Truncation
from tests.chaos.tails import PART, Line, Wholes

SHOWN_MAX = 12
_WORKERS_OWN = frozenset(
    {ERROR_CLASS, ERROR_MESSAGE, ERROR_OFFSET, ERROR_PARTITION, ERROR_TOPIC, ORIGINAL_PART, ORIGINAL_SIZE}
)


@dataclass(frozen=True)
class Evidence:
    """Everything that was committed. ``end_offsets``: of the tokens partitions. ``open_transactions``: where one is."""

    partitions: int
    tokens: Sequence[Line]
    results: Sequence[Line]
    ledger: Sequence[Line]
    letters: Sequence[Line]
    end_offsets: Mapping[int, int]
    open_transactions: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Claims:
    """What a scenario knows beside the log. ``truths``: of rollouts whose records nobody tampered with.
    ``may_time_out``: ids that were left idle on purpose; None: whichever. ``truncations``: see the fold.
    ``earlier``: the results are an earlier release's, whose diagnostics may say less."""

    truths: Mapping[str, Truth] = field(default_factory=dict)
    may_time_out: Collection[str] | None = ()
    truncations: Mapping[int, Truncation] = field(default_factory=dict)
    caught_up: bool = True
    earlier: bool = False


@dataclass
class Verdict:
    """The figures of a check, and each difference in one line."""

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.differences

    def note(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        self.differences.append(f"{kind}: {text}")

    def summary(self) -> str:
        more = len(self.differences) - SHOWN_MAX
        return "\n".join([*self.differences[:SHOWN_MAX], *([f"... and {more} more"] if more > 0 else [])])


def check(evidence: Evidence, claims: Claims) -> Verdict:
    """Recompute everything and compare."""
    verdict = Verdict()
    results = _results(evidence.results, verdict)
    fold = _fold(evidence, claims, [result for _, result in results])
    _compare_results(fold, results, claims, verdict)
    _compare_order(results, verdict)
    _compare_truths([result for _, result in results], claims.truths, verdict)
    _check_timeouts([result for _, result in results], claims.may_time_out, verdict)
    _compare_letters(evidence, fold, verdict)
    _compare_ledger(evidence, fold, [result for _, result in results], verdict, caught_up=claims.caught_up)
    for where, (stable, end) in evidence.open_transactions.items():
        verdict.note("open_transactions", f"{where} is stable to {stable} and ends at {end}")
    verdict.counts |= Counter(
        records=len(evidence.tokens),
        lives=len(fold.lives),
        results=len(results),
        letters=len(evidence.letters),
    )
    verdict.counts["masked"] = sum(result.mask_sample for _, result in results)
    verdict.counts["open"] = len(fold.open)
    return verdict


def _results(lines: Iterable[Line], verdict: Verdict) -> list[tuple[Line, Result]]:
    """Results with the records that complete them, put together from their parts."""
    wholes = Wholes()
    found = [(line, codec.decode_result(value)) for line in lines if (value := wholes.put(line)) is not None]
    for partition, key in wholes.torn:
        verdict.note("torn_results", f"a result of {key!r} on partition {partition} lacks parts")
    return found


def _fold(evidence: Evidence, claims: Claims, results: Iterable[Result]) -> NaiveFold:
    timeouts: defaultdict[Place, set[str]] = defaultdict(set)
    for result in results:
        if "rollout_timeout" in result.reasons:
            place = (result.snapshot.partition, result.snapshot.freeze_offset)
            timeouts[place].add(result.rollout_id)
    fold = NaiveFold(evidence.partitions, timeouts=timeouts, truncations=claims.truncations)
    for line in sorted(evidence.tokens, key=lambda line: (line.partition, line.offset)):
        fold.feed(line)
    return fold


def _life(result: Result) -> tuple[str, int, int]:
    return result.rollout_id, result.snapshot.partition, result.snapshot.freeze_offset


def _compare_results(
    fold: NaiveFold, results: Sequence[tuple[Line, Result]], claims: Claims, verdict: Verdict
) -> None:
    """Results = frozen lives, one each, with equal content."""
    found: defaultdict[tuple[str, int, int], list[Result]] = defaultdict(list)
    for line, result in results:
        if (line.key or b"").decode() != result.rollout_id:
            verdict.note("wrong_keys", f"the result of {result.rollout_id} has the key {line.key!r}")
        found[_life(result)].append(result)
    for log in fold.lives:
        own = found.pop((log.rollout_id, log.partition, log.freeze_offset), [])
        life = f"{log.rollout_id} frozen at {log.partition}:{log.freeze_offset}"
        if not own:
            verdict.note("lost", f"no result of {life}")
            continue
        for _ in own[1:]:
            verdict.note("duplicates", f"one more result of {life}")
        for result in own:
            built = _as_said_by(result, build_result(log)) if claims.earlier else build_result(log)
            expected = codec.encode_result(built)
            if codec.encode_result(result) != expected:
                _compare_content(life, _plain(codec.decode_result(expected)), _plain(result), verdict)
    for (rollout_id, partition, offset), own in found.items():
        for result in own:
            reasons = [str(reason) for reason in result.reasons]
            verdict.note(
                "unfounded",
                f"{rollout_id} has a result at {partition}:{offset}, nothing froze there ({reasons})",
            )


def _as_said_by(earlier: Result, built: Result) -> Result:
    """Without the diagnostics that the earlier release did not have."""
    known = {name: built.diagnostics[name] for name in built.diagnostics if name in earlier.diagnostics}
    return built.model_copy(update={"diagnostics": known})


def _plain(result: Result) -> dict[str, Any]:
    plain: dict[str, Any] = result.model_dump(mode="json")
    return plain


def _compare_content(life: str, expected: dict[str, Any], found: dict[str, Any], verdict: Verdict) -> None:
    for name, value in expected.items():
        if value != found[name]:
            want, got = (_short(body[name]) for body in (expected, found))
            verdict.note("content", f"{life}: {name} is {got}, not {want}")
            return
    verdict.note("content", f"{life}: encoded another way")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:160]}..."


def _compare_order(results: Sequence[tuple[Line, Result]], verdict: Verdict) -> None:
    """Results leave in offset order, hence also the lives of an id."""
    latest: dict[tuple[int, int], int] = {}
    for line, result in sorted(results, key=lambda pair: (pair[0].partition, pair[0].offset)):
        place = (line.partition, result.snapshot.partition)
        offset = result.snapshot.freeze_offset
        if offset < latest.get(place, -1):
            verdict.note("disorder", f"{result.rollout_id} frozen at {offset} comes after {latest[place]}")
        latest[place] = max(offset, latest.get(place, -1))


def _compare_truths(results: Iterable[Result], truths: Mapping[str, Truth], verdict: Verdict) -> None:
    for result in results:
        truth = truths.get(result.rollout_id)
        for difference in () if truth is None else differences_from_truth(truth, result):
            verdict.note("untrue", f"{result.rollout_id}: {difference}")


def _check_timeouts(results: Iterable[Result], allowed: Collection[str] | None, verdict: Verdict) -> None:
    for result in results:
        if "rollout_timeout" not in result.reasons:
            continue
        verdict.counts["timeouts"] += 1
        if allowed is not None and result.rollout_id not in allowed:
            verdict.note("false_timeouts", f"{result.rollout_id} was not idle")


def _compare_letters(evidence: Evidence, fold: NaiveFold, verdict: Verdict) -> None:
    """Each record that had to be set aside exactly once, as it was, for the right reason."""
    tokens = {(line.partition, line.offset): line for line in evidence.tokens}
    found: Counter[Place] = Counter()
    for letter in evidence.letters:
        place = (int(letter.header(ERROR_PARTITION) or -1), int(letter.header(ERROR_OFFSET) or -1))
        found[place] += 1
        reason = (letter.header(ERROR_CLASS) or b"").decode()
        if place not in fold.letters:
            verdict.note("letters_unfounded", f"{reason} for the record at {place}, which is fine")
        elif fold.letters[place] != reason:
            verdict.note("letters_wrong", f"{reason} for the record at {place}, not {fold.letters[place]}")
        elif not _is_copy(tokens[place], letter):
            verdict.note("letters_wrong", f"the letter of {place} is not the record as it was")
    for place, reason in fold.letters.items():
        if not found[place]:
            verdict.note("letters_lost", f"none of the record at {place} ({reason})")
        elif found[place] > 1:
            verdict.note("letters_doubled", f"{found[place]} of the record at {place} ({reason})")


def _is_copy(record: Line, letter: Line) -> bool:
    own = [(name, value) for name, value in letter.headers if name not in _WORKERS_OWN]
    original = [(name, value) for name, value in record.headers if name != PART]
    return (record.key, record.value, original) == (letter.key, letter.value, own)


def _compare_ledger(
    evidence: Evidence, fold: NaiveFold, results: Sequence[Result], verdict: Verdict, *, caught_up: bool
) -> None:
    """A life is decided in the ledger if and only if its result is there, then and now."""
    latest, ever, progress = _ledger(evidence.ledger)
    committed = {(result.rollout_id, result.snapshot.freeze_offset): result for result in results}
    last: dict[str, int] = {}
    for rollout_id, offset in committed:
        last[rollout_id] = max(offset, last.get(rollout_id, -1))
    for rollout_id, offset in last.items():
        known = latest[rollout_id].freeze_offset if rollout_id in latest else -1
        if known != offset:
            verdict.note(
                "ledger_lacks", f"{rollout_id} has its last result at {offset}, the ledger says {known}"
            )
    for rollout_id, offset in sorted(ever - committed.keys()):
        verdict.note("ledger_exceeds", f"{rollout_id} is decided at {offset} without a result")
    for rollout_id, record in latest.items():
        result = committed.get((rollout_id, record.freeze_offset))
        if result is None:
            continue
        said = (record.snapshot_id, record.outcome, list(record.reasons))
        holds = (result.snapshot.id, "masked" if result.mask_sample else "delivered", list(result.reasons))
        if said != holds:
            verdict.note("ledger_differs", f"{rollout_id}: the ledger says {said}, the result {holds}")
    if caught_up:
        carried = {
            rollout_id: record.carried.through + 1 for rollout_id, record in latest.items() if record.carried
        }
        _check_progress(evidence, fold, progress, carried, verdict)


def _ledger(
    lines: Iterable[Line],
) -> tuple[dict[str, LedgerRecord], set[tuple[str, int]], dict[int, ProgressRecord]]:
    """The latest record of each id, every (id, freeze offset) that was ever decided, the progress by partition."""
    latest: dict[str, LedgerRecord] = {}
    ever: set[tuple[str, int]] = set()
    progress: dict[int, ProgressRecord] = {}
    for line in sorted(lines, key=lambda line: (line.partition, line.offset)):
        if line.value is None or line.key is None:
            continue
        if line.key == PROGRESS_KEY:
            progress[line.partition] = codec.decode_progress(line.value)
            continue
        if CARRY_MARK in line.key:
            continue
        record = latest[line.key.decode()] = codec.decode_ledger(line.value)
        if record.freeze_offset >= 0:
            ever.add((line.key.decode(), record.freeze_offset))
    return latest, ever, progress


def _check_progress(
    evidence: Evidence,
    fold: NaiveFold,
    progress: Mapping[int, ProgressRecord],
    carried: Mapping[str, int],
    verdict: Verdict,
) -> None:
    """Everything was read, and no watermark has passed what a replay still needs: an open life's records, but for those
    that were carried into the ledger."""
    for partition, end in evidence.end_offsets.items():
        if not any(line.partition == partition for line in evidence.tokens):
            continue
        held = progress.get(partition)
        applied = -1 if held is None else held.applied_offset
        lag = end - 1 - applied
        verdict.counts["lag"] += lag
        if lag:
            verdict.note("lagging", f"partition {partition} ends at {end}, applied is {applied}")
        needed = min(
            (
                carried.get(life.rollout_id, life.first_offset)
                for life in fold.open.values()
                if life.partition == partition
            ),
            default=end,
        )
        if held is not None and held.watermark > needed:
            verdict.note("watermark", f"partition {partition}: {held.watermark} is past {needed}")
