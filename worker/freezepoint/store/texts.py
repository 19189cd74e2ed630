"""Writing a conversation's prompts as JSON without writing its history again.

Each call's prompt begins with the one before it, and a line holds all of it. The text of a rollout's last prompt is known by
the digest of its tokens, so that only what follows is written anew.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import orjson
import xxhash

from freezepoint_schemas.arrays import TokenArray

TOKENS_MIN = 2_048
"""Shorter prompts are written as they are."""
TEXT_BYTES_MAX = 64 * 1024 * 1024
"""What is remembered of all rollouts; those used longest ago go first."""


class _Known(NamedTuple):
    """A prompt that was written: how many tokens, their xxh3-128, and their JSON array."""

    length: int
    digest: bytes
    text: bytes


_NOTHING = _Known(0, b"", b"")


class PromptTexts:
    """The last prompt of each rollout. Forgetting one, or mixing up whose it is, changes nothing but the time that writing
    takes: the digest says which tokens a text stands for."""

    def __init__(self, bytes_max: int = TEXT_BYTES_MAX) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, rollout_id: str, prompt: TokenArray) -> orjson.Fragment | None:
        """The prompt (int32 [n], contiguous) as a JSON array; None for one that is to be written as it is."""
        if prompt.size < TOKENS_MIN or prompt.dtype != np.int32 or not prompt.flags.c_contiguous:
            return None
        known = self._known.get(rollout_id, _NOTHING)
        hasher = xxhash.xxh3_128(prompt[: known.length].data)
        if known.length and known.length <= prompt.size and hasher.digest() == known.digest:
            text = _longer(known.text, prompt[known.length :])
        else:
            text = _text(prompt)
        hasher.update(prompt[known.length :].data)
        self._note(rollout_id, _Known(prompt.size, hasher.digest(), text))
        return orjson.Fragment(text)

    def _note(self, rollout_id: str, prompt: _Known) -> None:
        with self._lock:
            self._drop(rollout_id)
            self._known[rollout_id] = prompt
            self.bytes += len(prompt.text)
            while self.bytes > self._bytes_max:
                self._drop(next(iter(self._known)))

    def forget(self, rollout_id: str) -> None:
        with self._lock:
            self._drop(rollout_id)

    def _drop(self, rollout_id: str) -> None:
        known = self._known.pop(rollout_id, None)
        if known is not None:
            self.bytes -= len(known.text)

    def clear(self) -> None:
        with self._lock:
            self._known.clear()
            self.bytes = 0


def _longer(text: bytes, more: TokenArray) -> bytes:
    """A JSON array that is not empty, and more tokens behind it."""
    return b"".join((memoryview(text)[:-1], b",", memoryview(_text(more))[1:])) if more.size else text


def _text(tokens: TokenArray) -> bytes:
    return orjson.dumps(tokens, option=orjson.OPT_SERIALIZE_NUMPY)
