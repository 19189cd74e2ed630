"""Tokens by OIDC client credentials (RFC 6749, 4.4): asked of a token endpoint, kept until shortly before they expire."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import math
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import partial
from typing import IO, Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import quote_plus, urlencode, urlsplit
from urllib.request import (
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    build_opener,
)

import orjson
import structlog

from freezepoint.addresses import is_loopback, names_a_host, shown_url
from freezepoint.errors import ConfigurationError, FreezepointError, NoTokenError
from freezepoint.settings import KafkaSettings
from freezepoint.transport.kafka.bearer import TOKEN_BYTES_MAX, Bearer, read_secret

log = structlog.get_logger()

RENEW_S_MAX: Final = 60.0
RENEW_SHARE: Final = 0.2
"""How much of a token's life is left when another one is fetched, at most ``RENEW_S_MAX``."""
PAUSE_S: Final = 1.0
"""An endpoint that failed is left alone for so long: the Kafka client connects twenty times a second."""
RETRY_AFTER_S_MAX: Final = 60.0
"""And for as long as it asks for, at most this."""
HTTP_DATE_LENGTH_MAX: Final = 64
_TOO_MANY, _TIMED_OUT, _SERVER_ERRORS, _REFUSALS = 429, 408, 500, 400
_SECONDS: Final = re.compile(r"\d{1,9}")
_TUNNEL: Final = re.compile(r"Tunnel connection failed: (\d{3})")
_ERROR_CODE: Final = re.compile(r"[a-z_]{1,40}")


class _BusyError(NoTokenError):
    """The endpoint says that it has no time for us."""

    pause_s = PAUSE_S


@dataclass(frozen=True, slots=True)
class _Held:
    bearer: Bearer
    renew_at: float
    expires_at: float
    """Both by the monotonic clock."""

    @property
    def lasts(self) -> bool:
        return time.monotonic() < self.expires_at


def _retry_after_s(headers: Message) -> float:
    """For how long the endpoint wants to be left alone (RFC 9110, 10.2.3): seconds, or a date by its own clock, if it tells that.
    0 where it says nothing that can be read."""
    asked = str(headers.get("Retry-After", "")).strip()
    if _SECONDS.fullmatch(asked):
        return float(asked)
    until, now = _http_date(asked), _http_date(str(headers.get("Date", "")))
    return 0.0 if until is None else until - (time.time() if now is None else now)


def _http_date(text: str) -> float | None:
    """Seconds since the epoch, of any of the three forms that there are (RFC 9110, 5.6.7)."""
    try:
        moment = parsedate_to_datetime(text[:HTTP_DATE_LENGTH_MAX])
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


