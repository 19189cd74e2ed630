"""README.md: every block is run, and what its tables claim is there: tests, commands, settings, topics."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from examples.end_to_end.model_server import ModelServer
from examples.end_to_end.serving import serving
from freezepoint.cli.commands import COMMANDS, command_of
from freezepoint.origins import OTHER_VARIABLES
from freezepoint.settings import Settings
from freezepoint.training import PaddedBatch
from freezepoint_schemas.topics import TopicNames, topic_specs
from tests.chaos.registry import all_scenarios
from tests.contract.driving import Cluster
from tests.documents import (
    ROOT,
    Block,
    Typist,
    blocks_of,
    document,
    markdown_files,
    rows_under,
    run_here,
    says,
    spans_of,
)
from tests.fuzz import test_fuzz
from tests.integration.workers import run_until_idle
from tests.simulation.mutations import MUTATIONS

README = "README.md"
BROKER = "broker1:9092,broker2:9092"
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "h": 3_600, "min": 60, "s": 1}


# ------------------------------------------------------------------------------------------------------------ blocks


def block_with(text: str) -> Block:
    (found,) = [block for block in blocks_of(README) if text in block.text]
    return found


def write_capture(folder: Path) -> None:
    """The entry that the README shows, and one that goes on from it."""
    entry = json.loads(block_with('"generation_token_ids"').text)
    sampled = [*entry["prompt_token_ids"], *entry["generation_token_ids"]]
    next_entry = {**entry, "model_call_id": "c2", "prompt_token_ids": [*sampled, 11]}
    (folder / "capture.jsonl").write_text(f"{json.dumps(entry)}\n{json.dumps(next_entry)}\n")


def test_these_are_all_blocks() -> None:
    """So that a new one is not forgotten here."""
    blocks = blocks_of(README)
    texts = ["make demo", "publish capture.jsonl", "topics apply", "CaptureMiddleware", "sink.complete"]
    texts += ["TrajectoryReader", "examples.end_to_end", '"generation_token_ids"']
    assert [block_with(text) for text in texts] == blocks
    languages = ["console"] * 3 + ["python"] * 3 + ["console", "json"]
    assert [block.language for block in blocks] == languages


def test_the_make_targets_exist() -> None:
    """What they run is tested where it is: ``demo`` in test_cli_commands, the tests here."""
    targets = re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [command.partition("#")[0].strip() for command, _ in block_with("make demo").commands]
    assert commands == ["make demo", "make test"]
    named = {word for name in markdown_files() for word in re.findall(r"`make ([a-z]+)", document(name))}
    assert {command.removeprefix("make ") for command in commands} | named <= set(targets)


def test_the_shortest_way(tmp_path: Path) -> None:
    write_capture(tmp_path)
    with Typist(tmp_path) as typist:
        typist.type(block_with("publish capture.jsonl"))
        (result,) = [json.loads(line) for line in typist.printed.splitlines()]
        assert result["rollout_id"] == "run7.12-0"
        assert result["mask_sample"] is False
        assert result["traces"][0]["token_ids"] == [9906, 1917, 40, 11, 40]
        typist.command("freezepoint build capture.jsonl --projection response")
        assert "`freezepoint build capture.jsonl --projection response`" in document(README)
        (response,) = [json.loads(line) for line in typist.printed.splitlines()]
        typist.command("freezepoint results --projection response")
        (published,) = [json.loads(line) for line in typist.printed.splitlines()]
        assert response["rebuilt_response"] == published["rebuilt_response"]


def test_the_shortest_way_on_kafka(tmp_path: Path, kafka_bootstrap: str, unique_prefix: str) -> None:
    write_capture(tmp_path)
    export, apply, run = (command for command, _ in block_with("topics apply").commands)
    apart = {"FREEZEPOINT_TOPIC_PREFIX": f"{unique_prefix}.", "FREEZEPOINT_WORKER__GROUP": unique_prefix}
    with Typist(tmp_path, apart, {BROKER: kafka_bootstrap}) as typist:
        typist.command(export)
        typist.command(apply)
        typist.command("freezepoint publish capture.jsonl --complete")
        typist.command(f"{run} &")  # it stays
        typist.until_printed(["freezepoint", "results"], '"rollout_id":"run7.12-0"')
        typist.command("freezepoint topics check --partitions 16")


async def ask(url: str, attempt: int) -> None:
    """One call of rollout ``0-<attempt>``, under the base URL that the README names."""
    path = "/ng-rollout/<rollout id>/training-token-capture/v1"
    assert path in document(README)
    base_url = url + path.replace("<rollout id>", f"0-{attempt}")
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        await client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": "Hello."}],
            logprobs=True,
            seed=attempt,
            extra_body={"return_token_ids": True},
        )


async def test_both_edges(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is trained on is what was sampled, with the README's own lines at both ends."""
    await cluster.with_topics()
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)
    here = {f"kafka://{BROKER.partition(',')[0]}": cluster.url}
    model, batches = ModelServer(), []

    def train(batch: PaddedBatch, *, missing: int, masked: int) -> None:
        assert (missing, masked) == (0, 0)
        batches.append(batch)

    names: dict[str, Any] = {"app": model, "train": train, "steps": 1}
    await run_here(block_with("CaptureMiddleware"), names, here)
    complete = block_with("sink.complete")
    assert "group_size=4" in complete.text
    async with serving(names["app"]) as url:
        for attempt in range(4):
            await ask(url, attempt)
            await run_here(complete, names, {**here, "0-3": f"0-{attempt}"})
    run_until_idle(cluster.environment(), tmp_path / "worker.log")
    await run_here(block_with("TrajectoryReader"), names, here)
    (batch,) = batches
    assert batch.rewards.tolist() == [1.0] * 4
    rows = [row[:length].tolist() for row, length in zip(batch.token_ids, batch.lengths, strict=True)]
    assert sorted(rows) == sorted([*sample.prompt, *sample.generation] for sample in model.samples)
    sampled = [row[mask].tolist() for row, mask in zip(batch.token_ids, batch.loss_mask, strict=True)]
    assert sorted(sampled) == sorted(sample.generation for sample in model.samples)
    log_probs = [row[mask].tolist() for row, mask in zip(batch.log_probs, batch.loss_mask, strict=True)]
    assert sorted(log_probs) == sorted(
        np.asarray(sample.log_probs, np.float32).tolist() for sample in model.samples
    )


