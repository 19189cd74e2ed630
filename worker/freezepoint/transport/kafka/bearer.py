"""Tokens for SASL OAUTHBEARER, and the file they may come from. What is in a token is for the broker to judge; we read of it
only what saves a hopeless attempt (its expiry) or helps a person (its subject)."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import orjson
from aiokafka.abc import AbstractTokenProvider
from aiokafka.errors import KafkaConnectionError

from freezepoint.errors import ConfigurationError, FreezepointError, NoTokenError

TOKEN_BYTES_MAX: Final = 64 * 1024
_B64TOKEN: Final = re.compile(r"[A-Za-z0-9\-._~+/]+=*")
"""RFC 6750: nothing that could end the field it is sent in."""
_SUBJECT: Final = re.compile(r"[A-Za-z0-9._@:/+-]{1,200}")


@dataclass(frozen=True, slots=True)
class Bearer:
    """A token. ``expires_at``, in seconds since 1970, and ``subject`` where it is a JWT that says so."""

    value: str = field(repr=False)
    expires_at: float | None = None
    subject: str | None = None

    @classmethod
    def of(cls, value: str) -> Bearer:
        """:raises ValueError: it is no token; the message does not repeat it."""
        if not _B64TOKEN.fullmatch(value):
            raise ValueError("holds characters that no token has")
        claims = _claims(value)
        expires_at, subject = claims.get("exp"), claims.get("sub")
        return cls(
            value,
            float(expires_at) if isinstance(expires_at, int | float) else None,
            subject if isinstance(subject, str) and _SUBJECT.fullmatch(subject) else None,
        )


def _claims(token: str) -> dict[str, Any]:
    """Of a JWT, unverified; empty for an opaque token."""
    parts = token.split(".")
    if len(parts) != 3:  # noqa: PLR2004 - header, claims, signature
        return {}
    try:
        found = orjson.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, binascii.Error):
        return {}
    return found if isinstance(found, dict) else {}


class BearerSource(Protocol):
    """Where tokens come from; ``last`` is the one handed out last."""

    last: Bearer | None

    async def bearer(self) -> Bearer:
        """A token to connect with now.

        :raises ConfigurationError: there will be none until somebody mends something.
        :raises NoTokenError: there is none now.
        """


class BearerFile:
    """A file that a platform keeps fresh, such as a projected service account token: read anew for each connection."""

    def __init__(self, path: Path) -> None:
        self.last: Bearer | None = None
        self._path = path

    async def bearer(self) -> Bearer:
        """See :class:`BearerSource`. An expired token is waited out: whoever writes the file is late, not wrong."""
        where = f"kafka.sasl_oauth_token_file {self._path}"
        text = read_secret(self._path, where)
        if not text:
            raise NoTokenError(f"{where} is empty: waiting for whoever writes it")
        try:
            found = Bearer.of(text)
        except ValueError as error:
            raise ConfigurationError(f"{where} is no token: it {error}") from None
        if found.expires_at is not None and found.expires_at <= time.time():
            late_s = time.time() - found.expires_at
            raise NoTokenError(
                f"the token in {where} expired {late_s:.0f} s ago: waiting for whoever writes it"
            )
        self.last = found
        return found


def read_secret(path: Path, where: str) -> str:
    """A file's text without the white space around it. :raises ConfigurationError: it cannot be read.

    A pipe is refused: it may be waited for without end, here on the event loop, and holds its text but once.
    """
    try:
        with open(path, "rb", opener=_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigurationError(f"{where} is no regular file")
            content = file.read(TOKEN_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigurationError(f"{where} cannot be read: {error.strerror}") from None
    if len(content) > TOKEN_BYTES_MAX:
        raise ConfigurationError(f"{where} is larger than {TOKEN_BYTES_MAX} bytes")
    try:
        return content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{where} is not plain ASCII") from None


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


class BearerProvider(AbstractTokenProvider):  # type: ignore[misc] # the client is untyped
    """A source as the client wants it: asked once a connection. What it raises the client takes for a connection that failed,
    and tries again."""

    def __init__(self, source: BearerSource) -> None:
        self.source = source

    async def token(self) -> str:
        """:raises KafkaConnectionError: there is none; the message says why."""
        try:
            return (await self.source.bearer()).value
        except FreezepointError as error:
            raise KafkaConnectionError(str(error)) from None
