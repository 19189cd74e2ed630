"""What model servers publish of a simulated agent's calls: entries, announcements, losses and repeats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from freezepoint.simulate.agent import Call
from freezepoint.simulate.profile import Profile
from freezepoint_schemas.events import CallCancelled, CallIntent, CaptureIncomplete, InputEvent, TokenEntry

MODEL = "simulated-policy"
EPOCH_S = 1_750_000_000.0
POLICY_UPDATE_S = 20.0


@dataclass(frozen=True, slots=True)
class Step:
    """One event and when it is published, in seconds from the rollout's begin."""

    at: float
    event: InputEvent


@dataclass(slots=True)
class Recorder:
    """Turns calls into what model servers publish of them, losses and repeats included."""

    profile: Profile
    rng: np.random.Generator
    rollout_id: str
    calls: list[Call]
    steps: list[Step] = field(default_factory=list)
    counted: bool = False

    def record(self) -> None:
        announced = bool(self.rng.random() < self.profile.intents)
        self.counted = bool(self.rng.random() < self.profile.counted)
        self._lose(announced=announced)
        for call in self.calls:
            self._record_call(call, announced=announced)
            if self.rng.random() < self.profile.withdrawn:
                self._withdraw(call.started_at)
        for step in list(self.steps):
            if self.rng.random() < self.profile.duplicate:
                self._at(step.at + float(self.rng.uniform(0, 3)), step.event)
        self.steps.sort(key=lambda step: step.at)

    def cut(self) -> None:
        """Give up at a random moment, once something that generated tokens has been recorded."""
        first = next(
            position
            for position, step in enumerate(self.steps)
            if isinstance(step.event, TokenEntry) and step.event.generation_token_ids.size
        )
        del self.steps[int(self.rng.integers(first + 1, len(self.steps) + 1)) :]

    def _lose(self, *, announced: bool) -> None:
        """Lose one record, in a way that shows, and never the only one."""
        candidates = [call for call in self.calls if call.generation.size]
        ways = ["mark"] + ["intent"] * announced + ["silence"] * self.counted
        if len(candidates) > 1 and self.rng.random() < self.profile.lost:
            candidates[int(self.rng.integers(len(candidates)))].loss = ways[int(self.rng.integers(len(ways)))]

    def _record_call(self, call: Call, *, announced: bool) -> None:
        if call.loss == "intent" or (announced and call.loss is None):
            self._at(call.started_at, CallIntent(rollout_id=self.rollout_id, model_call_id=call.call_id))
        if call.loss == "mark":
            mark = CaptureIncomplete(
                rollout_id=self.rollout_id,
                model_call_id=call.call_id,
                reason="the engine returned no token ids",
            )
            self._at(call.made_at, mark)
        if call.loss is None:
            self._at(call.made_at, _entry(self.rollout_id, call, self.profile.large_bytes))

    def _withdraw(self, at: float) -> None:
        call_id = self.rng.bytes(16).hex()
        self._at(at, CallIntent(rollout_id=self.rollout_id, model_call_id=call_id))
        self._at(at + 0.01, CallCancelled(rollout_id=self.rollout_id, model_call_id=call_id))

    def _at(self, at: float, event: InputEvent) -> None:
        self.steps.append(Step(at, event))


def _entry(rollout_id: str, call: Call, large_bytes: int) -> TokenEntry:
    text = "x" * large_bytes if call.large else f"turn {call.turn}"
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    ]
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call.call_id,
        model=MODEL,
        prompt_token_ids=call.prompt,
        generation_token_ids=call.generation,
        generation_log_probs=call.log_probs,
        output_items=items,
        token_item_index=0,
        created_at=round(EPOCH_S + call.made_at, 3),
        policy_version=int(call.made_at // POLICY_UPDATE_S),
        finish_reason="stop",
    )
