"""The commands of docs/operations.md and docs/runbooks.md. Of Docker's only the files that they name can be looked at here."""

from __future__ import annotations

import json
import shlex
import subprocess
import urllib.request
from pathlib import Path

import pytest

from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from tests.deployment import ROOT, kustomized
from tests.documents import Typist, blocks_of
from tests.events import complete, entry
from tests.integration.test_health import port_of
from tests.integration.workers import publish, worker
from tests.polling import poll_until
from tests.rights import SCRIPT

OPERATIONS, RUNBOOKS = "docs/operations.md", "docs/runbooks.md"
STATUS = "curl -s http://WORKER:8080/status"


def commands_under(document: str, heading: str) -> list[str]:
    (block,) = [block for block in blocks_of(document) if block.heading == heading and block.language]
    assert block.language == "console"
    return [command.partition("  #")[0].strip() for command, _ in block.commands]


def test_these_are_all_blocks() -> None:
    assert [block.heading for block in blocks_of(OPERATIONS)] == ["Trying it out", "Kafka", "Kubernetes"]
    assert [block.heading for block in blocks_of(RUNBOOKS)] == ["Runbooks"]


def test_docker_is_told_of_files_that_are_there() -> None:
    build, compose, _ = (shlex.split(command) for command in commands_under(OPERATIONS, "Trying it out"))
    assert build[:2] == ["docker", "build"]
    assert compose[:2] == ["docker", "compose"]
    for words in (build, compose):
        assert (ROOT / words[words.index("-f") + 1]).is_file()


def test_the_demo_runs_on_a_broker(kafka_bootstrap: str, tmp_path: Path) -> None:
    *_, demo = commands_under(OPERATIONS, "Trying it out")
    assert "kafka://localhost:9092" in demo
    typist = Typist(tmp_path, replace={"localhost:9092": kafka_bootstrap})
    typist.command(demo)
    assert "all as they should be" in typist.printed


def test_the_rights_are_granted_as_shown() -> None:
    (command,) = commands_under(OPERATIONS, "Kafka")
    assert str(SCRIPT.relative_to(ROOT)) in command
    done = subprocess.run(
        ["bash", "-c", f"export KAFKA_ACLS=echo; {command}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines
    for line in lines:
        assert "--bootstrap-server broker:9093 --command-config admin.properties" in line
        assert "--allow-principal User:freezepoint-worker" in line
    topics = [line for line in lines if "--topic " in line]
    assert all("--topic grpo-rollout-" in line for line in topics)
    assert len(topics) < len(lines)


def test_the_overlay_is_made_as_shown() -> None:
    (command,) = commands_under(OPERATIONS, "Kubernetes")
    tool, verb, folder = command.split()
    assert (tool, verb) == ("kubectl", "kustomize")
    assert kustomized(ROOT / folder)


async def test_first_looks(tmp_path: Path) -> None:
    """The commands that every runbook begins with, on a worker at work."""
    environment = {"FREEZEPOINT_BROKER": f"sqlite:///{tmp_path / 'f.db'}", "FREEZEPOINT_HTTP__PORT": "0"}
    async with connect(Settings(broker=environment["FREEZEPOINT_BROKER"])) as transport:
        await publish(transport, [entry("r", "c", [1, 2], [3]), complete("r")])
    status, *commands = commands_under(RUNBOOKS, "Runbooks")
    assert status == STATUS
    typist = Typist(tmp_path, environment, replace={"ROLLOUT": "r"})
    with worker(environment, tmp_path / "worker.log") as running:
        port = port_of(running)

        def published() -> bool:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=10) as response:
                return bool(json.load(response)["counts"].get("results"))

        poll_until(published, 30, "the result is published")
        printed = []
        for command in commands:
            typist.command(command)
            printed.append(typist.printed)
    check, report, inspect = printed
    assert "FAIL" not in check
    assert json.loads(report)["results"] == 1
    assert "rollout r:" in inspect


@pytest.mark.parametrize("document", [OPERATIONS, RUNBOOKS])
def test_indented_blocks_are_no_commands(document: str) -> None:
    """What is indented is a formula: a command would have to be in a block, where it is run."""
    lines = [line for line in (ROOT / document).read_text().splitlines() if line.startswith("    ")]
    for line in lines:
        assert line.split()[0] not in {"docker", "kubectl", "freezepoint", "make", "curl"}
