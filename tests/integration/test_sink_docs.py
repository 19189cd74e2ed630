"""The examples of docs/sink.md: what is configured, put in front of an app, and called by hand works as written."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from examples.end_to_end.model_server import ModelServer
from examples.end_to_end.serving import serving
from freezepoint.capture import CaptureMiddleware
from freezepoint.errors import FreezepointError
from freezepoint.settings import Settings
from freezepoint.sink import TokenSink
from freezepoint.transport.connect import connect
from tests.documents import ROOT, Typist, blocks_of, document, run_here
from tests.integration.workers import read_results, run_until_idle

DOCUMENT = "docs/sink.md"
BROKER = "kafka://broker1:9092"
RESPONSE = {
    "id": "r1",
    "object": "chat.completion",
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "x"},
            "token_ids": [3],
            "logprobs": {"content": [{"token": "x", "logprob": -0.5}]},
            "finish_reason": "stop",
        }
    ],
}


@pytest.fixture
def broker(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'freezepoint.db'}"


async def unmasked_by_id(broker: str, folder: Path) -> dict[str, bool]:
    run_until_idle({"FREEZEPOINT_BROKER": broker}, folder / "worker.log")
    async with connect(Settings(broker=broker)) as transport:
        return {result.rollout_id: not result.mask_sample for result in await read_results(transport)}


def test_these_are_all_blocks() -> None:
    assert [block.language for block in blocks_of(DOCUMENT)] == ["yaml", "python", "python", "console"]


async def test_gym_finds_the_sink_by_its_configuration() -> None:
    """Gym imports the class by its name, and calls it with the keyword arguments."""
    configured = blocks_of(DOCUMENT)[0].text
    (module, name) = re.findall(r"^  sink: (\S+):(\w+)$", configured, re.MULTILINE)[0]
    arguments = dict(re.findall(r"^    (\w+): (\S+)", configured, re.MULTILINE))
    assert arguments.keys() == {"broker", "run"}
    sink = getattr(import_module(module), name)(**arguments)
    for method in ("begin_call", "put", "mark_incomplete"):
        assert callable(getattr(sink, method))
    await sink.close()


async def test_any_asgi_server_and_by_hand(broker: str, tmp_path: Path) -> None:
    _, middleware, by_hand, _ = blocks_of(DOCUMENT)
    names: dict[str, Any] = {"app": ModelServer(), "response": RESPONSE, "call_id": "c1"}
    await run_here(middleware, names, {BROKER: broker})
    assert isinstance(names["app"], CaptureMiddleware)
    async with serving(names["app"]) as url:
        base_url = f"{url}/ng-rollout/0-1/training-token-capture/v1"
        async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
            await client.chat.completions.create(
                model="toy",
                messages=[{"role": "user", "content": "Hello."}],
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
    names["FreezepointError"] = FreezepointError
    await run_here(by_hand, names, {BROKER: broker})
    await names["sink"].complete("0-1")
    await names["sink"].close()
    assert await unmasked_by_id(broker, tmp_path) == {"grpo-17.0-1": True, "grpo-17.0-3": True}


async def test_by_hand_what_cannot_be_captured_masks(broker: str, tmp_path: Path) -> None:
    _, middleware, by_hand, _ = blocks_of(DOCUMENT)
    without_ids = {**RESPONSE, "prompt_token_ids": None}
    names: dict[str, Any] = {"app": None, "response": without_ids, "call_id": "c1"}
    await run_here(middleware, names, {BROKER: broker})
    names["FreezepointError"] = FreezepointError
    await run_here(by_hand, names, {BROKER: broker})
    await names["sink"].close()
    assert await unmasked_by_id(broker, tmp_path) == {"grpo-17.0-3": False}


@pytest.mark.slow
def test_the_whole_way() -> None:
    """In one command; the installation before it is the tests' own."""
    block = blocks_of(DOCUMENT)[3]
    (install, _), (example, _) = block.commands
    assert install == "pip install -e '.[dev]'"
    with Typist(ROOT) as typist:
        typist.command(example)
        assert typist.printed.count("'masked': 1") == 3, typist.printed


def test_the_arguments_are_those_of_the_sink() -> None:
    table = document(DOCUMENT).partition("| argument | default | |")[2].partition("\n\n")[0]
    named = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert set(named) <= set(signature(TokenSink).parameters)
    assert len(named) > 7
