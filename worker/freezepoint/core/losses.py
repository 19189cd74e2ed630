"""Lost calls that cannot have been on the scored chain.

A harness that is killed at its timeout leaves calls behind that were announced and never recorded. Masking the whole
rollout for them is safe and often wasteful. The chain that was scored is known to be whole when

1. the complete event names its last call, and that call is recorded, with tokens;
2. each of its calls but the first was sent with its parent's id, and the tokens agree; the first was sent without one, and
   that means "no parent" and not "unknown": some call of the rollout was sent with one, and none that continues a recorded
   call was sent without;
3. every lost call has a name (dangling intents, incomplete marks with a call id), and none of them is on the chain;
4. where the complete event counts calls, the recorded and the lost ones together are that many.

By 2 no lost call can lie between two calls of the chain or before its first. Lost records of unknown content (undecodable,
missing parts, expired) have no name, so they mask as ever. Side chains have no such proof: only the single response is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from freezepoint.core.builder import MAIN, BuildOutput, Parent
from freezepoint.core.forest import How
from freezepoint.core.frozen import FrozenLog
from freezepoint.core.snapshot import Snapshot
from freezepoint_schemas.events import RolloutComplete
from freezepoint_schemas.reasons import Reason

_LOSSES = frozenset({Reason.DANGLING_INTENT, Reason.CAPTURE_INCOMPLETE, Reason.CALL_COUNT_MISMATCH})


@dataclass(frozen=True, slots=True)
class Losses:
    """``call_ids``: lost calls, none of them on the chain. ``reasons``: what they would mask the rollout with."""

    call_ids: tuple[str, ...]
    reasons: frozenset[Reason]


def excusable_losses(log: FrozenLog, snapshot: Snapshot, output: BuildOutput) -> Losses | None:
    """The lost calls of a rollout whose main chain is proved whole; None without losses or without the proof."""
    reasons = snapshot.faults & _LOSSES
    if not reasons or Reason.CAPTURE_INCOMPLETE in log.faults or not _is_proved(snapshot, output):
        return None
    chain = {call.call_id for call in output.traces[0].calls}
    named = {call_id for call_id, _ in log.marks} | set(snapshot.dangling)
    if "" in named or named & chain:
        return None
    recorded = {call.call_id for call in snapshot.calls} | {
        entry.model_call_id for entry, _ in snapshot.set_aside
    }
    counted = log.closing.n_calls if isinstance(log.closing, RolloutComplete) else None
    if counted not in (None, len(recorded | named)):
        return None
    return Losses(tuple(sorted(named)), reasons)


def _is_proved(snapshot: Snapshot, output: BuildOutput) -> bool:
    """Whether nothing can be missing between the first call of the main chain and its last, which is the terminal."""
    if not output.traces or output.traces[0].role != MAIN or snapshot.terminal is None or not output.aimed:
        return False
    root, *later = output.traces[0].calls
    return (
        output.traces[0].end.call_id == snapshot.terminal.call_id
        and root.entry.parent_call_id is None
        and all(output.links[call.call_id].how is How.VERIFIED for call in later)
        and any(link.how is How.VERIFIED for link in output.links.values())
        and not any(_is_silent(link) for link in output.links.values())
    )


def _is_silent(link: Parent) -> bool:
    """The call continues a recorded one, and its producer did not say so."""
    return link.how in (How.INFERRED, How.AMBIGUOUS) and not link.recovered
