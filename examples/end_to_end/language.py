"""A toy language: bytes are tokens, a few more numbers are what chat templates call special tokens.

What was generated is rendered again to the same tokens, so that every prompt of a conversation begins with what came
before it, as good templates see to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SYSTEM, USER, ASSISTANT, TOOL, CALL, ARGUMENTS, END = range(256, 263)
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


def prompt_of(messages: Iterable[dict[str, Any]]) -> list[int]:
    """The tokens of a conversation, up to where the assistant goes on."""
    tokens: list[int] = []
    for message in messages:
        tokens += [ROLES[message["role"]], *(message.get("content") or "").encode()]
        for call in message.get("tool_calls") or []:
            function = call["function"]
            tokens += [CALL, *function["name"].encode(), ARGUMENTS, *function["arguments"].encode()]
        tokens.append(END)
    return [*tokens, ASSISTANT]


@dataclass(frozen=True)
class Sample:
    """What the model generated for a prompt: these very tokens are what a trainer must get."""

    prompt: list[int]
    generation: list[int]
    log_probs: list[float]

    @property
    def text(self) -> str:
        end = next(index for index, token in enumerate(self.generation) if token in (CALL, END))
        return bytes(self.generation[:end]).decode()

    @property
    def tool_call(self) -> tuple[str, str] | None:
        """Name and arguments of the function it calls."""
        if CALL not in self.generation:
            return None
        call, arguments = self.generation.index(CALL), self.generation.index(ARGUMENTS)
        return bytes(self.generation[call + 1 : arguments]).decode(), bytes(
            self.generation[arguments + 1 : -1]
        ).decode()


def sample(prompt: list[int], seed: int) -> Sample:
    """A generation that prompt and seed decide: a thought, and mostly a call of the tool ``lookup``."""
    digest = hashlib.sha256(repr((prompt, seed)).encode()).digest()
    generation = [*f"thought {digest[:4].hex()}".encode()]
    if digest[4] % 4:
        generation += [CALL, *b"lookup", ARGUMENTS, *f'{{"key": "{digest[5:8].hex()}"}}'.encode()]
    generation.append(END)
    log_probs = [
        -((token * 31 + position * 17 + digest[8]) % 997) / 131 for position, token in enumerate(generation)
    ]
    return Sample(prompt, generation, log_probs)
