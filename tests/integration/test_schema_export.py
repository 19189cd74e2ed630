"""``schema export``, and its AsyncAPI document by the official command where that is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest

from freezepoint_schemas.generate import documents
from freezepoint_schemas.topics import Topic, TopicNames
from tests.documents import Typist, blocks_of
from tests.integration.shell import Shell

ASYNCAPI = shutil.which("asyncapi")
GOOD = sorted((Path(__file__).parents[2] / "schemas/examples/v1/good").glob("*.json"))


def test_all_documents_are_written_and_nothing_else_is_touched(shell: Shell) -> None:
    (shell.folder / "contract/json/v1").mkdir(parents=True)
    mine = shell.folder / "contract/json/v1/mine.json"
    mine.write_text("{}")
    done = shell.ok("schema", "export", "contract")
    assert done.err == "11 documents written to contract\n"
    assert sorted(done.out.decode().split()) == sorted(f"contract/{name}" for name in documents())
    for name, content in documents().items():
        assert (shell.folder / "contract" / name).read_bytes() == content
    assert mine.read_text() == "{}"


def test_a_folder_of_its_own_by_default(shell: Shell) -> None:
    shell.ok("schema", "export")
    assert (shell.folder / "freezepoint-schemas/asyncapi.json").is_file()


def test_a_folder_that_cannot_be_is_said(shell: Shell) -> None:
    (shell.folder / "taken").write_text("")
    assert "taken" in shell.wrong(2, "schema", "export", "taken/below")


def test_the_blocks_of_schemas_md(tmp_path: Path) -> None:
    (block,) = blocks_of("docs/schemas.md")
    with Typist(tmp_path) as typist:
        typist.type(block)
    assert (tmp_path / "contract/asyncapi.json").is_file()


@pytest.fixture
def document() -> dict[str, Any]:
    loaded: dict[str, Any] = orjson.loads(documents()["asyncapi.json"])
    return loaded


def test_every_topic_and_each_of_its_messages_is_described(document: dict[str, Any]) -> None:
    assert {channel["address"] for channel in document["channels"].values()} == set(
        TopicNames().all().values()
    )
    told = {name for channel in document["channels"].values() for name in channel["messages"]}
    assert told == document["components"]["messages"].keys()
    assert {operation["channel"]["$ref"] for operation in document["operations"].values()} == {
        f"#/channels/{topic.value}" for topic in Topic
    }


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_good_example_is_a_message_of_the_document(path: Path, document: dict[str, Any]) -> None:
    message = document["components"]["messages"][path.name.split(".")[0]]
    example = orjson.loads(path.read_bytes())
    jsonschema.validate(example, {**message["payload"], "components": document["components"]})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            {**example, "schema_version": 2}, {**message["payload"], "components": document["components"]}
        )


@pytest.mark.skipif(ASYNCAPI is None, reason="no asyncapi command here: npm install -g @asyncapi/cli")
@pytest.mark.parametrize("broken", [False, True])
def test_the_official_command_judges_the_document(
    broken: bool, document: dict[str, Any], tmp_path: Path
) -> None:
    assert ASYNCAPI is not None
    if broken:
        document["operations"]["consume"]["action"] = "devour"
    (tmp_path / "asyncapi.json").write_text(json.dumps(document))
    metrics = tmp_path / "metrics.json"
    metrics.write_text('{"analyticsEnabled": "false", "infoMessageShown": "true"}')
    done = subprocess.run(
        [ASYNCAPI, "validate", "asyncapi.json", "--fail-severity=warn"],
        cwd=tmp_path,
        env={**os.environ, "ASYNCAPI_METRICS_CONFIG_PATH": str(metrics)},
        capture_output=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode != 0) is broken, done.stdout.decode()
