"""What must come of a simulated rollout, from what the simulation knows it did."""

from __future__ import annotations

from dataclasses import dataclass

from freezepoint.simulate.agent import Call
from freezepoint.simulate.recorder import Step
from freezepoint_schemas.events import (
    CallCancelled,
    CallIntent,
    CaptureIncomplete,
    InputEvent,
    RolloutCancelled,
    RolloutComplete,
    TokenEntry,
)
from freezepoint_schemas.reasons import Reason, ordered
from freezepoint_schemas.results import Result


@dataclass(frozen=True, slots=True)
class Truth:
    """What the result of a rollout must say, in single-response delivery.

    ``calls``: distinct calls recorded. ``generated_tokens``: theirs. ``delivered_tokens``: the main chain's.
    ``records``: records published of the rollout, repeats and its end included.
    """

    rollout_id: str
    mask_sample: bool
    reasons: list[Reason]
    calls: int
    generated_tokens: int
    delivered_tokens: int
    records: int


def truth_of(rollout_id: str, calls: list[Call], steps: list[Step], closing: InputEvent) -> Truth:
    """What must come of the calls whose records were published in these steps."""
    recorded = {step.event.model_call_id for step in steps if isinstance(step.event, TokenEntry)}
    captured = [call for call in calls if call.call_id in recorded]
    tree = _Tree.of([call for call in captured if call.generation.size])
    reasons = tree.reasons() | _reasons_of_losses(recorded, steps, closing)
    return Truth(
        rollout_id=rollout_id,
        mask_sample=bool(reasons),
        reasons=ordered(reasons),
        calls=len(captured),
        generated_tokens=sum(call.generation.size for call in captured),
        delivered_tokens=sum(call.generation.size for call in tree.main_chain()),
        records=len(steps) + 1,
    )


def _reasons_of_losses(recorded: set[str], steps: list[Step], closing: InputEvent) -> set[Reason]:
    events = [step.event for step in steps]
    announced = {event.model_call_id for event in events if isinstance(event, CallIntent)}
    withdrawn = {event.model_call_id for event in events if isinstance(event, CallCancelled)}
    reasons = set()
    if announced - recorded - withdrawn:
        reasons.add(Reason.DANGLING_INTENT)
    if any(isinstance(event, CaptureIncomplete) for event in events):
        reasons.add(Reason.CAPTURE_INCOMPLETE)
    if isinstance(closing, RolloutCancelled):
        reasons.add(Reason.ROLLOUT_CANCELLED)
    elif not events:
        reasons.add(Reason.NO_RECORDS)
    if isinstance(closing, RolloutComplete) and closing.n_calls not in (None, len(recorded)):
        reasons.add(Reason.CALL_COUNT_MISMATCH)
    return reasons


@dataclass(frozen=True, slots=True)
class _Tree:
    """Who continued whom, among the calls that were recorded and generated something.

    ``parents``: the nearest recorded call that each one truly goes back to. ``unresolved``: whether nothing tells
    which of several samples of a turn was kept. ``live``: calls but for the samples that were not kept.
    """

    parents: dict[Call, Call | None]
    unresolved: bool
    live: list[Call]

    @classmethod
    def of(cls, captured: list[Call]) -> _Tree:
        known = set(captured)
        parents = {call: _nearest(call.parent, known) for call in captured}
        continued = {parent for parent in parents.values() if parent is not None}
        turns: dict[int, list[Call]] = {}
        for call in captured:
            turns.setdefault(call.turn, []).append(call)
        unresolved, live = False, []
        for samples in turns.values():
            kept = [call for call in samples if call in continued]
            unresolved |= len(samples) > 1 and not kept
            live += kept or [min(samples, key=lambda call: call.call_id)]
        return cls(parents, unresolved, live)

    def reasons(self) -> set[Reason]:
        if not self.parents:
            return set()
        roots = sum(parent is None for parent in self.parents.values())
        checks = {
            Reason.UNRESOLVED_RETRY: self.unresolved,
            Reason.MULTIPLE_ROOTS: roots != 1,
            Reason.MULTIPLE_CHAINS: len(self._leaves()) != 1,
        }
        return {reason for reason, holds in checks.items() if holds}

    def main_chain(self) -> list[Call]:
        """The chain of the root that was made first; of several, the one whose last prompt is shortest."""
        chains = [self._path(leaf) for leaf in self._leaves()]
        return min(
            chains,
            key=lambda path: (
                round(path[-1].made_at, 3),
                path[-1].call_id,
                path[0].prompt.size,
                path[0].call_id,
            ),
            default=[],
        )

    def _leaves(self) -> list[Call]:
        continued = set(self.parents.values())
        return [call for call in self.live if call not in continued]

    def _path(self, leaf: Call) -> list[Call]:
        path = [leaf]
        while (parent := self.parents[path[-1]]) is not None:
            path.append(parent)
        return path


def _nearest(call: Call | None, known: set[Call]) -> Call | None:
    while call is not None and call not in known:
        call = call.parent
    return call


def differences(truth: Truth, result: Result) -> list[str]:
    """What a result says otherwise than the truth about its rollout; empty where they agree."""
    pairs = {
        "rollout_id": (truth.rollout_id, result.rollout_id),
        "mask_sample": (truth.mask_sample, result.mask_sample),
        "reasons": ([str(reason) for reason in truth.reasons], [str(reason) for reason in result.reasons]),
        "calls": (truth.calls, result.metrics.get("n_calls", 0)),
        "generated_tokens": (truth.generated_tokens, result.metrics.get("generated_tokens_captured", 0)),
        "delivered_tokens": (truth.delivered_tokens, result.metrics.get("generated_tokens_delivered", 0)),
    }
    return [f"{name}: expected {want}, got {got}" for name, (want, got) in pairs.items() if want != got]
