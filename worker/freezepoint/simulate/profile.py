"""What to simulate."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from freezepoint_schemas.topics import is_rollout_id

Probability = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
ROLLOUTS_MAX = 100_000_000


class Profile(BaseModel):
    """What to simulate. Ranges are inclusive; probabilities say of what they are.

    ``concurrency``: rollouts open at once. ``group_size``: rollouts of one task. ``large_bytes``: payload of a large
    call, above what a broker takes in one record by default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rollouts: Annotated[int, Field(ge=0, le=ROLLOUTS_MAX)] = 100
    turns: tuple[Count, Count] = (2, 8)
    seed: Annotated[int, Field(ge=0)] = 0
    run: str = "sim"
    concurrency: Count = 16
    group_size: Count = 4
    prompt_tokens: tuple[Count, Count] = (50, 300)
    generation_tokens: tuple[Count, Count] = (10, 120)
    tool_tokens: tuple[Count, Count] = (10, 200)
    large_bytes: Count = 1_500_000
    retry: Probability = 0.05
    """Of a turn: sampled twice with one prompt, one of both continued."""
    empty: Probability = 0.02
    """Of a turn: a call that generated nothing, and was asked again."""
    withdrawn: Probability = 0.02
    """Of a turn: a call announced and cancelled before it generated."""
    large: Probability = 0.0
    """Of a call: its record exceeds what a broker takes in one."""
    unresolved: Probability = 0.05
    """Of a rollout: the last turn sampled twice, and nothing tells which one was kept."""
    subagent: Probability = 0.05
    """Of a rollout: a sub-agent with its own root runs beside the main one."""
    fork: Probability = 0.02
    """Of a rollout: a second line of work goes on from one of its turns."""
    compaction: Probability = 0.05
    """Of a rollout: the context is summarised, which starts a new root."""
    lost: Probability = 0.05
    """Of a rollout: one call was made whose record never comes."""
    no_records: Probability = 0.01
    """Of a rollout: completed without any record."""
    cancelled: Probability = 0.02
    """Of a rollout: given up half-way."""
    intents: Probability = 0.5
    """Of a rollout: its calls are announced before they are made."""
    counted: Probability = 0.5
    """Of a rollout: its complete event carries the number of calls made."""
    duplicate: Probability = 0.02
    """Of a record: it comes twice."""

    @model_validator(mode="after")
    def _check(self) -> Profile:
        for name in ("turns", "prompt_tokens", "generation_tokens", "tool_tokens"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name}: {low} is above {high}")
        if not is_rollout_id(f"{self.run}.{ROLLOUTS_MAX}-{ROLLOUTS_MAX}"):
            raise ValueError(
                "run must begin with a letter or digit and hold letters, digits, '.', '_' and '-' only"
            )
        return self
