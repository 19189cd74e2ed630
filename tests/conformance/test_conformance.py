"""The reference's results, case by case, whatever the order and the encoding of the entries."""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from freezepoint.core.build import build_result
from freezepoint.core.projection import response_form
from freezepoint_schemas import codec
from freezepoint_schemas.events import RolloutComplete, TokenEntry
from freezepoint_schemas.results import Result
from tests.frozen_logs import by_reference, frozen, recoded

_CASES = [
    orjson.loads(line)
    for line in gzip.decompress((Path(__file__).parent / "builder-cases.jsonl.gz").read_bytes()).splitlines()
]
_SHUFFLES = 3


def _entries(case: dict[str, Any]) -> list[TokenEntry]:
    events = [codec.event_from_object(case["rollout_id"], body) for body in case["entries"]]
    return [event for event in events if isinstance(event, TokenEntry)]


def _built(case: dict[str, Any], entries: list[TokenEntry]) -> Result:
    rollout_id = case["rollout_id"]
    closing = RolloutComplete(rollout_id=rollout_id, model=case["model"])
    return build_result(frozen(entries, closing, rollout_id=rollout_id))


def _form(result: Result) -> dict[str, Any]:
    """The reference's form; the words of an error are free, that there is one is not."""
    form = response_form(result)
    return form | {"error": bool(form["error"])} if "error" in form else form


def _expected(case: dict[str, Any]) -> dict[str, Any]:
    expected: dict[str, Any] = case["expected"]
    return expected | {"error": bool(expected["error"])} if "error" in expected else expected


def test_there_are_as_many_cases_as_were_published() -> None:
    assert len(_CASES) == 400


@pytest.mark.parametrize("case", _CASES, ids=lambda case: f"{case['case']}")
def test_equal_to_the_reference(case: dict[str, Any]) -> None:
    entries = _entries(case)
    assert len(entries) == len(case["entries"])
    result = _built(case, entries)
    assert _form(result) == _expected(case)
    assert _form(codec.decode_result(codec.encode_result(result))) == _expected(case)


@pytest.mark.parametrize("case", _CASES, ids=lambda case: f"{case['case']}")
def test_order_and_encoding_change_nothing(case: dict[str, Any]) -> None:
    random = Random(case["case"])
    entries = _entries(case)
    first = codec.encode_result(_built(case, entries))
    for _ in range(_SHUFFLES):
        shuffled = random.sample(entries, len(entries))
        assert codec.encode_result(_built(case, shuffled)) == first
        packed = [recoded(entry, packed=random.random() < 0.7) for entry in shuffled]
        assert codec.encode_result(_built(case, packed)) == first
        referring = by_reference(entries, random)
        assert codec.encode_result(_built(case, referring)) == first
        assert (
            codec.encode_result(_built(case, [recoded(entry, packed=True) for entry in referring])) == first
        )
