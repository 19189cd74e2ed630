"""Generates the contract's documents: ``python -m freezepoint_schemas.generate FOLDER`` writes them there.

``json/v1/`` holds a JSON Schema for each record; ``asyncapi.json`` says which of them lie in which topic.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel

from freezepoint_schemas.asyncapi import document
from freezepoint_schemas.events import EVENTS
from freezepoint_schemas.models import RECORDS

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCHEMAS = "json/v1"
ASYNCAPI = "asyncapi.json"


def schema_of(model: type[BaseModel], **options: Any) -> dict[str, Any]:
    """A record's JSON Schema as it is on the wire."""
    schema = model.model_json_schema(**options)
    if model in EVENTS.values():
        _say_the_event(schema)
    return schema


def schema_files() -> Iterator[tuple[str, bytes]]:
    """File name and content of every JSON Schema."""
    for name, model in RECORDS.items():
        yield f"{name}.json", _written({"$schema": DIALECT, **schema_of(model)})


def documents() -> dict[str, bytes]:
    """Every generated document: its path below the folder, and its content."""
    schemas = {f"{SCHEMAS}/{name}": content for name, content in schema_files()}
    return {**schemas, ASYNCAPI: _written(document(schema_of))}


def _say_the_event(schema: dict[str, Any]) -> None:
    """On the wire an event names itself, but for a bare token entry; the key may stand for ``rollout_id``."""
    required = [field for field in schema.get("required", []) if field != "rollout_id"]
    bare = schema["properties"]["event"]["const"] == "token_entry"
    schema["required"] = required if bare else ["event", *required]


def _written(body: dict[str, Any]) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n"


def export(folder: Path) -> list[Path]:
    """Write every document there; what else is there stays."""
    paths = []
    for name, content in documents().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        paths.append(path)
    return paths


def main(folder: Path) -> None:
    """Write every document, and remove what is no schema any more."""
    written = set(export(folder))
    for stale in set((folder / SCHEMAS).glob("*.json")) - written:
        stale.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "schemas"))
