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
    named_parent: str | None = None
    parent: Call | None = None
    link: str = "root"
    recovered: bool = False
    children: list[Call] = field(default_factory=list)
    quarantined: str | None = None
    after_terminal: bool = False

    @property
    def cumulative(self) -> list[int]:
        return self.prompt + self.generation

    @property
    def path(self) -> list[Call]:
        return [*(self.parent.path if self.parent else []), self]

    @property
    def is_live(self) -> bool:
        return all(call.quarantined is None and not call.after_terminal for call in self.path)


@dataclass
class Naive:
    calls: list[Call]
    empty: list[str]
    unresolved: list[str]
    chains: list[Call]
    main: Call | None
    live_ends: list[Call]
    failure: str | None = None
    """Why the terminal gives no main chain."""

    def paths(self) -> list[tuple[str, list[str]]]:
        """(role, call ids) of every trace."""
        sides = [end for end in self.live_ends if end is not self.main]
        named = [("main", self.main)] if self.main else []
        return [
            (role, [call.id for call in end.path])
            for role, end in [*named, *((f"branch-{number}", end) for number, end in enumerate(sides))]
        ]

    def links(self, link: str) -> list[str]:
        """The calls that got their parent (or none) that way."""
        return [call.id for call in self.calls if call.link == link]


def build(entries: Iterable[TokenEntry], terminal: str | None = None) -> Naive:
    """What BUILDER.md's rules make of entries whose prompts are whole; ``terminal`` is one of their ids."""
    every = [
        Call(
            e.model_call_id,
            e.prompt_token_ids.tolist(),
            e.generation_token_ids.tolist(),
            e.created_at,
            e.parent_call_id,
        )
        for e in entries
    ]
    calls = sorted((call for call in every if call.generation), key=lambda call: (len(call.prompt), call.id))
    for call in calls:
        _link(call, calls)
        if call.parent:
            call.parent.children.append(call)
    aim, failure = _aim(every, calls, terminal)
    for call in calls:
        if aim is not None and aim in call.path[:-1]:
            call.after_terminal = True
            call.quarantined = None
    unresolved = _resolve_retries([call for call in calls if not call.after_terminal], aim)
    leaves = [call for call in calls if not call.children or call is aim]
    chains = [call for call in leaves if call.is_live]
    ends = [call for call in calls if call.is_live and not any(child.is_live for child in call.children)]
    if aim is not None and not aim.is_live:
        failure = "no_safe_chain"
    if terminal is None:
        main = min(chains, key=lambda leaf: (leaf.path[0].created_at, leaf.path[0].id), default=None)
    else:
        main = aim if failure is None else None
    empty = sorted(call.id for call in every if not call.generation)
    return Naive(calls, empty, unresolved, chains, main, ends, failure)


def _aim(every: list[Call], calls: list[Call], terminal: str | None) -> tuple[Call | None, str | None]:
    """The call that the main chain ends with, or why there is none."""
    if terminal is None:
        return None, None
    [named] = [call for call in every if call.id == terminal]
    if named.generation:
        return named, None
    _link(named, calls)
    if named.parent is None:
        return None, "no_trainable_tokens"
    if named.quarantined:
        return None, "no_safe_chain"
    return named.parent, None


def _link(call: Call, calls: list[Call]) -> None:
    if call.named_parent is not None:
        named = [other for other in calls if other.id == call.named_parent]
        if named and call.prompt[: len(named[0].cumulative)] == named[0].cumulative:
            call.parent, call.link = named[0], "verified"
            return
        if named:
            call.link = "mismatch"
            return
        call.recovered = True
    prefixes = [other for other in calls if call.prompt[: len(other.cumulative)] == other.cumulative]
    if not prefixes:
        return
    longest = max(len(other.cumulative) for other in prefixes)
    candidates = [other for other in prefixes if len(other.cumulative) == longest]
    call.parent, call.link = candidates[0], "inferred"
    if len(candidates) > 1:
        call.quarantined = "ambiguous_parent"


def _resolve_retries(calls: list[Call], aim: Call | None) -> list[str]:
    unresolved: list[str] = []
    parents = list(dict.fromkeys(call.parent for call in calls))
    for parent in parents:
        siblings = [call for call in calls if call.parent is parent]
        prompts = list(dict.fromkeys(tuple(call.prompt) for call in siblings))
        for prompt in prompts:
            group = [call for call in siblings if tuple(call.prompt) == prompt]
            if len(group) < 2:
                continue
            kept = [
                call
                for call in group
                if (aim is not None and call in aim.path)
                or any(child.quarantined is None and not child.after_terminal for child in call.children)
            ]
            if not kept:
                unresolved += [call.id for call in group]
                kept = [min(group, key=lambda call: call.id)]
            for call in group:
                if call not in kept and call.quarantined is None:
                    call.quarantined = "superseded_retry"
    return unresolved
