"""The middleware in a real ASGI server, called by OpenAI's own client, over an embedded broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from openai import APIStatusError, AsyncOpenAI
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from examples.end_to_end.agent import OPTIONS, WITH_IDS
from examples.end_to_end.model_server import ModelServer
from examples.end_to_end.serving import serving
from freezepoint.capture import CaptureMiddleware
from freezepoint.settings import Settings
from freezepoint.sink import TokenSink
from freezepoint.transport.connect import connect
from freezepoint_schemas import codec
from freezepoint_schemas.events import InputEvent, TokenEntry
from freezepoint_schemas.topics import Topic
from tests.integration.workers import read_all
from tests.polling import poll_until_async
from tests.unit.test_capture import GOOD, INLINE, TEXT_ITEM, assert_tokens, responses

MESSAGES: Any = [{"role": "user", "content": "Solve it."}]


@dataclass
class Served:
    """A server behind the middleware, and what it published."""

    url: str
    broker: str
    model: ModelServer

    @asynccontextmanager
    async def client(self, rollout_id: str, *, by_header: bool = False) -> AsyncIterator[AsyncOpenAI]:
        tag = "" if by_header else f"/ng-rollout/{rollout_id}/training-token-capture"
        headers = {"x-rollout-id": rollout_id} if by_header else {}
        async with AsyncOpenAI(
            base_url=f"{self.url}{tag}/v1", api_key="none", default_headers=headers
        ) as client:
            yield client

    async def events(self) -> list[InputEvent]:
        async with connect(Settings(broker=self.broker)) as transport:
            records = await read_all(transport, Topic.TOKENS)
        return [codec.decode_event((record.key or b"").decode(), record.value) for record in records]

    async def names(self) -> list[str]:
        return [event.event for event in await self.events()]

    async def entries(self) -> list[TokenEntry]:
        return [event for event in await self.events() if isinstance(event, TokenEntry)]

    def assert_sampled(self, entry: TokenEntry) -> None:
        """It is what the server sampled, token for token."""
        for sample in self.model.samples:
            if (
                sample.prompt == entry.prompt_token_ids.tolist()
                and sample.generation == entry.generation_token_ids.tolist()
            ):
                assert sample.log_probs == entry.generation_log_probs.tolist()
                return
        pytest.fail(f"call {entry.model_call_id} was never sampled")


@asynccontextmanager
async def served(tmp_path: Path, app: Any = None, model: ModelServer | None = None) -> AsyncIterator[Served]:
    broker = f"sqlite:///{tmp_path / 'capture.db'}"
    server = model or ModelServer()
    sink = TokenSink(broker=broker, by_reference=False)
    async with serving(CaptureMiddleware(app or server, sink=sink)) as url:
        yield Served(url, broker, server)


@pytest.mark.parametrize("by_header", [False, True])
async def test_whole_answers(tmp_path: Path, by_header: bool) -> None:
    async with served(tmp_path) as server, server.client("1-0", by_header=by_header) as client:
        completion = await client.chat.completions.create(messages=MESSAGES, extra_body=WITH_IDS, **OPTIONS)
        assert await server.names() == ["call_intent", "token_entry"]  # before the client went on
        (entry,) = await server.entries()
    server.assert_sampled(entry)
    assert entry.rollout_id == "1-0"
    assert entry.response_id == completion.id
    assert completion.choices[0].message.content == server.model.samples[0].text


async def test_streams(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.client("1-0") as client:
        for _ in range(4):
            stream = await client.chat.completions.create(
                messages=MESSAGES, extra_body=WITH_IDS, stream=True, **OPTIONS
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason in {"stop", "tool_calls"}
        entries = await server.entries()
    assert len(entries) == 4
    for entry in entries:
        server.assert_sampled(entry)
    assert any(item["type"] == "function_call" for entry in entries for item in entry.output_items)


async def test_a_killed_stream_marks_its_rollout_only(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.client("1-0") as client, server.client("2-0") as other:
        extra = {**WITH_IDS, "stall_after": 2}
        stream = await client.chat.completions.create(
            messages=MESSAGES, extra_body=extra, stream=True, **OPTIONS
        )
        async for _ in stream:
            break
        await stream.close()

        async def marked() -> bool:
            return "capture_incomplete" in await server.names()

        await poll_until_async(marked, 10, "the killed stream is marked")
        await other.chat.completions.create(messages=MESSAGES, extra_body=WITH_IDS, **OPTIONS)
        events = await server.events()
    assert {event.rollout_id for event in events if event.event == "capture_incomplete"} == {"1-0"}
    assert {event.rollout_id for event in events if event.event == "token_entry"} == {"2-0"}


async def test_refused_calls_are_withdrawn_and_the_clients_retry_captured(tmp_path: Path) -> None:
    async with served(tmp_path, model=ModelServer(refusals=2)) as server, server.client("1-0") as client:
        await client.chat.completions.create(messages=MESSAGES, extra_body=WITH_IDS, **OPTIONS)
        assert sorted(await server.names()) == ["call_cancelled"] * 2 + ["call_intent"] * 3 + ["token_entry"]


async def test_several_choices_and_answers_without_ids_mark(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.client("1-0") as client, server.client("2-0") as second:
        two = await client.chat.completions.create(messages=MESSAGES, extra_body=WITH_IDS, n=2, **OPTIONS)
        assert len(two.choices) == 2
        await second.chat.completions.create(messages=MESSAGES, **OPTIONS)
        reasons = {
            event.rollout_id: event.reason
            for event in await server.events()
            if event.event == "capture_incomplete"
        }
    assert "asks for 2 generations" in reasons["1-0"]
    assert "partial" in reasons["2-0"]


async def test_other_paths_and_untagged_calls_leave_no_trace(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            await client.chat.completions.create(messages=MESSAGES, **OPTIONS)
        async with server.client("1-0") as client:
            with pytest.raises(APIStatusError):
                await client.models.list()
        assert await server.events() == []


async def chat(request: Request) -> JSONResponse:
    await request.body()
    return JSONResponse({**GOOD["sglang-chat"], "padding": "x" * 5_000})


async def respond(request: Request) -> StreamingResponse | JSONResponse:
    content = [{"type": "output_text", "text": "hi", "annotations": []}]
    whole = responses({**TEXT_ITEM, "content": content, "id": "msg", "status": "completed", **INLINE})
    if not (await request.json()).get("stream"):
        return JSONResponse(whole)

    async def events() -> AsyncIterator[str]:
        for number, event in enumerate([{"type": "response.created"}, {"type": "response.completed"}]):
            data = {**event, "sequence_number": number, "response": whole}
            yield f"event: {event['type']}\ndata: {orjson.dumps(data).decode()}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def pass_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
    return await call_next(request)


def starlette() -> Starlette:
    """An app as people write them: routed, mounted, compressing, with middleware that turns bodies into streams."""
    routes = [
        Route("/chat/completions", chat, methods=["POST"]),
        Route("/responses", respond, methods=["POST"]),
    ]
    app = Starlette(routes=[Mount("/v1", routes=routes)])
    app.add_middleware(GZipMiddleware, minimum_size=100)
    app.add_middleware(BaseHTTPMiddleware, dispatch=pass_on)
    return app


async def test_a_starlette_app_that_compresses_and_the_responses_api(tmp_path: Path) -> None:
    async with served(tmp_path, starlette()) as server, server.client("1-0") as client:
        raw = await client.chat.completions.with_raw_response.create(messages=MESSAGES, **OPTIONS)
        assert raw.headers["content-encoding"] == "gzip"
        answer = await client.responses.create(input="hi", model="m")
        assert answer.output_text == "hi"
        stream = await client.responses.create(input="hi", model="m", stream=True)
        assert [event.type async for event in stream] == ["response.created", "response.completed"]
        entries = await server.entries()
    assert len(entries) == 3
    for entry in entries:
        assert_tokens(entry)


async def test_no_broker_costs_a_call_one_deadline_and_nothing_else(tmp_path: Path) -> None:
    model = ModelServer()
    sink = TokenSink(broker="kafka://127.0.0.1:1", deadline_s=1)
    async with serving(CaptureMiddleware(model, sink=sink)) as url:
        client = Served(url, "", model).client("1-0")
        async with client as openai, asyncio.timeout(20):
            completion = await openai.chat.completions.create(
                messages=MESSAGES, extra_body=WITH_IDS, **OPTIONS
            )
    assert completion.choices[0].message.content == model.samples[0].text
