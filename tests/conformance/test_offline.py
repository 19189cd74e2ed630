"""The reference's results, case by case, by way of files: what ``build --projection response`` writes."""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from freezepoint.lines import LineError, sources
from freezepoint.offline import OfflineBuilder
from freezepoint.projections import Projection, line_of
from freezepoint.settings import WorkerSettings

_CASES = Path(__file__).parent / "builder-cases.jsonl.gz"


def _fail(error: LineError) -> None:
    raise error


def _built(entries: list[dict[str, Any]], model: str, file: Path) -> dict[str, Any]:
    file.write_bytes(b"\n".join(map(orjson.dumps, entries)))
    with sources([str(file)]) as files:
        [result] = OfflineBuilder(WorkerSettings(), model).results(files, _fail)
    form: dict[str, Any] = orjson.loads(line_of(result, Projection.RESPONSE))
    return form


@pytest.mark.parametrize("shuffled", [False, True])
def test_every_case_alone_is_equal_to_the_reference(tmp_path: Path, shuffled: bool) -> None:
    checked = 0
    for line in gzip.decompress(_CASES.read_bytes()).splitlines():
        case = orjson.loads(line)
        entries = list(case["entries"])
        if shuffled:
            Random(case["case"]).shuffle(entries)
        form = _built(entries, case["model"], tmp_path / "case.jsonl")
        expected = case["expected"]
        if "error" in expected:
            assert form["error"], case["case"]
            expected["error"] = form["error"]  # its words are free
        assert form == expected, case["case"]
        checked += 1
    assert checked == 400
