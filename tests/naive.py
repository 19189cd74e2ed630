"""The builder's rules word for word, quadratic and with plain lists: what the real one is compared with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from freezepoint_schemas.events import TokenEntry


@dataclass(eq=False)
class Call:
    id: str
    prompt: list[int]
    generation: list[int]
    created_at: float
    parent: Call | None = None
    children: list[Call] = field(default_factory=list)
    quarantined: str | None = None

    @property
    def cumulative(self) -> list[int]:
        return self.prompt + self.generation

    @property
    def path(self) -> list[Call]:
        return [*(self.parent.path if self.parent else []), self]

    @property
    def is_live(self) -> bool:
        return all(call.quarantined is None for call in self.path)


@dataclass
class Naive:
    calls: list[Call]
    empty: list[str]
    unresolved: list[str]
    chains: list[Call]
    main: Call | None
    live_ends: list[Call]

    def paths(self) -> list[tuple[str, list[str]]]:
        """(role, call ids) of every trace."""
        sides = [end for end in self.live_ends if end is not self.main]
        named = [("main", self.main)] if self.main else []
        return [
            (role, [call.id for call in end.path])
            for role, end in [*named, *((f"branch-{number}", end) for number, end in enumerate(sides))]
        ]


def build(entries: Iterable[TokenEntry]) -> Naive:
    """What BUILDER.md's steps 1 to 6 and its all-traces rule make of entries whose prompts are whole."""
    every = [
        Call(e.model_call_id, e.prompt_token_ids.tolist(), e.generation_token_ids.tolist(), e.created_at)
        for e in entries
    ]
    calls = sorted((call for call in every if call.generation), key=lambda call: (len(call.prompt), call.id))
    for position, call in enumerate(calls):
        _link(call, calls[:position])
    unresolved = _resolve_retries(calls)
    chains = [call for call in calls if not call.children and call.is_live]
    main = min(chains, key=lambda leaf: (leaf.path[0].created_at, leaf.path[0].id), default=None)
    ends = [call for call in calls if call.is_live and not any(child.is_live for child in call.children)]
    return Naive(
        calls, sorted(call.id for call in every if not call.generation), unresolved, chains, main, ends
    )


def _link(call: Call, earlier: list[Call]) -> None:
    prefixes = [other for other in earlier if call.prompt[: len(other.cumulative)] == other.cumulative]
    if not prefixes:
        return
    longest = max(len(other.cumulative) for other in prefixes)
    candidates = [other for other in prefixes if len(other.cumulative) == longest]
    call.parent = candidates[0]
    call.parent.children.append(call)
    if len(candidates) > 1:
        call.quarantined = "ambiguous_parent"


def _resolve_retries(calls: list[Call]) -> list[str]:
    unresolved: list[str] = []
    parents = list(dict.fromkeys(call.parent for call in calls))
    for parent in parents:
        siblings = [call for call in calls if call.parent is parent]
        prompts = list(dict.fromkeys(tuple(call.prompt) for call in siblings))
        for prompt in prompts:
            group = [call for call in siblings if tuple(call.prompt) == prompt]
            if len(group) < 2:
                continue
            kept = [call for call in group if any(child.quarantined is None for child in call.children)]
            if not kept:
                unresolved += [call.id for call in group]
                kept = [min(group, key=lambda call: call.id)]
            for call in group:
                if call not in kept and call.quarantined is None:
                    call.quarantined = "superseded_retry"
    return unresolved
