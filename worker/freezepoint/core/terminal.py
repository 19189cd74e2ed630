"""Which call a rollout's complete event names as its last: the one whose chain was scored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from freezepoint.core.frozen import Closing
from freezepoint_schemas.events import RolloutComplete, TokenEntry


class Attribution(StrEnum):
    """What the named call is."""

    RECORDED = "recorded"
    """Exactly one recorded call."""
    UNRECORDED = "unrecorded"
    """No recorded call: it was lost."""
    AMBIGUOUS = "ambiguous_response_id"
    """Several recorded calls have that response id."""
    CONTRADICTED = "contradicted"
    """The call of that id has another response id than the one that was named with it."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """The named call. ``call_id``: where it is recorded; ``candidates``: the calls that the name fits, in order."""

    attribution: Attribution
    call_id: str | None = None
    candidates: tuple[str, ...] = ()

    @property
    def is_unclear(self) -> bool:
        """The name fits no single call, so no chain is known to be the scored one."""
        return self.attribution in (Attribution.AMBIGUOUS, Attribution.CONTRADICTED)


def terminal_of(closing: Closing, entries: Iterable[TokenEntry]) -> Terminal | None:
    """The call that the complete event names among the recorded ones; None where it names none.

    A call id tells more than a response id; where both are given they must agree.
    """
    if not isinstance(closing, RolloutComplete):
        return None
    call_id, response_id = closing.terminal_call_id, closing.terminal_response_id
    if call_id is not None:
        named = next((entry for entry in entries if entry.model_call_id == call_id), None)
        if named is None:
            return Terminal(Attribution.UNRECORDED)
        agrees = response_id is None or named.response_id in (None, response_id)
        return Terminal(
            Attribution.RECORDED if agrees else Attribution.CONTRADICTED,
            call_id if agrees else None,
            (call_id,),
        )
    if response_id is None:
        return None
    found = sorted(entry.model_call_id for entry in entries if entry.response_id == response_id)
    if len(found) == 1:
        return Terminal(Attribution.RECORDED, found[0], (found[0],))
    return Terminal(Attribution.AMBIGUOUS if found else Attribution.UNRECORDED, None, tuple(found))
