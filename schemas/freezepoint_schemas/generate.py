"""Generates the JSON Schemas of the contract: ``python -m freezepoint_schemas.generate FOLDER`` writes them there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel

from freezepoint_schemas.events import EVENTS
from freezepoint_schemas.ledger import LedgerRecord, ProgressRecord
from freezepoint_schemas.results import Result

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_OTHERS: dict[str, type[BaseModel]] = {
    "result": Result,
    "ledger_record": LedgerRecord,
    "progress_record": ProgressRecord,
}


def schema_files() -> Iterator[tuple[str, bytes]]:
    """File name and content of every schema."""
    for name, model in {**EVENTS, **_OTHERS}.items():
        schema: dict[str, Any] = {"$schema": DIALECT, **model.model_json_schema()}
        if name in EVENTS:
            _say_the_event(schema, name)
        yield f"{name}.json", orjson.dumps(schema, option=orjson.OPT_INDENT_2) + b"\n"


def _say_the_event(schema: dict[str, Any], name: str) -> None:
    """On the wire an event names itself, but for a bare token entry; the key may stand for ``rollout_id``."""
    required = [field for field in schema.get("required", []) if field != "rollout_id"]
    schema["required"] = required if name == "token_entry" else ["event", *required]


def main(folder: Path) -> None:
    """Write every schema there, and remove what is no schema any more."""
    folder.mkdir(parents=True, exist_ok=True)
    files = dict(schema_files())
    for stale in folder.glob("*.json"):
        if stale.name not in files:
            stale.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "schemas/json/v1"))
