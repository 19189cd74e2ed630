"""Which calls are known and what they say, for who keeps entries outside of a worker's fold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from freezepoint.core.digests import body_digest, prompt_form
from freezepoint_schemas.events import TokenEntry


class Standing(Enum):
    """What an entry is to the calls that are recorded."""

    NEW = auto()
    DUPLICATE = auto()
    CONFLICT = auto()


@dataclass(frozen=True, slots=True)
class Said:
    """What an entry says, as digests. ``referring``: its prompt is written by reference."""

    call_id: str
    body: bytes
    form: bytes
    referring: bool

    @classmethod
    def by(cls, entry: TokenEntry, form: bytes | None = None) -> Said:
        """:param form: its ``prompt_form``, where that is known."""
        return cls(
            entry.model_call_id,
            body_digest(entry),
            form or prompt_form(entry),
            entry.prompt_prefix is not None,
        )


@dataclass(slots=True)
class CallIndex:
    """What each recorded call says.

    Two prompts that are written in different ways, one of them by reference, may still be the same: such a form is new,
    and the build compares it.
    """

    _calls: dict[str, Said] = field(default_factory=dict)
    _alternatives: set[Said] = field(default_factory=set)

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._calls

    def take(self, said: Said) -> Standing:
        """Its standing; a new one is recorded from now on."""
        standing = self.standing(said)
        if standing is Standing.NEW and self._calls.setdefault(said.call_id, said) is not said:
            self._alternatives.add(said)
        return standing

    def standing(self, said: Said) -> Standing:
        known = self._calls.get(said.call_id)
        if known is None:
            return Standing.NEW
        if known == said or said in self._alternatives:
            return Standing.DUPLICATE
        return (
            Standing.NEW
            if known.body == said.body and (known.referring or said.referring)
            else Standing.CONFLICT
        )


class Sorted(NamedTuple):
    """Entries told apart: the first of each call, further ways its prompt is written, whether any contradict another."""

    entries: tuple[TokenEntry, ...]
    alternatives: tuple[TokenEntry, ...]
    contradictory: bool


def sorted_out(found: Iterable[TokenEntry]) -> Sorted:
    """Repeats are left out; of contradictory entries the first one stays."""
    calls = CallIndex()
    entries: list[TokenEntry] = []
    alternatives: list[TokenEntry] = []
    contradictory = False
    for entry in found:
        known = entry.model_call_id in calls
        match calls.take(Said.by(entry)):
            case Standing.NEW:
                (alternatives if known else entries).append(entry)
            case Standing.CONFLICT:
                contradictory = True
    return Sorted(tuple(entries), tuple(alternatives), contradictory)
