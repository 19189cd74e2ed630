"""What an orchestrator, a scraper and people ask a worker: ``/livez``, ``/readyz``, ``/metrics``, ``/status`` and ``/``. Reading
only.

A few lines of HTTP on asyncio, because the answers are about this very event loop: when it stands still, nothing answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

import orjson
import structlog

from freezepoint.addresses import is_loopback
from freezepoint.errors import ConfigurationError
from freezepoint.settings import HttpSettings
from freezepoint.status import PAGE, POLICY, alive, ready, status
from freezepoint.telemetry.metrics import exposition
from freezepoint.worker import Worker

log = structlog.get_logger()

REQUEST_BYTES_MAX: Final = 16 * 1024
REQUEST_S_MAX: Final = 5.0
"""For a request, its answer, and until the answer was taken."""
CONNECTIONS_MAX: Final = 64
"""Beyond it the oldest one is cut off, so that whoever is quick is answered however many are slow: else they would cost the
worker its probes, and the files that it may open."""
TEXT: Final = "text/plain; charset=utf-8"
NOTHING_ELSE: Final = "default-src 'none'; frame-ancestors 'none'"
"""The policy of what is no page."""

_HEADERS: Final = (
    "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\nReferrer-Policy: no-referrer\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\nCross-Origin-Opener-Policy: same-origin\r\nConnection: close\r\n"
)

Answer = tuple[HTTPStatus, str, bytes]
Connections = dict[asyncio.StreamWriter, None]
"""In the order they came."""


async def answer(worker: Worker, http: HttpSettings, method: str, path: str) -> Answer:
    """The answer to one request."""
    if method != "GET":
        return HTTPStatus.METHOD_NOT_ALLOWED, TEXT, b"only GET\n"
    match path.partition("?")[0]:
        case "/":
            return HTTPStatus.OK, "text/html; charset=utf-8", PAGE
        case "/livez" | "/readyz" as asked:
            return _verdict(alive(worker, http) if asked == "/livez" else ready(worker))
        case "/metrics":
            return HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", exposition(worker.figures)
        case "/status":
            return HTTPStatus.OK, "application/json", orjson.dumps(await status(worker, http)) + b"\n"
        case _:
            return HTTPStatus.NOT_FOUND, TEXT, b"try /, /livez, /readyz, /metrics or /status\n"


def _verdict(fine: bool) -> Answer:  # noqa: FBT001 - it is the whole message
    return (HTTPStatus.OK, TEXT, b"ok\n") if fine else (HTTPStatus.SERVICE_UNAVAILABLE, TEXT, b"not yet\n")


@asynccontextmanager
async def serving(worker: Worker, http: HttpSettings) -> AsyncIterator[int | None]:
    """Serve while inside, at the returned port; without a port, do nothing.

    :raises ConfigurationError: the address cannot be bound.
    """
    host, port = http.host, http.port
    if port is None:
        yield None
        return
    connections: Connections = {}
    try:
        server = await asyncio.start_server(
            lambda reader, writer: _serve(worker, http, connections, reader, writer),
            host,
            port,
            limit=REQUEST_BYTES_MAX,
        )
    except (OSError, UnicodeError) as error:  # the latter of what no host can be called
        why = getattr(error, "strerror", None) or "nobody knows that name"
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {why}; set http.host and http.port"
        ) from None
    bound: int = server.sockets[0].getsockname()[1]
    log.info("http_listening", host=host, port=bound)
    try:
        yield bound
    finally:
        server.close()
        for connection in connections:
            connection.transport.abort()
        await server.wait_closed()


async def _serve(
    worker: Worker,
    http: HttpSettings,
    connections: Connections,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    if len(connections) >= CONNECTIONS_MAX:
        oldest = next(iter(connections))
        del connections[oldest]
        oldest.transport.abort()
    connections[writer] = None
    try:
        async with asyncio.timeout(REQUEST_S_MAX):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, path, *_ = head.partition("\r\n")[0].split(" ")
            if is_loopback(http.host) and not is_loopback(_asked_host(head)):
                found: Answer = (
                    HTTPStatus.MISDIRECTED_REQUEST,
                    TEXT,
                    b"bound to loopback: ask for localhost\n",
                )
            else:
                found = await answer(worker, http, method, path)
            writer.write(_response(*found))
            writer.close()
            await writer.wait_closed()
    except (
        TimeoutError,
        ValueError,
        asyncio.IncompleteReadError,
        asyncio.LimitOverrunError,
        ConnectionError,
    ):
        pass  # not HTTP, too slow or gone: nobody is left to answer
    finally:
        connections.pop(writer, None)
        writer.transport.abort()  # closing alone would wait for a reader that never reads


def _asked_host(head: str) -> str:
    """The name in the Host header, without its port; empty where there is none, as in old or hand-written requests."""
    for line in head.split("\r\n")[1:]:
        name, _, value = line.partition(":")
        if name.strip().lower() == "host":
            value = value.strip()
            return value[1:].partition("]")[0] if value.startswith("[") else value.partition(":")[0]
    return ""


def _response(code: HTTPStatus, content_type: str, body: bytes) -> bytes:
    policy = POLICY if body is PAGE else NOTHING_ELSE
    allow = "Allow: GET\r\n" if code is HTTPStatus.METHOD_NOT_ALLOWED else ""
    head = (
        f"HTTP/1.1 {code.value} {code.phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"Content-Security-Policy: {policy}\r\n{allow}{_HEADERS}\r\n"
    )
    return head.encode("latin-1") + body
