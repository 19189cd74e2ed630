"""A simulated agent: makes a rollout's model calls as a tree of who continued whom."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from freezepoint.simulate.profile import Profile
from freezepoint_schemas.arrays import FloatArray, TokenArray

VOCABULARY = 131_072
"""Large enough that no two drawn sequences begin alike by chance."""
_NO_TOKENS: TokenArray = np.empty(0, np.int32)


@dataclass(eq=False, slots=True)
class Call:
    """One model call. ``parent``: the call that this one truly continued. ``turn``: calls of equal prompt share it.

    ``made_at`` counts seconds from the rollout's begin. ``loss``: how its record got lost, if it did.
    """

    call_id: str
    turn: int
    parent: Call | None
    prompt: TokenArray
    generation: TokenArray
    log_probs: FloatArray
    started_at: float
    made_at: float
    large: bool = False
    loss: str | None = None

    @property
    def cumulative(self) -> TokenArray:
        return np.concatenate([self.prompt, self.generation])


@dataclass(slots=True)
class Agent:
    """Makes the calls: turns of a main agent, and what may happen beside and to it."""

    profile: Profile
    rng: np.random.Generator
    calls: list[Call] = field(default_factory=list)
    turn: int = 0

    def work(self) -> None:
        profile = self.profile
        turns = self._between(profile.turns)
        compacted = (
            int(self.rng.integers(1, turns)) if turns > 1 and self._happens(profile.compaction) else None
        )
        line = self._line(compacted or turns, None, self._tokens(profile.prompt_tokens), 0.0)
        if compacted is not None:
            summary = self._tokens(profile.prompt_tokens)
            line = [*line, *self._line(turns - compacted, None, summary, line[-1].made_at)]
        if self._happens(profile.unresolved):
            last = line[-1]
            self._call(last.turn, last.parent, last.prompt, last.made_at)
        if self._happens(profile.subagent):
            host = self._any(line)
            self._line(int(self.rng.integers(1, 4)), None, self._tokens(profile.prompt_tokens), host.made_at)
        if len(line) > 1 and self._happens(profile.fork):
            origin = self._any(line[:-1])
            prompt = np.concatenate([origin.cumulative, self._tokens(profile.tool_tokens)])
            self._line(int(self.rng.integers(1, 4)), origin, prompt, origin.made_at)

    def _line(self, turns: int, parent: Call | None, prompt: TokenArray, at: float) -> list[Call]:
        """A line of turns, each continuing the one before it; the calls that were continued."""
        line: list[Call] = []
        for remaining in range(turns, 0, -1):
            self.turn += 1
            if self._happens(self.profile.empty):
                at = self._call(self.turn, parent, prompt, at, empty=True).made_at
            samples = [self._call(self.turn, parent, prompt, at)]
            if remaining > 1 and self._happens(self.profile.retry):
                samples.append(self._call(self.turn, parent, prompt, samples[0].made_at))
            parent = self._any(samples)
            line.append(parent)
            at = samples[-1].made_at
            prompt = np.concatenate([parent.cumulative, self._tokens(self.profile.tool_tokens)])
        return line

    def _call(
        self, turn: int, parent: Call | None, prompt: TokenArray, at: float, *, empty: bool = False
    ) -> Call:
        started = at + float(self.rng.uniform(0.01, 0.5))
        generation = _NO_TOKENS if empty else self._tokens(self.profile.generation_tokens)
        call = Call(
            call_id=self.rng.bytes(16).hex(),
            turn=turn,
            parent=parent,
            prompt=prompt,
            generation=generation,
            log_probs=np.round(-self.rng.standard_exponential(generation.size), 4),
            started_at=started,
            made_at=started + float(self.rng.uniform(0.2, 2.0)),
            large=self._happens(self.profile.large),
        )
        self.calls.append(call)
        return call

    def _tokens(self, count: tuple[int, int]) -> TokenArray:
        return self.rng.integers(0, VOCABULARY, self._between(count), dtype=np.int32)

    def _between(self, bounds: tuple[int, int]) -> int:
        return int(self.rng.integers(bounds[0], bounds[1] + 1))

    def _any(self, calls: list[Call]) -> Call:
        return calls[int(self.rng.integers(len(calls)))]

    def _happens(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)
