"""The reference's results again, by the reference's functions: out of files, and out of anybody's source."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from freezepoint.consumer import trajectories_for_rollout, trajectories_from_source
from freezepoint.store import TokenStore

_CASES = [
    orjson.loads(line)
    for line in gzip.decompress((Path(__file__).parent / "builder-cases.jsonl.gz").read_bytes()).splitlines()
]


class Source:
    """A source that knows nothing of freezepoint."""

    def __init__(self, entries: list[Any]) -> None:
        self.snapshot = SimpleNamespace(entries=entries, incomplete=False, snapshot_id="s", version=7)

    async def freeze(self, rollout_id: str) -> Any:
        return self.snapshot

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return True

    async def close(self) -> None:
        pass


def _form(form: dict[str, Any]) -> dict[str, Any]:
    """The words of an error are free, that there is one is not."""
    return form | {"error": bool(form["error"])} if "error" in form else form


@pytest.mark.parametrize("case", _CASES, ids=lambda case: f"{case['case']}")
def test_equal_to_the_reference_out_of_files(case: dict[str, Any], tmp_path: Path) -> None:
    rollout_id = case["rollout_id"]
    lines = [orjson.dumps(body) + b"\n" for body in case["entries"]]
    (tmp_path / f"{rollout_id}.tokens.jsonl").write_bytes(b"".join(lines))
    built = trajectories_for_rollout(rollout_id, [tmp_path], model=case["model"])
    assert built is not None
    snapshot = built.pop("_capture_snapshot")
    assert _form(built) == _form(case["expected"])
    assert snapshot["version"] == len(lines) + 1
    frozen = TokenStore(tmp_path).freeze_now(rollout_id)
    assert frozen.snapshot_id == snapshot["snapshot_id"]


@pytest.mark.parametrize("case", _CASES, ids=lambda case: f"{case['case']}")
async def test_equal_to_the_reference_out_of_a_source(case: dict[str, Any]) -> None:
    entries = [SimpleNamespace(**body) if number % 2 else body for number, body in enumerate(case["entries"])]
    built = await trajectories_from_source(case["rollout_id"], Source(entries), model=case["model"])
    assert built.pop("_capture_snapshot") == {"snapshot_id": "s", "version": 7}
    assert _form(built) == _form(case["expected"])