@pytest.mark.slow
def test_the_example_in_one_command() -> None:
    """Groups come in any order."""
    (command, expected) = block_with("examples.end_to_end").commands[0]
    with Typist(ROOT) as typist:
        typist.command(command)
    lines = typist.printed.splitlines()
    assert len(lines) == len(expected.splitlines()), typist.printed
    for line in expected.splitlines():
        assert any(says(printed, line) for printed in lines), f"{line}\n{typist.printed}"


# ------------------------------------------------------------------------------------------------------------ tables


def claims() -> Iterator[tuple[str, str]]:
    """Every test that the guarantees name: its path under ``tests``, and the function, empty for all of them."""
    path = ""
    for row in rows_under(README, "Guarantees"):
        spans = spans_of(row[2])
        assert spans, f"nothing shows {row[0]!r}"
        for span in spans:
            name, _, function = span.partition("::")
            if name != "…":
                path = name if "/" in name else f"integration/{name}"
            yield path, function


@pytest.mark.parametrize(("path", "function"), list(claims()))
def test_every_test_that_is_named_exists(path: str, function: str) -> None:
    found = ROOT / "tests" / path
    assert found.exists()
    if found.is_dir():
        assert list(found.glob("*.py"))
        return
    tree = ast.parse(found.read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    if function:
        assert function in functions
    else:
        assert functions
        assert "scenarios" in found.parts or any(name.startswith("test_") for name in functions)


def test_the_numbers_of_the_guarantees() -> None:
    (mistakes,) = re.findall(r"(\d+) mistakes on purpose", document(README))
    (scenarios,) = re.findall(r"(\d+) scenarios by `make chaos`", document(README))
    (inputs,) = re.findall(r"([\d,]+) generated and mutated records", document(README))
    assert int(mistakes) == len(MUTATIONS)
    assert int(inputs.replace(",", "")) == test_fuzz.INPUTS
    assert int(scenarios) == len(all_scenarios())


def all_commands() -> dict[str, Any]:
    """Every command of the command line by its words."""
    found: dict[str, Any] = {}
    for name in COMMANDS:
        command = command_of(name)
        inner = getattr(command, "commands", None)
        found |= (
            {name: command} if inner is None else {f"{name} {last}": leaf for last, leaf in inner.items()}
        )
    return found


def test_the_commands_are_those_of_the_command_line() -> None:
    named = [
        " ".join(re.findall(r"^[a-z]+(?: [a-z]+)?", span)[:1])
        for row in rows_under(README, "Commands")
        for span in spans_of(row[0])
        if span[0].islower()
    ]
    assert sorted(named) == sorted(all_commands())


def test_every_option_that_a_document_names_exists() -> None:
    """Of commands that are written out: ``freezepoint COMMAND … --option``."""
    known = all_commands()
    used = [
        (command, option)
        for name in markdown_files()
        for line in re.findall(r"freezepoint ([^`\n|&#]+)", document(name))
        for command in known
        if line.startswith(f"{command} ")
        for option in re.findall(r"(?<= )--[a-z-]+", line)
    ]
    assert ("run", "--until-idle") in used
    for command, option in used:
        options = {text for item in known[command].params for text in (*item.opts, *item.secondary_opts)}
        assert option in options, f"freezepoint {command} {option}"


def test_the_topics() -> None:
    specs = topic_specs(TopicNames(), 1)
    rows = rows_under(README, "What goes in and what comes out")
    assert [spans_of(row[0]) for row in rows] == [[spec.name] for spec in specs]


# ---------------------------------------------------------------------------------------------------------- settings


def value_of(settings: BaseModel, name: str) -> Any:
    found: Any = settings
    for part in name.split("."):
        found = getattr(found, part)
    return found


def stated(text: str) -> Any:
    """What a table's cell means: `word`, a number, a size, or nothing."""
    if spans := spans_of(text):
        return spans[0]
    if size := re.fullmatch(r"(\d+) (\w+)", text):
        return int(size[1]) * UNITS[size[2]]
    if re.fullmatch(r"[\d,]+", text):
        return int(text.replace(",", ""))
    return {"": "", "none": None, "off": False, "temporary folder": None}[text]


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Settings:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FREEZEPOINT_CONFIG", raising=False)
    return Settings()


@pytest.mark.parametrize("row", rows_under(README, "Configuration"), ids=lambda row: spans_of(row[0])[0])
def test_every_setting_has_the_default_that_is_stated(row: list[str], defaults: Settings) -> None:
    names = spans_of(row[0])
    exact = [name for name in names if not name.endswith("…")]
    values = [stated(value) for value in row[1].split(", ")]
    assert [value_of(defaults, name) for name in exact] == values
    for name in set(names) - set(exact):
        section, _, start = name.removesuffix("…").partition(".")
        fields = type(value_of(defaults, section)).model_fields
        assert [field for field in fields if field.startswith(start)], name


def test_the_variables_that_are_no_settings() -> None:
    assert set(re.findall(r"`(FREEZEPOINT_[A-Z_]+[A-Z])`", document(README))) >= OTHER_VARIABLES.keys()


@pytest.mark.parametrize("name", markdown_files())
def test_every_setting_that_a_document_names_exists(name: str, defaults: Settings) -> None:
    """``reader.…`` is also how the trainer's reader is called, so there only what has an underscore is a setting."""
    found = re.findall(
        r"`((?:worker|kafka|sqlite|http)\.(?!py)[a-z_]+|reader\.[a-z]+_[a-z_]+)(?=[`= ])", document(name)
    )
    for setting in found:
        value_of(defaults, setting)
