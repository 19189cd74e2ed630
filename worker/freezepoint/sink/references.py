"""Which acknowledged call a prompt may refer to: the sink's memory of its own recent calls, bounded in bytes.

A line is one sequence of tokens and the calls that end on it, each after the one before: a conversation as long as
nobody forks it. A call that continues a line's last one makes the line longer, so a rollout costs the memory of its
tokens once, not once a call; a fork starts a line of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import xxhash

from freezepoint_schemas.arrays import TokenArray
from freezepoint_schemas.events import PromptPrefix

CALL_BYTES = 1024
"""What a call costs beside its tokens: mostly its hasher."""
ROLLOUT_BYTES = 512
_WIRE_TOKENS = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Call:
    """An acknowledged call; its prompt plus generation are the first ``length`` tokens of its line.

    ``hasher`` has read them, so that a call that continues this one hashes only what it adds.
    """

    call_id: str
    number: int
    length: int
    hasher: xxhash.xxh3_128


@dataclass(slots=True)
class Line:
    """Tokens, and the calls that end on them, shortest first."""

    tokens: TokenArray
    calls: list[Call]

    @property
    def bytes(self) -> int:
        return self.tokens.nbytes + CALL_BYTES * len(self.calls)

    @property
    def newest(self) -> int:
        return max(call.number for call in self.calls)

    def shared_with(self, prompt: TokenArray) -> int:
        """How many first tokens the prompt has in common with this line."""
        length = min(prompt.size, self.tokens.size)
        differs = prompt[:length] != self.tokens[:length]
        first = int(differs.argmax()) if length else 0
        return first if length and differs[first] else length


@dataclass(frozen=True, slots=True)
class Continued:
    """What a prompt continues: the call, and the line it ends on."""

    call: Call
    line: Line

    @property
    def prefix(self) -> PromptPrefix:
        return PromptPrefix(
            call_id=self.call.call_id, length=self.call.length, digest=self.call.hasher.hexdigest()
        )


@dataclass(slots=True, eq=False)
class RolloutCalls:
    """One rollout's acknowledged calls, since it was last cleared or forgotten."""

    lines: list[Line] = field(default_factory=list)
    numbers: int = 0

    @property
    def bytes(self) -> int:
        return ROLLOUT_BYTES + sum(line.bytes for line in self.lines)

    def continued(self, prompt: TokenArray, call_id: str) -> Continued | None:
        """The newest call, another than ``call_id``, whose whole prompt plus generation begins this prompt."""
        best: Continued | None = None
        for line in self.lines:
            shared = line.shared_with(prompt)
            for call in line.calls:
                if call.length > shared:
                    break
                if call.call_id != call_id and (best is None or call.number > best.call.number):
                    best = Continued(call, line)
        return best

    def add(self, call_id: str, prompt: TokenArray, generation: TokenArray) -> None:
        """Remember an acknowledged call. A repeat is none: what the worker keeps is the first of an id."""
        if any(call.call_id == call_id for call in self._calls()):
            return
        tokens = np.concatenate([prompt, generation]).astype(_WIRE_TOKENS, copy=False)
        continued = self.continued(prompt, call_id)
        call = Call(call_id, self.numbers, tokens.size, _digest_from(continued, tokens))
        self.numbers += 1
        if continued is not None and continued.call is continued.line.calls[-1]:
            continued.line.tokens = tokens
            continued.line.calls.append(call)
        else:
            self.lines.append(Line(tokens, [call]))

    def _calls(self) -> Iterator[Call]:
        return (call for line in self.lines for call in line.calls)

    def shrink(self, bytes_max: int) -> None:
        """Forget the lines that were used longest ago."""
        self.lines.sort(key=lambda line: line.newest)
        while self.lines and self.bytes > bytes_max:
            del self.lines[0]


def _digest_from(continued: Continued | None, tokens: TokenArray) -> xxhash.xxh3_128:
    """A hasher that has read the tokens, going on from the call they continue."""
    if continued is None:
        return xxhash.xxh3_128(tokens.data)
    hasher = continued.call.hasher.copy()
    hasher.update(tokens[continued.call.length :].data)
    return hasher


class References:
    """The rollouts used last, within a limit of bytes. Whoever puts a call asks for its rollout first and gives it back
    with the acknowledged call: what was cleared or forgotten in between takes no call any more."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max
        self._rollouts: OrderedDict[str, RolloutCalls] = OrderedDict()

    def rollout(self, rollout_id: str) -> RolloutCalls:
        """The rollout's calls, now the last ones used."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            rollout = self._rollouts[rollout_id] = RolloutCalls()
            self.bytes += rollout.bytes
            self._evict(rollout_id)
        self._rollouts.move_to_end(rollout_id)
        return rollout

    def add(
        self, rollout_id: str, rollout: RolloutCalls, call_id: str, prompt: TokenArray, generation: TokenArray
    ) -> None:
        """Remember an acknowledged call, unless its rollout was forgotten since ``rollout`` was asked for."""
        if self._rollouts.get(rollout_id) is not rollout:
            return
        self.bytes -= rollout.bytes
        rollout.add(call_id, prompt, generation)
        rollout.shrink(self._bytes_max)
        self.bytes += rollout.bytes
        self._evict(rollout_id)

    def forget(self, rollout_id: str) -> None:
        rollout = self._rollouts.pop(rollout_id, None)
        if rollout is not None:
            self.bytes -= rollout.bytes

    def _evict(self, kept: str) -> None:
        """Forget the rollouts that were used longest ago; the one in use stays."""
        while self.bytes > self._bytes_max:
            oldest = next((name for name in self._rollouts if name != kept), None)
            if oldest is None:
                return
            self.forget(oldest)
