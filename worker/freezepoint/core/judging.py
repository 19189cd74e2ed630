"""Why a built rollout is masked, under one delivery or the other. The traces are the same; only this differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from freezepoint.core.builder import MAIN, BuildOutput
from freezepoint.core.choices import PER_REQUEST, SINGLE_RESPONSE
from freezepoint.core.frozen import FrozenLog, TimedOut
from freezepoint.core.losses import Losses, excusable_losses
from freezepoint.core.routes import is_mismatch
from freezepoint.core.snapshot import ResolvedCall, Snapshot
from freezepoint_schemas.events import RolloutCancelled
from freezepoint_schemas.reasons import Reason, ordered

_NOTHING_RECORDED = "No call of this rollout was recorded."
_EVERYTHING_LOST = "Nothing to build: the calls of this rollout were lost or dropped."
_UNUSABLE_TERMINAL = "No safe chain: the call that the rollout ended with is not safely known."
_FAILURES = {
    Reason.NO_SAFE_CHAIN: "No safe chain: every path from a root to a leaf crosses a quarantined call.",
    Reason.NO_TRAINABLE_TOKENS: "No trainable tokens: every recorded generation is empty.",
    Reason.BUILDER_NOT_DELIVERABLE: "per_request can return several trajectories, single_response takes one.",
}
_EMPTY_TERMINAL = (
    "No trainable tokens: the call that the rollout ended with generated none and continues no other."
)


@dataclass(frozen=True, slots=True)
class Leniency:
    """What masks by choice. ``keep_attributed``: in single_response, a verified chain to the terminal is kept though calls
    off it were lost (see ``losses``). ``mask_routes_mismatch``: routed experts that fit no tokens mask."""

    keep_attributed: bool = False
    mask_routes_mismatch: bool = False


class Choice(NamedTuple):
    """What this rollout is built with, for whom."""

    builder: str
    delivery: str

    @property
    def is_single(self) -> bool:
        return self.delivery == SINGLE_RESPONSE


@dataclass(frozen=True, slots=True)
class Judgement:
    """``error``: why there is nothing to deliver. ``tolerated``: lost calls that mask nothing here."""

    reasons: list[Reason]
    error: str | None
    tolerated: Losses | None = None


def judge(
    log: FrozenLog, snapshot: Snapshot, output: BuildOutput, choice: Choice, leniency: Leniency
) -> Judgement:
    """Whether this rollout may be trained on when it is delivered that way."""
    failures = _failures(snapshot, output, choice)
    error = _error(snapshot, output, failures)
    reasons = snapshot.faults | failures | closing_reasons(log)
    reasons |= _shape_reasons(output, choice, failed=error is not None)
    if output.left_out:
        reasons |= {Reason.ROLLOUT_TOO_LARGE}
    if leniency.mask_routes_mismatch and any(map(is_mismatch, _delivered_calls(output, choice))):
        reasons |= {Reason.ROUTES_MISMATCH}
    losses = None
    if leniency.keep_attributed and choice.is_single and error is None:
        losses = excusable_losses(log, snapshot, output)
        reasons -= losses.reasons if losses else set()
    return Judgement(ordered(reasons), error, losses)


def closing_reasons(log: FrozenLog) -> set[Reason]:
    """What the end of a rollout masks it with."""
    match log.closing:
        case RolloutCancelled():
            return {Reason.ROLLOUT_CANCELLED}
        case TimedOut():
            return {Reason.ROLLOUT_TIMEOUT}
        case _:
            return set()


def _failures(snapshot: Snapshot, output: BuildOutput, choice: Choice) -> set[Reason]:
    """Why there is nothing to deliver."""
    failures: set[Reason] = set()
    undeliverable = choice.is_single and choice.builder == PER_REQUEST
    if undeliverable:
        failures.add(Reason.BUILDER_NOT_DELIVERABLE)
    if not snapshot.recorded:
        return failures
    if not output.captured and not any(entry.generation_token_ids.size for entry, _ in snapshot.set_aside):
        failures.add(Reason.NO_TRAINABLE_TOKENS)
    elif not output.captured:
        failures.add(Reason.NO_SAFE_CHAIN)
    elif choice.is_single and not undeliverable and output.main is None:
        failures.add(output.failure or Reason.NO_SAFE_CHAIN)
    return failures


def _error(snapshot: Snapshot, output: BuildOutput, failures: set[Reason]) -> str | None:
    if not snapshot.recorded:
        return _NOTHING_RECORDED if Reason.NO_RECORDS in snapshot.faults else _EVERYTHING_LOST
    first = next(iter(ordered(failures)), None)
    if first is None:
        return None
    if output.failure is first and output.captured:
        return _EMPTY_TERMINAL if first is Reason.NO_TRAINABLE_TOKENS else _UNUSABLE_TERMINAL
    return _FAILURES[first]


def _shape_reasons(output: BuildOutput, choice: Choice, *, failed: bool) -> set[Reason]:
    """What about the built forest keeps it from being trained on. Where a terminal says which chain was scored, a single
    response does not mind what else there is."""
    attributed = choice.is_single and output.aimed
    reasons: set[Reason] = set()
    if output.unresolved_retries and not attributed:
        reasons.add(Reason.UNRESOLVED_RETRY)
    if not choice.is_single or attributed or failed:
        return reasons
    if output.roots != 1:
        reasons.add(Reason.MULTIPLE_ROOTS)
    if len(output.chains) != 1:
        reasons.add(Reason.MULTIPLE_CHAINS)
    return reasons


def _delivered_calls(output: BuildOutput, choice: Choice) -> Iterator[ResolvedCall]:
    for path in output.traces:
        if not choice.is_single or path.role == MAIN:
            yield from path.calls
