"""A response body as it passes by: what is needed of it is kept, within a limit, and becomes the call's entry."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import orjson

from freezepoint.capture.arrays import Body
from freezepoint.capture.entries import entry_from_response
from freezepoint.capture.streams import StreamAssembler
from freezepoint.errors import CaptureError
from freezepoint_schemas.events import TokenEntry

READABLE_CODINGS = ("identity", "gzip", "deflate")
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class Recording(Protocol):
    """What :func:`recording` returns."""

    ended: bool
    """The last event has passed: what may still follow is nothing."""

    @property
    def whole(self) -> bool:
        """Whether the server has said all of the generation, though the response may not have come to its end."""
        ...

    def feed(self, piece: bytes) -> None:
        """Take the next bytes. :raises CaptureError: they cannot be used."""
        ...

    def entry(self, **known: Any) -> TokenEntry:
        """The call's entry. :raises CaptureError: there is none in what has passed."""
        ...


def recording(content_type: str, content_encoding: str, bytes_max: int) -> Recording:
    """A recording for a response with these headers. :raises CaptureError: its coding cannot be read here."""
    plain = Plain(content_encoding, bytes_max)
    return StreamRecording(plain) if content_type.startswith("text/event-stream") else BodyRecording(plain)


class Plain:
    """The body's own bytes, counted and without their content coding."""

    def __init__(self, coding: str, bytes_max: int) -> None:
        coding = coding.strip().lower() or "identity"
        if coding != "identity" and coding not in _WINDOW_BITS:
            raise CaptureError(f"the response is encoded as {coding}, which cannot be read here")
        self._inflate = zlib.decompressobj(_WINDOW_BITS[coding]) if coding in _WINDOW_BITS else None
        self._left = bytes_max
        self._bytes_max = bytes_max

    def bytes(self, piece: bytes) -> bytes:
        """:raises CaptureError: too many, or no such coding after all."""
        if self._inflate is not None and piece:
            try:
                piece = self._inflate.decompress(piece, self._left + 1)
            except zlib.error as error:
                raise CaptureError(f"the response's content coding is broken: {error}") from None
        self._left -= len(piece)
        if self._left < 0:
            raise CaptureError(f"the response is larger than body_bytes_max ({self._bytes_max} bytes)")
        return piece


class BodyRecording:
    """A response in one piece."""

    def __init__(self, plain: Plain) -> None:
        self.ended = False
        self._plain = plain
        self._pieces: list[bytes] = []

    @property
    def whole(self) -> bool:
        return False

    def feed(self, piece: bytes) -> None:
        self._pieces.append(self._plain.bytes(piece))

    def entry(self, **known: Any) -> TokenEntry:
        return entry_from_response(b"".join(self._pieces), **known)


class StreamRecording:
    """Server-sent events, put together as they come."""

    def __init__(self, plain: Plain) -> None:
        self.ended = False
        self._plain = plain
        self._events = EventReader()
        self._assembler = StreamAssembler()

    @property
    def whole(self) -> bool:
        return self._assembler.ended

    def feed(self, piece: bytes) -> None:
        for body in self._events.feed(self._plain.bytes(piece)):
            self._assembler.add(body)
        self.ended = self._events.done or self._assembler.final

    def entry(self, **known: Any) -> TokenEntry:
        return entry_from_response(self._assembler.response(), **known)


class EventReader:
    """Server-sent events out of bytes as they come. ``done``: ``[DONE]`` was read."""

    def __init__(self) -> None:
        self.done = False
        self._rest: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[Body]:
        """The objects of the events that this piece completes.

        :raises CaptureError: an event's data is no JSON object.
        """
        if b"\n" not in piece:
            self._rest.append(piece)
            return
        *lines, rest = b"".join((*self._rest, piece)).split(b"\n")
        self._rest = [rest]
        for raw in lines:
            line = raw.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                if data.strip() == b"[DONE]":
                    self.done = True
                else:
                    yield _object(data)


def _object(data: bytes) -> Body:
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CaptureError(f"an event of the stream is no JSON: {error.msg}") from None
    if not isinstance(body, Mapping):
        raise CaptureError("an event of the stream is no object")
    return body
