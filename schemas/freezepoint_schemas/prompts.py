"""Reading a conversation's JSON without reading its history again.

Where prompts are sent whole, each call repeats the prompt before it: a hundred calls of one rollout are mostly the same
numbers, a hundred times. What was read of one prompt is known by the digest of its text, and of a prompt that begins with
the same text only the rest is read. The tokens of all of them lie in one buffer, as views of different lengths, so that a
conversation takes the memory of its longest prompt.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import orjson
import xxhash

from freezepoint_schemas import arrays
from freezepoint_schemas.arrays import TokenArray
from freezepoint_schemas.errors import ArrayError

FIELD = "prompt_token_ids"
TEXT_BYTES_MIN = 2_048
"""Shorter prompts are read as they are: looking for what is known would cost as much."""
KNOWN_MAX = 3
"""Prompts remembered of one rollout, the newest ones: agents that take turns under one id each go on from their own."""

_NAME = b'"' + FIELD.encode() + b'"'
_OPENS = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*\[")
_MARK = f"prompt:{secrets.token_hex(16)}"
"""Stands for the array while the rest is parsed. Nobody can know it, so that where it comes out is where the array was."""
_MARK_JSON = orjson.dumps(_MARK)
_COMMA = ord(",")


@dataclass(slots=True, eq=False)
class _Buffer:
    """Room for a prompt to grow. What lies below ``used`` is in somebody's hands and never changes."""

    tokens: TokenArray
    used: int

    @classmethod
    def of(cls, tokens: TokenArray, more: int) -> Self:
        """A new one that begins with these tokens and has room for more."""
        array = np.empty((tokens.size + more) * 3 // 2, np.int32)
        array[: tokens.size] = tokens
        return cls(array, tokens.size)

    def extended(self, tokens: TokenArray) -> TokenArray:
        """All that is used, and these tokens behind it."""
        start, self.used = self.used, self.used + tokens.size
        self.tokens[start : self.used] = tokens
        return arrays.frozen(self.tokens[: self.used])

    def goes_on_from(self, tokens: TokenArray, more: int) -> bool:
        """Whether nothing follows these tokens yet, and there is room for more."""
        return self.used == tokens.size and self.used + more <= self.tokens.size


class _Known(NamedTuple):
    """A prompt that was read: length and xxh3-128 of its text between the brackets, its tokens, and the buffer they lie in."""

    length: int
    digest: bytes
    tokens: TokenArray
    buffer: _Buffer | None


@dataclass(slots=True)
class KnownPrompts:
    """The last prompts of one rollout. Forgetting them, or any of them, changes nothing but the time that reading takes.

    They are arrays that the entries hold too, as long as these are in memory.
    """

    _known: list[_Known] = field(default_factory=list)
    """The newest last."""

    def forget(self) -> None:
        """Let go of the arrays."""
        self._known.clear()

    def loads(self, value: bytes) -> Any:
        """What ``orjson.loads`` gives, but for long prompts: valid token ids are there as the array they become (int32 [n],
        read-only).

        :raises orjson.JSONDecodeError: no JSON.
        """
        named = value.find(_NAME)
        opened = _OPENS.match(value, named + len(_NAME)) if named >= 0 else None
        if opened is None or len(value) - opened.end() < TEXT_BYTES_MIN:
            return orjson.loads(value)
        start = opened.end()
        known, hasher = self._longest(value, start)
        read = start + (known.length if known else 0)
        stop = value.find(b"]", read)
        if stop - start < TEXT_BYTES_MIN:
            return orjson.loads(value)
        try:
            body = orjson.loads(value[: start - 1] + _MARK_JSON + value[stop + 1 :])
            if not isinstance(body, dict) or body.get(FIELD) != _MARK:
                return orjson.loads(value)  # another field of that name, or one that is overruled
            tokens, buffer = _tokens(known, value[read:stop])
        except (orjson.JSONDecodeError, ArrayError):
            return orjson.loads(value)  # what is wrong with it shows there, or to whoever takes the field
        hasher.update(memoryview(value)[read:stop])
        self._note(_Known(stop - start, hasher.digest(), tokens, buffer))
        body[FIELD] = tokens
        return body

    def _longest(self, value: bytes, start: int) -> tuple[_Known | None, xxhash.xxh3_128]:
        """The longest known prompt with which the text from ``start`` on begins, and the hash up to its end."""
        longest: tuple[_Known | None, xxhash.xxh3_128] = None, xxhash.xxh3_128()
        hasher, hashed = xxhash.xxh3_128(), 0
        for known in sorted(self._known, key=_length):
            end = start + known.length
            if end < len(value) and value[end] == _COMMA:
                hasher.update(memoryview(value)[start + hashed : end])
                hashed = known.length
                if hasher.digest() == known.digest:
                    longest = known, hasher.copy()
        return longest

    def _note(self, prompt: _Known) -> None:
        others = [known for known in self._known if known.digest != prompt.digest]
        self._known = [*others[max(0, len(others) + 1 - KNOWN_MAX) :], prompt]


def _length(known: _Known) -> int:
    return known.length


def _tokens(known: _Known | None, rest: bytes) -> tuple[TokenArray, _Buffer | None]:
    """The tokens of a text that begins with a known one; ``rest`` is what follows that, from the comma on.

    :raises orjson.JSONDecodeError: no list follows, or nothing.
    :raises ArrayError: not of token ids.
    """
    tokens = arrays.token_ids(orjson.loads(b"[%b]" % (rest if known is None else rest[1:])))
    if known is None:
        return tokens, None
    if not tokens.size:
        raise ArrayError("nothing follows the comma")
    buffer = known.buffer
    if buffer is None or not buffer.goes_on_from(known.tokens, tokens.size):
        buffer = _Buffer.of(known.tokens, tokens.size)
    return buffer.extended(tokens), buffer
