"""A model server with OpenAI's Chat Completions, as a plain ASGI app. It answers like vLLM does with ``return_token_ids``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from examples.end_to_end.language import Sample, prompt_of, sample
from freezepoint.capture.middleware import Message, Receive, Scope, Send

CHUNK_TOKENS = 4
MODEL = "toy"


@dataclass
class ModelServer:
    """``samples``: everything it ever generated to the end. ``refusals``: how many calls it is still too busy for.

    A request's ``stall_after`` makes a stream stop after so many chunks, until the client loses patience.
    """

    samples: list[Sample] = field(default_factory=list)
    refusals: int = 0
    calls: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif (scope["method"], scope["path"]) != ("POST", "/v1/chat/completions"):
            await _respond(send, 404, {"error": {"message": "no such path"}})
        else:
            await self._complete_chat(json.loads(await _body(receive)), receive, send)

    async def _complete_chat(self, request: dict[str, Any], receive: Receive, send: Send) -> None:
        if self.refusals:
            self.refusals -= 1
            await _respond(send, 429, {"error": {"message": "busy"}}, [(b"retry-after-ms", b"1")])
            return
        self.calls += 1
        sampled = [
            sample(prompt_of(request["messages"]), self.calls + 1000 * index)
            for index in range(request.get("n") or 1)
        ]
        with_ids = bool(request.get("return_token_ids"))
        if request.get("stream"):
            await self._stream(sampled[0], f"chatcmpl-{self.calls}", request, receive, send)
        else:
            self.samples += sampled
            await _respond(send, 200, _completion(sampled, f"chatcmpl-{self.calls}", with_ids=with_ids))

    async def _stream(
        self, sampled: Sample, response_id: str, request: dict[str, Any], receive: Receive, send: Send
    ) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        stall_after = request.get("stall_after")
        for number, chunk in enumerate(
            _chunks(sampled, response_id, with_ids=bool(request.get("return_token_ids")))
        ):
            if number == stall_after:
                while (await receive())["type"] != "http.disconnect":
                    pass
                return
            await send({"type": "http.response.body", "body": _event(json.dumps(chunk)), "more_body": True})
            await asyncio.sleep(0)
        self.samples.append(sampled)
        await send({"type": "http.response.body", "body": _event("[DONE]"), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _completion(sampled: list[Sample], response_id: str, *, with_ids: bool) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for index, one in enumerate(sampled):
        message: dict[str, Any] = {"role": "assistant", "content": one.text}
        if one.tool_call is not None:
            message["tool_calls"] = [_tool_call(one, f"call-{response_id}")]
        choices.append(
            {
                "index": index,
                "message": message,
                "finish_reason": _finish_reason(one),
                "logprobs": _logprobs(one),
            }
        )
        if with_ids:
            choices[-1]["token_ids"] = one.generation
    body = {"id": response_id, "object": "chat.completion", "created": 1, "model": MODEL, "choices": choices}
    return {**body, "prompt_token_ids": sampled[0].prompt} if with_ids else body


def _chunks(sampled: Sample, response_id: str, *, with_ids: bool) -> Iterator[dict[str, Any]]:
    """Tokens as they come; their text with the first of them, the tool call with the last."""
    head = {"id": response_id, "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    first: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    yield {**head, "choices": [first], **({"prompt_token_ids": sampled.prompt} if with_ids else {})}
    total = len(sampled.generation)
    for start in range(0, total, CHUNK_TOKENS):
        tokens = slice(start, start + CHUNK_TOKENS)
        last = start + CHUNK_TOKENS >= total
        delta: dict[str, Any] = {"content": sampled.text} if start == 0 else {}
        if last and sampled.tool_call is not None:
            delta["tool_calls"] = [{"index": 0, **_tool_call(sampled, f"call-{response_id}")}]
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": _logprobs(sampled, tokens),
            "finish_reason": _finish_reason(sampled) if last else None,
        }
        yield {
            **head,
            "choices": [{**choice, "token_ids": sampled.generation[tokens]} if with_ids else choice],
        }


def _tool_call(sampled: Sample, call_id: str) -> dict[str, Any]:
    name, arguments = sampled.tool_call or ("", "")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _finish_reason(sampled: Sample) -> str:
    return "stop" if sampled.tool_call is None else "tool_calls"


def _logprobs(sampled: Sample, tokens: slice = slice(None)) -> dict[str, Any]:
    pairs = zip(sampled.generation[tokens], sampled.log_probs[tokens], strict=True)
    return {
        "content": [
            {"token": str(token), "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in pairs
        ]
    }


async def _body(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    while True:
        message: Message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


async def _respond(
    send: Send, status: int, body: object, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    encoded = json.dumps(body).encode()
    base = [(b"content-type", b"application/json"), (b"content-length", str(len(encoded)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*base, *(headers or [])]})
    await send({"type": "http.response.body", "body": encoded})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = (await receive())["type"].removeprefix("lifespan.")
        await send({"type": f"lifespan.{event}.complete"})
        if event == "shutdown":
            return


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