class ClientCredentials:
    """Hands out the token it has while that is fresh. However many connections ask at once, the endpoint is asked once."""

    def __init__(self, settings: KafkaSettings) -> None:
        """:raises ConfigurationError: the address or the CA file cannot be used."""
        assert settings.sasl_oauth_token_url is not None
        self.last: Bearer | None = None
        self._settings = settings
        self._url = settings.sasl_oauth_token_url
        self._timeout_s = settings.request_timeout_ms / 1000
        self._connections = _Connections()
        self._opener = _opener(settings, self._connections, is_here=_check_url(self._url))
        self._lock = asyncio.Lock()
        self._held: _Held | None = None
        self._failed: tuple[float, FreezepointError] | None = None

    async def bearer(self) -> Bearer:
        """See ``BearerSource``."""
        async with self._lock:
            held = self._held
            if held is None or time.monotonic() >= held.renew_at:
                held = await self._renewed(held)
            self.last = held.bearer
            return held.bearer

    async def _renewed(self, old: _Held | None) -> _Held:
        """A new one, or, from an endpoint that gives none, the old one for as long as it lasts: whatever is wrong may be mended
        until then."""
        try:
            self._held = await self._fetched()
        except FreezepointError:
            if old is None or not old.lasts:
                raise
            return old
        return self._held

    async def _fetched(self) -> _Held:
        if self._failed is not None and time.monotonic() < self._failed[0]:
            error = self._failed[1]
            raise type(error)(str(error))
        try:
            asked_at = time.monotonic()
            answer = await _in_thread(self._ask, self._connections.cut_off, self._timeout_s, self._where)
            held = self._held_of(answer, asked_at)
        except FreezepointError as error:
            self._failed = (time.monotonic() + getattr(error, "pause_s", PAUSE_S), error)
            if self._held is not None and self._held.lasts:
                log.warning("token_not_renewed", error=str(error))
            raise
        self._failed = None
        return held

    @property
    def _where(self) -> str:
        return f"the token endpoint {shown_url(self._url)}"

    def _ask(self) -> bytes:
        """The endpoint's answer; in a thread. No error is chained: some repeat what was sent."""
        request = Request(self._url, data=self._form(), headers=self._headers(), method="POST")  # noqa: S310 - see _check_url
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                return self._body(response)
        except HTTPError as error:
            with error:
                raise self._refused(error.code, error, error.headers) from None
        except URLError as error:
            raise self._unreached(error.reason) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._unreached(error) from None

    def _headers(self) -> dict[str, str]:
        name, secret = self._settings.sasl_oauth_client_id or "", self._secret()
        pair = f"{quote_plus(name)}:{quote_plus(secret)}".encode("ascii")
        return {
            "Accept": "application/json",
            "Authorization": f"Basic {base64.b64encode(pair).decode('ascii')}",
            "Content-Type": "application/x-www-form-urlencoded",
        }

    def _form(self) -> bytes:
        scope = self._settings.sasl_oauth_scope
        fields = {"grant_type": "client_credentials"} | ({"scope": scope} if scope else {})
        return urlencode(fields).encode("ascii")

    def _secret(self) -> str:
        """A file is read anew each time: secrets are rotated."""
        path, secret = (
            self._settings.sasl_oauth_client_secret_file,
            self._settings.sasl_oauth_client_secret,
        )
        if path is None:
            return secret.get_secret_value() if secret is not None else ""
        found = read_secret(path, f"kafka.sasl_oauth_client_secret_file {path}")
        if not found:
            raise ConfigurationError(f"kafka.sasl_oauth_client_secret_file {path} is empty")
        return found

    def _refused(self, status: int, answer: IO[bytes], headers: Message) -> FreezepointError:
        if status in (_TOO_MANY, _TIMED_OUT) or status >= _SERVER_ERRORS:
            busy = _BusyError(f"{self._where} answers with status {status}")
            busy.pause_s = min(max(PAUSE_S, _retry_after_s(headers)), RETRY_AFTER_S_MAX)
            return busy
        if status < _REFUSALS:
            return ConfigurationError(
                f"{self._where} redirects (status {status}): set kafka.sasl_oauth_token_url to where it is"
            )
        return ConfigurationError(
            f"{self._where} refused us (status {status}{self._error_code(answer)}): check kafka.sasl_oauth_token_url, "
            "kafka.sasl_oauth_client_id, kafka.sasl_oauth_client_secret or its file, and kafka.sasl_oauth_scope"
        )

    def _body(self, answer: Any) -> bytes:
        """Of an answer that comes byte by byte, what has come when nobody waits for it any more."""
        body, until = b"", time.monotonic() + self._timeout_s
        while len(body) <= TOKEN_BYTES_MAX and time.monotonic() < until:
            piece: bytes = answer.read1(TOKEN_BYTES_MAX + 1 - len(body))
            if not piece:
                break
            body += piece
        return body

    def _error_code(self, answer: IO[bytes]) -> str:
        """Of what the endpoint says only the code that RFC 6749 prescribes: anything else may repeat what was sent."""
        try:
            found = orjson.loads(self._body(answer))["error"]
        except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
            return ""
        is_code = isinstance(found, str) and _ERROR_CODE.fullmatch(found) and found != self._secret()
        return f", {found}" if is_code else ""

    def _unreached(self, reason: object) -> FreezepointError:
        kind = type(reason).__name__
        if isinstance(reason, ssl.SSLCertVerificationError):
            return ConfigurationError(
                f"TLS with {self._where} failed: {reason.verify_message}; check kafka.sasl_oauth_ca_file"
            )
        detail = reason.strerror if isinstance(reason, OSError) and reason.strerror else kind
        if tunnel := _TUNNEL.match(str(reason)):
            detail = f"the proxy that HTTPS_PROXY names answers with status {tunnel[1]}"
        return NoTokenError(f"no answer from {self._where}: {detail}")

    def _held_of(self, answer: bytes, asked_at: float) -> _Held:
        """:raises ConfigurationError: it holds no token that we could use."""
        try:
            found = orjson.loads(answer)
            bearer = Bearer.of(found["access_token"])
            kind = str(found.get("token_type", "bearer"))
        except (ValueError, KeyError, TypeError):
            raise ConfigurationError(
                f"{self._where} answers without a token: is kafka.sasl_oauth_token_url the token endpoint's address?"
            ) from None
        if kind.lower() != "bearer":
            raise ConfigurationError(f"{self._where} gives tokens of another type than bearer")
        life_s = _life_s(found.get("expires_in"), bearer)
        if bearer.expires_at is None and life_s:
            bearer = replace(bearer, expires_at=time.time() + life_s)
        margin_s = min(RENEW_S_MAX, RENEW_SHARE * life_s)
        return _Held(bearer, renew_at=asked_at + life_s - margin_s, expires_at=asked_at + life_s)


