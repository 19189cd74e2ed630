"""The middleware against scripted apps and a sink that writes down what it hears."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from freezepoint.capture import CaptureMiddleware
from freezepoint.capture.middleware import Message, Receive, Scope, Send
from freezepoint_schemas.events import TokenEntry
from tests.polling import poll_until_async
from tests.unit.test_capture import GOOD, VLLM_STREAM, assert_tokens

TAGGED = "/ng-rollout/0-0/training-token-capture/v1/chat/completions"
JSON_BODY = json.dumps(GOOD["vllm"]).encode()
SSE = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in VLLM_STREAM]
DONE = b"data: [DONE]\n\n"


@dataclass
class FakeSink:
    """``fails``: names of methods that raise; ``hangs``: that never return."""

    deadline_s: float = 0.3
    fails: set[str] = field(default_factory=set)
    hangs: set[str] = field(default_factory=set)
    heard: list[tuple[str, ...]] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)

    async def _do(self, name: str, *what: str) -> None:
        self.heard.append((name, *what))
        if name in self.hangs:
            await asyncio.Event().wait()
        if name in self.fails:
            raise RuntimeError(f"{name} fails")

    async def put(self, entry: TokenEntry) -> None:
        self.entries.append(entry)
        await self._do("put", entry.rollout_id, entry.model_call_id)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", *, reason: str = "") -> None:
        await self._do("mark", rollout_id, model_call_id, reason)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        await self._do("begin", rollout_id, model_call_id)

    async def cancel_call(self, rollout_id: str, model_call_id: str) -> None:
        await self._do("cancel", rollout_id, model_call_id)

    async def close(self) -> None:
        await self._do("close")

    @property
    def verbs(self) -> list[str]:
        return [name for name, *_ in self.heard]

    def marked(self, reason: str) -> bool:
        return self.verbs == ["begin", "mark"] and reason in self.heard[1][3]


@dataclass
class App:
    """Answers with these pieces; ``scopes``: what it was called with."""

    pieces: Sequence[bytes] = (JSON_BODY,)
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    error_after: int | None = None
    scopes: list[Scope] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if scope["type"] == "http":
            self.requests.append(await _request_body(receive))
        if self.error_after == -1:
            raise ValueError("engine died")
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for number, piece in enumerate(self.pieces):
            if number == self.error_after:
                raise ValueError("engine died")
            more = number < len(self.pieces) - 1
            await send({"type": "http.response.body", "body": piece, "more_body": more})


async def _request_body(receive: Receive) -> bytes:
    pieces, more = [], True
    while more:
        message = await receive()
        pieces.append(message["body"])
        more = message.get("more_body", False)
    return b"".join(pieces)


def scope_of(path: str = TAGGED, method: str = "POST", **headers: str) -> Scope:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": raw}  # fmt: skip


async def call(
    app: Any,
    sink: FakeSink,
    scope: Scope | None = None,
    on_send: Any = None,
    request: bytes = b"{}",
    **options: Any,
) -> list[Message]:
    """What the client gets that sends this request, in two pieces."""
    got: list[Message] = []
    pieces = [(request[1:], False), (request[:1], True)]

    async def receive() -> Message:
        body, more = pieces.pop()
        return {"type": "http.request", "body": body, "more_body": more}

    async def send(message: Message) -> None:
        got.append(message)
        if on_send is not None:
            await on_send(message)

    middleware = CaptureMiddleware(app, sink=sink, **options)
    try:
        await middleware(scope or scope_of(), receive, send)
    finally:
        await _settled(middleware)
    return got


async def _settled(middleware: CaptureMiddleware) -> None:
    async def idle() -> bool:
        return not middleware._tasks or bool(getattr(middleware.sink, "hangs", None))

    await poll_until_async(idle, 5, "no work is left")


def bodies(messages: Sequence[Message]) -> list[bytes]:
    return [message["body"] for message in messages if message["type"] == "http.response.body"]


def streaming(pieces: Sequence[bytes], **more: Any) -> App:
    return App(pieces, headers={"content-type": "text/event-stream; charset=utf-8"}, **more)


async def test_a_call_is_announced_passed_through_and_captured() -> None:
    sink, app = FakeSink(), App((JSON_BODY[:100], JSON_BODY[100:]))
    before = time.time()
    got = await call(app, sink)
    assert bodies(got) == [JSON_BODY[:100], JSON_BODY[100:]]
    assert sink.verbs == ["begin", "put"]
    assert sink.heard[0][1:] == sink.heard[1][1:]
    (entry,) = sink.entries
    assert_tokens(entry)
    assert before <= entry.created_at <= time.time()
    assert app.scopes[0]["path"] == "/v1/chat/completions"
    assert app.scopes[0]["raw_path"] == b"/v1/chat/completions"


async def test_the_header_tags_too_and_the_path_wins() -> None:
    sink = FakeSink()
    await call(App(), sink, scope_of("/v1/chat/completions", x_rollout_id="7-1"))
    await call(App(), sink, scope_of(x_rollout_id="7-1"))
    await call(App(), sink, scope_of("/v1/responses/", x_trace="7-2"), header="X-Trace")
    assert [entry.rollout_id for entry in sink.entries] == ["7-1", "0-0", "7-2"]


@pytest.mark.parametrize(
    "scope",
    [
        scope_of("/v1/chat/completions"),
        scope_of("/v1/models", x_rollout_id="1-1"),
        scope_of("/v1/chat/completions", method="GET", x_rollout_id="1-1"),
        scope_of("/ng-rollout/0-0/v1/chat/completions"),
        scope_of("/ng-rollout/0-0/training-token-capture/v1/embeddings"),
        scope_of("/v1/chat/completions", x_rollout_id="not valid"),
        scope_of("/ng-rollout//training-token-capture/v1/chat/completions"),
    ],
)
async def test_other_calls_pass_untouched(scope: Scope) -> None:
    sink = FakeSink()
    assert bodies(await call(App(), sink, scope)) == [JSON_BODY]
    assert sink.heard == []


async def test_a_mount_point_and_odd_characters_stay_in_the_path() -> None:
    app = App()
    scope = scope_of("/api/ng-rollout/0-0/training-token-capture/v1/ü %/chat/completions")
    await call(app, FakeSink(), {**scope, "root_path": "/api"})
    assert app.scopes[0]["path"] == "/api/v1/ü %/chat/completions"
    assert app.scopes[0]["raw_path"] == b"/api/v1/%C3%BC%20%25/chat/completions"


async def test_the_last_bytes_wait_for_the_entry_and_nothing_else_does() -> None:
    sink = FakeSink()
    seen: list[tuple[bytes, bool]] = []

    async def on_send(message: Message) -> None:
        if message["type"] == "http.response.body":
            seen.append((message["body"], "put" in sink.verbs))

    await call(streaming([*SSE, DONE, b""]), sink, on_send=on_send)
    assert [body for body, _ in seen] == [*SSE, DONE, b""]
    assert [durable for _, durable in seen] == [False] * len(SSE) + [True, True]
    assert_tokens(sink.entries[0])


@pytest.mark.parametrize("coding", ["", "gzip"])
async def test_a_content_length_tells_the_last_bytes(coding: str) -> None:
    """Middleware inside the app hands bodies on as streams, and says only afterwards that there was no more."""
    body = gzip.compress(JSON_BODY) if coding else JSON_BODY
    sink = FakeSink()
    seen: list[tuple[bytes, bool]] = []

    async def on_send(message: Message) -> None:
        if message["type"] == "http.response.body":
            seen.append((message["body"], "put" in sink.verbs))

    headers = {"content-type": "application/json", "content-length": str(len(body))}
    headers.update({"content-encoding": coding} if coding else {})
    await call(App((body[:9], body[9:], b""), headers=headers), sink, on_send=on_send)
    assert seen == [(body[:9], False), (body[9:], True), (b"", True)]
    assert sink.verbs == ["begin", "put"]
    assert_tokens(sink.entries[0])


async def test_a_refusal_with_a_content_length_is_withdrawn_before_its_last_bytes() -> None:
    sink = FakeSink()
    seen: list[list[str]] = []

    async def on_send(message: Message) -> None:
        seen.append(sink.verbs)

    headers = {"content-type": "application/json", "content-length": "4"}
    await call(App((b"no", b"no", b""), status=400, headers=headers), sink, on_send=on_send)
    assert seen == [["begin"], ["begin"], ["begin", "cancel"], ["begin", "cancel"]]


@pytest.mark.parametrize("length", ["", "0", "-1", "x", "99999999"])
async def test_a_wrong_content_length_is_not_relied_on(length: str) -> None:
    sink = FakeSink()
    headers = {"content-type": "application/json", "content-length": length}
    await call(App((JSON_BODY[:9], JSON_BODY[9:], b""), headers=headers), sink)
    assert sink.verbs == ["begin", "put"]
    assert_tokens(sink.entries[0])


async def test_a_stream_may_be_cut_anywhere_and_end_without_done() -> None:
    keep_alive = b": keep-alive\n\nevent: message\nid: 1\nretry: 5\n"
    whole = b"".join(keep_alive + event for event in SSE).replace(b"\n", b"\r\n")
    sink = FakeSink()
    await call(streaming([whole[start : start + 7] for start in range(0, len(whole), 7)]), sink)
    assert sink.verbs == ["begin", "put"]
    assert_tokens(sink.entries[0])


@pytest.mark.parametrize(
    ("app", "reason"),
    [
        (App((b'{"choices": [{"message": {}}]}',)), "no token ids"),
        (App((b"<html>",)), "no JSON"),
        (App(status=500), "answered 500"),
        (App(status=408), "answered 408"),
        (App(error_after=-1), "ValueError"),
        (streaming([*SSE, DONE], error_after=3), "ValueError"),
        (streaming([*SSE[:3], b""]), "broke off"),
        (streaming([*SSE[:3], b'data: {"error": {"message": "oom"}}\n\n', b""]), "oom"),
        (streaming([b"data: {oops\n\n", b""]), "no JSON"),
        (streaming([b"data: [1]\n\n", b""]), "no object"),
        (App(headers={"content-type": "application/json", "content-encoding": "br"}), "encoded as br"),
        (App(headers={"content-type": "application/json", "content-encoding": "gzip"}), "coding is broken"),
    ],
)
async def test_what_could_not_be_captured_marks_the_rollout(app: App, reason: str) -> None:
    sink = FakeSink()
    plain: list[Message] = []
    try:
        got = await call(app, sink)
    except ValueError:
        assert app.error_after is not None
    else:

        async def receive() -> Message:
            return {"type": "http.request", "body": b""}

        async def send(message: Message) -> None:
            plain.append(message)

        await app(scope_of(), receive, send)
        assert got == plain
    assert sink.marked(reason), sink.heard


@pytest.mark.parametrize("status", [307, 400, 404, 422, 429])
async def test_a_refusal_withdraws_the_call(status: int) -> None:
    sink = FakeSink()
    await call(App(status=status), sink)
    assert sink.verbs == ["begin", "cancel"]


async def test_an_app_that_ends_without_an_answer_marks_the_rollout() -> None:
    async def silent(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    sink = FakeSink()
    await call(silent, sink)
    assert sink.marked("did not come to its end")


async def test_a_cancelled_call_marks_the_rollout() -> None:
    async def stuck(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    sink = FakeSink()
    task = asyncio.create_task(call(stuck, sink))

    async def began() -> bool:
        return sink.verbs == ["begin"]

    await poll_until_async(began, 5, "the call begins")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sink.marked("CancelledError")


async def test_a_client_that_leaves_after_the_finish_reason_leaves_a_whole_generation() -> None:
    sink = FakeSink()
    counted = json.dumps({**VLLM_STREAM[7], "usage": VLLM_STREAM[8]["usage"]})  # continuous_usage_stats
    app = streaming([*SSE[:7], f"data: {counted}\n\n".encode(), SSE[8]], error_after=8)
    with pytest.raises(ValueError, match="engine died"):
        await call(app, sink)
    assert sink.verbs == ["begin", "put"]


def one_of_two(*, last: bool) -> bytes:
    """The first choice of two, which comes to its end before the second begins."""
    choice = {
        "index": 0,
        "delta": {"content": "x"},
        "token_ids": [4],
        "logprobs": {"content": [{"token": "a", "logprob": -0.5}]},
    }
    chunk = {"prompt_token_ids": [1], "choices": [{**choice, "finish_reason": "stop" if last else None}]}
    return f"data: {json.dumps(chunk)}\n\n".encode()


@pytest.mark.parametrize(
    ("request_body", "asked"),
    [
        ({"n": 2}, 2),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [[1, 2], [3]], "n": 2}, 4),
        ({"text": ["a", "b", "c"]}, 3),
        ({"input_ids": [[1], [2]]}, 2),
        ({"text": "a", "sampling_params": {"n": 3}}, 3),
        ({"n": 2, "messages": [{"role": "user", "content": "x" * 300_000}]}, 2),
    ],
)
async def test_a_request_for_several_generations_marks_the_rollout_at_once(
    request_body: Any, asked: int
) -> None:
    """Else a client that leaves after the first choice would leave a response that looks whole."""
    sink = FakeSink()
    app = streaming([one_of_two(last=False), one_of_two(last=True), b""], error_after=2)
    sent = json.dumps(request_body).encode()
    with pytest.raises(ValueError, match="engine died"):
        await call(app, sink, request=sent)
    assert sink.marked(f"the request asks for {asked} generations"), sink.heard
    assert app.requests == [sent]


@pytest.mark.parametrize(
    "request_body",
    [b'{"n": 1}', b'{"n": null}', b'{"prompt": [1, 2, 3]}', b'{"prompt": ["a"]}', b'{"input_ids": [[1, 2]]}', b"[2]", b"{oops", b"xx", b'{"n": "2"}'],
)  # fmt: skip
async def test_a_request_for_one_generation_or_of_another_form_is_captured(request_body: bytes) -> None:
    sink = FakeSink()
    await call(App(), sink, request=request_body)
    assert sink.verbs == ["begin", "put"]


async def test_a_refused_or_too_large_request_is_not_judged_by_its_n() -> None:
    refused, large = FakeSink(), FakeSink()
    await call(App(status=400), refused, request=b'{"n": 2}')
    assert refused.verbs == ["begin", "cancel"]
    request = json.dumps({"n": 2, "padding": "x" * 50_000}).encode()
    await call(App(), large, request=request, body_bytes_max=40_000)
    assert large.verbs == ["begin", "put"]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_compressed_responses_are_read(coding: str) -> None:
    import zlib

    packed = gzip.compress(JSON_BODY) if coding == "gzip" else zlib.compress(JSON_BODY)
    headers = {"content-type": "application/json", "content-encoding": coding}
    sink, app = FakeSink(), App((packed[:40], packed[40:]), headers=headers)
    got = await call(app, sink, scope_of(accept_encoding="br;q=1.0, zstd, gzip, deflate;q=0.5"))
    assert bodies(got) == [packed[:40], packed[40:]]
    assert_tokens(sink.entries[0])
    assert app.scopes[0]["headers"] == [(b"accept-encoding", b"gzip, deflate;q=0.5")]


@pytest.mark.parametrize("packed", [False, True])
async def test_a_response_above_the_limit_is_given_up_and_passes(packed: bool) -> None:
    big = b" " * 100_000
    pieces = [gzip.compress(big)] if packed else [big[:50_000], big[50_000:]]
    headers = {"content-type": "application/json"} | ({"content-encoding": "gzip"} if packed else {})
    sink = FakeSink()
    assert bodies(await call(App(pieces, headers=headers), sink, body_bytes_max=60_000)) == pieces
    assert sink.marked("larger than body_bytes_max")


@pytest.mark.parametrize(
    ("fails", "verbs"),
    [
        ({"begin"}, ["begin", "put"]),
        ({"put"}, ["begin", "put", "mark"]),
        ({"begin", "put", "mark"}, ["begin", "put", "mark"]),
    ],
)
async def test_a_broken_sink_never_breaks_a_response(fails: set[str], verbs: list[str]) -> None:
    sink = FakeSink(fails=fails)
    assert bodies(await call(App(), sink)) == [JSON_BODY]
    assert sink.verbs == verbs
    refusing = FakeSink(fails={"cancel"})
    assert bodies(await call(App(status=400), refusing)) == [JSON_BODY]


async def test_a_sink_that_hangs_holds_a_call_up_once_only() -> None:
    sink = FakeSink(deadline_s=0.3, hangs={"begin", "put", "mark"})
    began = time.monotonic()
    assert bodies(await call(App(), sink)) == [JSON_BODY]
    assert time.monotonic() - began < 2


async def test_policy_version_and_sinks_without_a_reason() -> None:
    class Plain(FakeSink):
        async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:  # type: ignore[override]
            await self._do("mark", rollout_id, model_call_id)

    sink = Plain()
    await call(App(), sink, policy_version=lambda: 42)
    assert sink.entries[0].policy_version == 42
    await call(App(status=500), sink)
    assert sink.verbs[-1] == "mark"


async def test_a_policy_version_that_fails_costs_the_version_only(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> int:
        raise RuntimeError("no weights yet")

    sink = FakeSink()
    got = await call(App(), sink, policy_version=broken)
    assert got[-1]["body"] == JSON_BODY
    assert sink.entries[0].policy_version is None
    assert "policy_version failed" in caplog.text


async def test_messages_without_a_body_pass() -> None:
    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] is None
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        await send({"type": "http.response.body", "body": JSON_BODY, "more_body": True})
        await send({"type": "http.response.body", "body": None})

    async def receive() -> Message:
        return {"type": "http.request", "body": None}

    async def send(_message: Message) -> None:
        pass

    sink = FakeSink()
    middleware = CaptureMiddleware(app, sink=sink)
    await middleware(scope_of(), receive, send)
    await _settled(middleware)
    assert sink.verbs == ["begin", "put"]


async def test_the_sink_is_closed_with_the_server() -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})

    for fails in (set(), {"close"}):
        sink = FakeSink(fails=fails)
        got = await call(app, sink, {"type": "lifespan"})
        assert [message["type"] for message in got] == [
            "lifespan.startup.complete",
            "lifespan.shutdown.complete",
        ]
        assert sink.verbs == ["close"]


async def test_websockets_pass() -> None:
    app = App(())
    await call(app, FakeSink(), {"type": "websocket", "path": TAGGED, "headers": []})
    assert app.scopes[0]["path"] == TAGGED
