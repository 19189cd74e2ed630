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

from freezepoint.core.digests import form_hasher
from freezepoint_schemas.arrays import TokenArray
from freezepoint_schemas.events import TokenEntry

TOKENS_MIN = 2_048
"""Shorter prompts are written as they are."""
TEXT_BYTES_MAX = 64 * 1024 * 1024
"""What is remembered of all rollouts; those used longest ago go first."""
PIECES_MAX = 64
"""Then they become one: a system call takes a thousand, but no more."""


_WIRE_TOKENS = np.dtype("<i4")


class _Known(NamedTuple):
    """A prompt that was written: how many tokens, its ``prompt_form``, and its JSON array in pieces, but for the closing
    bracket, with how many bytes these are."""

    length: int
    form: bytes
    pieces: tuple[bytes, ...]
    bytes: int


class Written(NamedTuple):
    """A prompt's JSON array, in pieces that nobody copies, and its ``prompt_form``, as far as they are at hand."""

    array: tuple[bytes, ...] | None
    form: bytes | None


_NOTHING = _Known(0, b"", (), 0)


class PromptTexts:
    """The last prompt of each rollout. Forgetting one, or mixing up whose it is, changes nothing but the time that writing
    takes: the digest says which tokens a text stands for."""

    def __init__(self, bytes_max: int = TEXT_BYTES_MAX) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, entry: TokenEntry) -> Written:
        """An entry's prompt. One that is short, by reference or an unusual array is left to be written as it is."""
        prompt = entry.prompt_token_ids
        is_usual = prompt.dtype == _WIRE_TOKENS and prompt.flags.c_contiguous
        if prompt.size < TOKENS_MIN or entry.prompt_prefix is not None or not is_usual:
            return Written(None, None)
        known = self._known.get(entry.rollout_id, _NOTHING)
        hasher = form_hasher(None)
        hasher.update(prompt[: known.length].data)
        rest = prompt[known.length :]
        if known.length and known.length <= prompt.size and hasher.digest() == known.form:
            pieces, size = _longer(known, rest)
        else:
            pieces = (_text(prompt)[:-1],)
            size = len(pieces[0])
        hasher.update(rest.data)
        form = hasher.digest()
        self._note(entry.rollout_id, _Known(prompt.size, form, pieces, size))
        return Written((*pieces, b"]"), form)

    def _note(self, rollout_id: str, prompt: _Known) -> None:
        with self._lock:
            self._drop(rollout_id)
            self._known[rollout_id] = prompt
            self.bytes += prompt.bytes
            while self.bytes > self._bytes_max:
                self._drop(next(iter(self._known)))

    def forget(self, rollout_id: str) -> None:
        with self._lock:
            self._drop(rollout_id)

    def _drop(self, rollout_id: str) -> None:
        known = self._known.pop(rollout_id, None)
        if known is not None:
            self.bytes -= known.bytes

    def clear(self) -> None:
        with self._lock:
            self._known.clear()
            self.bytes = 0


def _longer(known: _Known, more: TokenArray) -> tuple[tuple[bytes, ...], int]:
    """The pieces of an open array that is not empty, and more tokens behind it; and how many bytes they are."""
    if not more.size:
        return known.pieces, known.bytes
    pieces = known.pieces if len(known.pieces) < PIECES_MAX else (b"".join(known.pieces),)
    text = b"," + _text(more)[1:-1]
    return (*pieces, text), known.bytes + len(text)


def _text(tokens: TokenArray) -> bytes:
    return orjson.dumps(tokens, option=orjson.OPT_SERIALIZE_NUMPY)
