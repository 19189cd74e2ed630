"""An agent that works with a tool, through OpenAI's own client. It knows nothing of tokens, nor of their capture: all it
has is a base URL that names its rollout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks a key up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        },
    }
]
OPTIONS: dict[str, Any] = {"model": "toy", "logprobs": True, "tools": TOOLS}
WITH_IDS: dict[str, Any] = {"return_token_ids": True}


@dataclass
class Plan:
    """What goes wrong in a rollout: by turn, counted from 0."""

    turns: int
    resampled: frozenset[int] = frozenset()
    """Turns that are asked twice; the second answer is kept."""
    streamed: frozenset[int] = frozenset()
    killed: frozenset[int] = frozenset()
    """Turns whose stream is dropped half-way and asked again."""


async def run_rollout(url: str, rollout_id: str, plan: Plan) -> float:
    """Work through the turns; the reward."""
    base_url = f"{url}/ng-rollout/{rollout_id}/training-token-capture/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=3) as client:
        messages: list[Any] = [
            {"role": "system", "content": "You may look things up."},
            {"role": "user", "content": f"Solve task {rollout_id}."},
        ]
        for turn in range(plan.turns):
            if turn in plan.killed:
                await _drop_stream(client, messages)
            if turn in plan.resampled:
                await _ask(client, messages)
            answer = await (_ask_streaming if turn in plan.streamed else _ask)(client, messages)
            messages.append(answer)
            for call in answer.get("tool_calls", []):
                key = json.loads(call["function"]["arguments"])["key"]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"value of {key}"})
            if not answer.get("tool_calls"):
                messages.append({"role": "user", "content": "Go on."})
        return float(sum(str(message.get("content")).count("7") for message in messages))


async def _ask(client: AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    completion = await client.chat.completions.create(messages=messages, extra_body=WITH_IDS, **OPTIONS)
    message = completion.choices[0].message
    answer: dict[str, Any] = message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
    return answer


async def _ask_streaming(client: AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": ""}
    stream = await client.chat.completions.create(
        messages=messages, extra_body=WITH_IDS, stream=True, **OPTIONS
    )
    async for chunk in stream:
        for choice in chunk.choices:
            answer["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                answer.setdefault("tool_calls", []).append(call.model_dump(exclude={"index"}))
    return answer


async def _drop_stream(client: AsyncOpenAI, messages: list[Any]) -> None:
    extra = {**WITH_IDS, "stall_after": 2}
    stream = await client.chat.completions.create(messages=messages, extra_body=extra, stream=True, **OPTIONS)
    async for _ in stream:
        break
    await stream.close()
