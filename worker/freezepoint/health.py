"""What an orchestrator and a scraper ask a worker: ``/livez``, ``/readyz``, ``/metrics`` and ``/status``. Reading only.

A few lines of HTTP on asyncio, because the answers are about this very event loop: when it stands still, nothing answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import orjson
import structlog

from freezepoint.errors import ConfigurationError
from freezepoint.settings import HttpSettings
from freezepoint.telemetry.metrics import exposition
from freezepoint.worker import Worker

log = structlog.get_logger()

REQUEST_BYTES_MAX = 16 * 1024
REQUEST_S_MAX = 5.0
_HEADERS = "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n"
TEXT = "text/plain; charset=utf-8"

Answer = tuple[HTTPStatus, str, bytes]


def alive(worker: Worker, http: HttpSettings) -> bool:
    """Whether the process does its work or has reason to wait; a rebalance is alive."""
    now = asyncio.get_running_loop().time()
    if worker.waiting_since is not None:
        return now - worker.waiting_since < http.broker_wait_s_max
    return worker.heartbeat_at == 0.0 or now - worker.heartbeat_at < http.turn_s_max


def ready(worker: Worker) -> bool:
    """Whether every assigned partition is acquired and restored; a worker that stands by without any is ready."""
    return worker.waiting_since is None and worker.session is not None and worker.session.settled


def status(worker: Worker, http: HttpSettings) -> dict[str, object]:
    """How the worker stands, for people and scripts."""
    session = worker.session
    return {
        "alive": alive(worker, http),
        "ready": ready(worker),
        "standing": dict(worker.figures.standing()),
        "counts": dict(sorted(worker.figures.counts.items())),
        "partitions": [] if session is None else [runner.status() for runner in session.runners],
    }


def answer(worker: Worker, http: HttpSettings, method: str, path: str) -> Answer:
    """The answer to one request."""
    if method != "GET":
        return HTTPStatus.METHOD_NOT_ALLOWED, TEXT, b"only GET\n"
    match path.partition("?")[0]:
        case "/livez":
            return _verdict(alive(worker, http))
        case "/readyz":
            return _verdict(ready(worker))
        case "/metrics":
            return HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", exposition(worker.figures)
        case "/status":
            return HTTPStatus.OK, "application/json", orjson.dumps(status(worker, http)) + b"\n"
        case _:
            return HTTPStatus.NOT_FOUND, TEXT, b"try /livez, /readyz, /metrics or /status\n"


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
    try:
        server = await asyncio.start_server(
            lambda reader, writer: _serve(worker, http, reader, writer), host, port, limit=REQUEST_BYTES_MAX
        )
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror}; set http.host and http.port"
        ) from None
    bound: int = server.sockets[0].getsockname()[1]
    log.info("http_listening", host=host, port=bound)
    try:
        yield bound
    finally:
        server.close()
        await server.wait_closed()


async def _serve(
    worker: Worker, http: HttpSettings, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        async with asyncio.timeout(REQUEST_S_MAX):
            head = await reader.readuntil(b"\r\n\r\n")
            method, path, *_ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
            writer.write(_response(*answer(worker, http, method, path)))
            await writer.drain()
    except (
        TimeoutError,
        ValueError,
        asyncio.IncompleteReadError,
        asyncio.LimitOverrunError,
        ConnectionError,
    ):
        pass  # not HTTP, too slow or gone: nobody is left to answer
    finally:
        writer.close()


def _response(code: HTTPStatus, content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {code.value} {code.phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{_HEADERS}\r\n"
    return head.encode("latin-1") + body
