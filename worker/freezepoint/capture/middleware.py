"""ASGI middleware around a model server: each tagged call is announced, passed through as it is, and captured.

The response belongs to the client: nothing of it is changed, held back for long or failed because of the capture. Only
its last bytes wait until the entry is durable, so that whoever has the whole response may go on with the next call,
or end the rollout, and is never ahead of its record.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any, Protocol, TypeAlias

from freezepoint.capture.recording import Recording, recording
from freezepoint.capture.requests import RequestRecording
from freezepoint.capture.tagging import tagged
from freezepoint.errors import CaptureError
from freezepoint_schemas.topics import is_rollout_id

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate")
BODY_BYTES_MAX = 256 * 1024 * 1024
OFF_LOOP_BYTES = 256 * 1024
SINK_WAIT_S = 10.0
CLOSE_WAIT_S = 10.0
REASON_LENGTH_MAX = 500
_MAY_HAVE_GENERATED = frozenset({408, 499})
"""Refusals that come after a while: timeouts, and what proxies log for a client that left."""


class Sink(Protocol):
    """What is needed of a sink; ``freezepoint.sink.TokenSink`` is one."""

    async def put(self, entry: Any) -> None: ...

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None: ...

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None: ...

    async def cancel_call(self, rollout_id: str, model_call_id: str) -> None: ...

    async def close(self) -> None: ...


class CaptureMiddleware:
    """Captures the generations of an OpenAI-compatible ASGI app.

    A call is tagged by the path ``{prefix}/<rollout id>/training-token-capture/…``, of which the app sees what follows,
    or by the header. Calls without a tag, or to other paths than ``endpoints``, pass untouched.

    :param sink: closed with the server (ASGI lifespan).
    :param endpoints: paths that generate; what follows a mount point counts.
    :param body_bytes_max: a larger response is given up and its rollout marked.
    :param policy_version: the weights that serve now, asked for when a call begins.
    """

    def __init__(  # noqa: PLR0913 - each is a keyword with a default
        self,
        app: App,
        *,
        sink: Sink,
        header: str = "x-rollout-id",
        prefix: str = "/ng-rollout",
        endpoints: Collection[str] = ENDPOINTS,
        body_bytes_max: int = BODY_BYTES_MAX,
        policy_version: Callable[[], int | str | None] | None = None,
    ) -> None:
        self._app = app
        self.sink = sink
        self._header = header.lower().encode("latin-1")
        self._prefix = "/" + prefix.strip("/")
        self._endpoints = tuple("/" + endpoint.strip("/") for endpoint in endpoints)
        self.body_bytes_max = body_bytes_max
        self._policy_version = policy_version
        self._tasks: set[asyncio.Task[None]] = set()
        self._takes_reason = "reason" in inspect.signature(sink.mark_incomplete).parameters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._closing(send))
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        rollout_id, inner = tagged(scope, self._prefix, self._header)
        if rollout_id is None or not self._generates(inner):
            await self._app(inner, receive, send)
        elif not is_rollout_id(rollout_id):
            log.warning("not captured: %r is no valid rollout id", rollout_id[:80])
            await self._app(inner, receive, send)
        else:
            await _Call(self, rollout_id, self._version()).run(inner, receive, send)

    def _version(self) -> int | str | None:
        try:
            return self._policy_version() if self._policy_version is not None else None
        except Exception:
            log.exception("policy_version failed; the call is captured without one")
            return None

    def _generates(self, scope: Scope) -> bool:
        path: str = scope["path"].rstrip("/")
        return scope["method"] == "POST" and path.endswith(self._endpoints)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app inside."""
        await self._app(scope, receive, send)

    async def mark(self, rollout_id: str, call_id: str, reason: str) -> None:
        """Mark the rollout, with the reason where the sink has a place for it."""
        if self._takes_reason:
            await self.sink.mark_incomplete(rollout_id, call_id, reason=reason[:REASON_LENGTH_MAX])  # type: ignore[call-arg]
        else:
            await self.sink.mark_incomplete(rollout_id, call_id)

    def background(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """Work that a client does not wait for, or not for long."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _closing(self, send: Send) -> Send:
        async def closing(message: Message) -> None:
            if message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                if self._tasks:
                    await asyncio.wait(set(self._tasks), timeout=CLOSE_WAIT_S)
                try:
                    await self.sink.close()
                except Exception:
                    log.exception("the sink did not close")
            await send(message)

        return closing


class _Call:
    """One tagged call. All its waits for the sink together are no longer than the sink's deadline."""

    def __init__(
        self, middleware: CaptureMiddleware, rollout_id: str, policy_version: int | str | None
    ) -> None:
        self._middleware = middleware
        self._sink = middleware.sink
        self._rollout_id = rollout_id
        self._policy_version = policy_version
        self._call_id = uuid.uuid4().hex
        self._began_at = time.time()
        self._wait_s = float(getattr(middleware.sink, "deadline_s", SINK_WAIT_S))
        self._status = 0
        self._request = RequestRecording(middleware.body_bytes_max)
        self._recording: Recording | None = None
        self._left: int | None = None
        self._settled = False

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._wait(self._announce())

        async def captured(message: Message) -> None:
            await self._before(message)
            await send(message)

        async def observed() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not self._status:
                self._request.feed(bytes(message.get("body") or b""))
            return message

        try:
            await self._middleware.app(scope, observed, captured)
        except BaseException as error:
            self._lost(f"the call failed: {type(error).__name__}")
            raise
        self._lost("the response did not come to its end")

    # ---------------------------------------------------------------------------------------------- the response

    async def _before(self, message: Message) -> None:
        """Look at a message of the response before it goes on its way; never raises for what it finds."""
        if self._settled:
            return
        try:
            if message["type"] == "http.response.start":
                await self._start(message)
            elif message["type"] == "http.response.body":
                await self._body(
                    bytes(message.get("body") or b""), more=bool(message.get("more_body", False))
                )
            elif message["type"] in ("http.response.pathsend", "http.response.zerocopysend"):
                raise CaptureError("the response is sent as a file")
        except CaptureError as error:
            await self._settle(self._mark(str(error)))
        except Exception as error:
            log.exception("capturing a call of rollout %s failed", self._rollout_id)
            await self._settle(self._mark(f"capture failed: {type(error).__name__}"))

    async def _start(self, message: Message) -> None:
        """With a content length the client has the whole response before an app says that there is no more of it."""
        self._status = message["status"]
        headers = {name.lower(): value.decode("latin-1") for name, value in message.get("headers", ())}
        self._left = _length(headers.get(b"content-length", ""))
        if self._is_success:
            if (refusal := await self._request_refusal()) is not None:
                raise CaptureError(refusal)
            self._recording = recording(
                headers.get(b"content-type", "").lower(),
                headers.get(b"content-encoding", ""),
                self._middleware.body_bytes_max,
            )

    async def _request_refusal(self) -> str | None:
        if self._request.size > OFF_LOOP_BYTES:
            return await asyncio.to_thread(self._request.refusal)
        return self._request.refusal()

    @property
    def _is_success(self) -> bool:
        return 200 <= self._status < 300  # noqa: PLR2004 - HTTP's successes

    async def _body(self, piece: bytes, *, more: bool) -> None:
        if self._left is not None:
            self._left -= len(piece)
        more = more and self._left != 0
        if self._recording is not None:
            if len(piece) > OFF_LOOP_BYTES:
                await asyncio.to_thread(self._recording.feed, piece)
            else:
                self._recording.feed(piece)
            if self._recording.ended or not more:
                await self._settle(self._capture(self._recording))
        elif not more:
            await self._settle(self._refused())

    # -------------------------------------------------------------------------------------------------- the sink

    async def _announce(self) -> None:
        try:
            await self._sink.begin_call(self._rollout_id, self._call_id)
        except Exception as error:  # noqa: BLE001 - the call goes on, and its entry may still arrive
            log.warning("call %s of rollout %s was not announced: %s", self._call_id, self._rollout_id, error)

    async def _capture(self, recorded: Recording) -> None:
        try:
            entry = await asyncio.to_thread(
                recorded.entry,
                rollout_id=self._rollout_id,
                model_call_id=self._call_id,
                created_at=self._began_at,
                policy_version=self._policy_version,
            )
            await self._sink.put(entry)
        except Exception as error:  # noqa: BLE001 - whatever it is, the rollout lacks this call
            await self._mark(str(error))

    async def _refused(self) -> None:
        """The server answered with a redirection or an error."""
        if not 300 <= self._status < 500 or self._status in _MAY_HAVE_GENERATED:  # noqa: PLR2004 - HTTP's classes
            await self._mark(f"the server answered {self._status}")
            return
        try:
            await self._sink.cancel_call(self._rollout_id, self._call_id)
        except Exception as error:  # noqa: BLE001 - the intent dangles then, and masks
            log.warning("call %s of rollout %s was not withdrawn: %s", self._call_id, self._rollout_id, error)

    async def _mark(self, reason: str) -> None:
        log.warning("call %s of rollout %s was not captured: %s", self._call_id, self._rollout_id, reason)
        try:
            await self._middleware.mark(self._rollout_id, self._call_id, reason)
        except Exception as error:  # noqa: BLE001 - nothing is left to do but to say so
            log.error("rollout %s could not be marked incomplete: %s", self._rollout_id, error)  # noqa: TRY400

    def _lost(self, reason: str) -> None:
        """The call is over without a whole response. Not waited for: its task may be on its way out.

        A client that leaves once it has read the finish reason leaves a whole generation behind.
        """
        if self._settled:
            return
        self._settled = True
        recorded, self._recording = self._recording, None
        whole = recorded is not None and recorded.whole
        self._middleware.background(self._capture(recorded) if recorded and whole else self._mark(reason))

    async def _settle(self, work: Awaitable[None]) -> None:
        """Decide what this call was, once."""
        self._settled = True
        self._recording = None
        await self._wait(work)

    async def _wait(self, work: Awaitable[None]) -> None:
        """Wait for the sink as long as this call may still be held up; the work goes on without us."""
        began = time.monotonic()
        await asyncio.wait({self._middleware.background(work)}, timeout=max(0.0, self._wait_s))
        self._wait_s -= time.monotonic() - began


def _length(value: str) -> int | None:
    """A content length, if it is one and of anything."""
    return int(value) or None if value.isascii() and value.isdigit() else None
