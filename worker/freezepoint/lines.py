"""Files of events, one JSON object a line: plain, gzipped or from standard input."""

from __future__ import annotations

import gzip
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import orjson

from freezepoint.errors import InputError
from freezepoint_schemas.topics import is_rollout_id

STDIN = "-"
POSITION_LINES = 50
"""How often a reader's position is told."""
_NAMED = re.compile(rb'"rollout_id"\s*:\s*"([A-Za-z0-9._-]{1,255})"')
_GZIP_MAGIC = b"\x1f\x8b"


class LineError(InputError):
    """A line of a file is nothing that can be used; the message begins with ``file:line``."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its line break. ``source`` and ``number`` (from 1) say where it stands."""

    source: str
    number: int
    raw: bytes

    @property
    def where(self) -> str:
        return f"{self.source}:{self.number}"

    def body(self) -> dict[str, Any]:
        """:raises LineError: no JSON object."""
        try:
            body = orjson.loads(self.raw)
        except orjson.JSONDecodeError as error:
            raise LineError(f"{self.where}: no JSON: {error.msg}") from None
        if not isinstance(body, dict):
            raise LineError(f"{self.where}: a JSON {type(body).__name__}, not an object")
        return body

    def damaged_rollout(self) -> str | None:
        """The rollout that a damaged line seems to belong to, by what can still be read of it."""
        found = _NAMED.search(self.raw)
        return found[1].decode("ascii") if found and is_rollout_id(found[1].decode("ascii")) else None

    def rollout_id(self, body: dict[str, Any], default: str | None = None) -> str:
        """The rollout that the line belongs to; ``default`` where it names none.

        :raises LineError: none, or no valid one.
        """
        rollout_id = body.get("rollout_id", default)
        if rollout_id is None:
            raise LineError(f"{self.where}: no rollout_id")
        if not isinstance(rollout_id, str) or not is_rollout_id(rollout_id):
            raise LineError(f"{self.where}: {repr(rollout_id)[:80]} is no valid rollout_id")
        return rollout_id


@dataclass(frozen=True, slots=True)
class Source:
    """A file of lines. Without ``path`` it is standard input, which can be read once."""

    name: str
    path: Path | None

    @property
    def size_bytes(self) -> int:
        """How large the file itself is; 0 where that is unknown."""
        return 0 if self.path is None else self.path.stat().st_size

    def lines(self, on_position: Callable[[int], None] | None = None) -> Iterator[Line]:
        """Its lines but the blank ones. ``on_position`` hears how many bytes of the file itself have been read.

        :raises InputError: it is damaged (gzip).
        """
        with self._opened() as raw:
            stream = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == _GZIP_MAGIC else raw
            try:
                for number, line in enumerate(stream, start=1):
                    if on_position is not None and self.path is not None and number % POSITION_LINES == 0:
                        on_position(raw.tell())
                    if stripped := line.strip():
                        yield Line(self.name, number, stripped)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise InputError(f"{self.name}: damaged gzip file: {error}") from None

    @contextmanager
    def _opened(self) -> Iterator[BufferedReader]:
        if self.path is None:
            yield sys.stdin.buffer  # type: ignore[misc]  # a BufferedReader, typed by its base class
            return
        with self.path.open("rb") as raw:
            yield raw


@contextmanager
def sources(names: Sequence[str], *, again: bool = False) -> Iterator[list[Source]]:
    """The files of these names; ``-`` is standard input.

    :param again: they are to be read more than once: standard input is copied to a temporary file.
    :raises OSError: one of them cannot be opened; checked before anything is read.
    """
    with ExitStack() as stack:
        yield [_source(name, stack, again=again) for name in names]


def _source(name: str, stack: ExitStack, *, again: bool) -> Source:
    if name != STDIN:
        path = Path(name)
        with path.open("rb"):
            pass
        return Source(name, path)
    if not again:
        return Source("<stdin>", None)
    spool = stack.enter_context(tempfile.NamedTemporaryFile(prefix="freezepoint-"))  # noqa: SIM115 - the stack does
    shutil.copyfileobj(sys.stdin.buffer, spool)
    spool.flush()
    return Source("<stdin>", Path(spool.name))