def _life_s(told: Any, bearer: Bearer) -> float:
    """By the answer and by the token itself, whichever is less: an answer may come from a cache, and the broker goes by the
    token. One of an unknown life is used once."""
    lives = [] if bearer.expires_at is None else [bearer.expires_at - time.time()]
    with contextlib.suppress(TypeError, ValueError):
        lives.append(float(told))
    return max(0.0, min((life_s for life_s in lives if math.isfinite(life_s)), default=0.0))


def _check_url(url: str) -> bool:
    """Whether it is on this machine, where alone a secret may go unencrypted.

    :raises ConfigurationError: it is no address for a secret. The message does not repeat it: there may be one in it.
    """
    setting = "kafka.sasl_oauth_token_url (FREEZEPOINT_KAFKA__SASL_OAUTH_TOKEN_URL)"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ConfigurationError(f"{setting} is no URL: write https://host/path") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigurationError(
            f"{setting} holds credentials: set kafka.sasl_oauth_client_id and kafka.sasl_oauth_client_secret"
        )
    if (
        not host
        or not names_a_host(host)
        or parts.fragment
        or not url.isascii()
        or not url.isprintable()
        or " " in url
    ):
        raise ConfigurationError(f"{setting} is no URL: write https://host/path")
    is_here = is_loopback(host)
    if parts.scheme != "https" and not (parts.scheme == "http" and is_here):
        raise ConfigurationError(
            f"{setting} must be https: a client secret is sent there (http only to this machine)"
        )
    return is_here


class _NoRedirects(HTTPRedirectHandler):
    """What follows a redirect sends the secret along."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none."""


class _Connections:
    """The connections that a request under way has made; without a proxy, one."""

    def __init__(self) -> None:
        self._made: list[http.client.HTTPConnection] = []

    def made(self, kind: type[http.client.HTTPConnection], *args: Any, **options: Any) -> Any:
        """A new one of that kind, in place of those of the request before."""
        connection = kind(*args, **options)
        self._made[:] = [connection]
        return connection

    def cut_off(self) -> None:
        """End them from outside. An endpoint that sends a byte now and then would else keep its thread for ever, and each further
        request one more. Only until the body: then the client has let go of the connection, see ``_body``."""
        for connection in self._made:
            with contextlib.suppress(OSError, AttributeError):  # not connected yet, or no more
                connection.sock.shutdown(socket.SHUT_RDWR)


class _Http(HTTPHandler):
    def __init__(self, connections: _Connections) -> None:
        super().__init__()
        self._connections = connections

    def http_open(self, request: Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connections.made, http.client.HTTPConnection), request)


class _Https(HTTPSHandler):
    def __init__(self, connections: _Connections, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._connections, self._trusts = connections, context

    def https_open(self, request: Request) -> http.client.HTTPResponse:
        kind = partial(self._connections.made, http.client.HTTPSConnection)
        return self.do_open(kind, request, context=self._trusts)


def _opener(settings: KafkaSettings, connections: _Connections, *, is_here: bool) -> OpenerDirector:
    """It goes through the proxy that the environment names, but for what is on this machine."""
    path = settings.sasl_oauth_ca_file
    try:
        context = ssl.create_default_context(cafile=path)
    except OSError as error:
        detail = error.strerror or type(error).__name__
        raise ConfigurationError(f"kafka.sasl_oauth_ca_file {path} cannot be used: {detail}") from None
    proxies = ProxyHandler({} if is_here else None)
    return build_opener(proxies, _Http(connections), _Https(connections, context), _NoRedirects())


async def _in_thread(
    work: Callable[[], bytes], cut_off: Callable[[], None], timeout_s: float, where: str
) -> bytes:
    """In a daemon thread: the loop's own threads would hold a leaving worker back until an endpoint that is stuck answers.

    :raises NoTokenError: it took too long.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bytes] = loop.create_future()

    def settle(answer: bytes | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(answer or b"")

    def run() -> None:
        answer, failure = None, None
        try:
            answer = work()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            failure = error
        try:
            loop.call_soon_threadsafe(settle, answer, failure)
        except RuntimeError:
            return  # the loop has ended meanwhile

    threading.Thread(target=run, name="token-endpoint", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            return await done
    except TimeoutError:
        cut_off()
        raise NoTokenError(f"no answer from {where} within {timeout_s:g} s") from None
    except asyncio.CancelledError:
        cut_off()
        raise
