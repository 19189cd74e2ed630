"""Announced calls: one call id a line, with ``-`` before it where the announcement was withdrawn (NeMo Gym's form).

Ids that this form cannot hold are written as JSON strings.
"""

from __future__ import annotations

import re

import orjson

from freezepoint.store.files import INTENTS, RolloutFiles

_PLAIN = re.compile(r"[^\s\x00-\x1f\"-][^\s\x00-\x1f]*")


def intent_line(model_call_id: str, *, withdrawn: bool = False) -> bytes:
    name = model_call_id.encode() if _PLAIN.fullmatch(model_call_id) else orjson.dumps(model_call_id)
    return b"-" + name if withdrawn else name


def announced_calls(files: RolloutFiles) -> frozenset[str]:
    """The calls that were announced and not withdrawn since. A line torn by a crash counts: masking is the safe side."""
    try:
        lines = files.path(INTENTS).read_bytes().split(b"\n")
    except FileNotFoundError:
        return frozenset()
    announced: set[str] = set()
    for line in map(bytes.strip, lines):
        if line.startswith(b"-"):
            announced.discard(_name(line[1:]))
        elif line:
            announced.add(_name(line))
    return frozenset(announced)


def _name(raw: bytes) -> str:
    if raw.startswith(b'"'):
        try:
            return str(orjson.loads(raw))
        except orjson.JSONDecodeError:
            pass
    return raw.decode("utf-8", "replace")
