"""The contract's files: schemas do not drift, examples mean what their names say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import orjson
import pytest
from pydantic import BaseModel

from freezepoint_schemas import codec
from freezepoint_schemas.errors import DecodeError
from freezepoint_schemas.events import EVENTS, PACKED, TokenEntry
from freezepoint_schemas.generate import documents, main
from freezepoint_schemas.reasons import Reason
from tests.events import Bench, complete, entry, records_of

SCHEMAS = Path(__file__).parents[2] / "schemas"
GOOD = sorted((SCHEMAS / "examples/v1/good").glob("*.json"))
BAD = sorted((SCHEMAS / "examples/v1/bad").glob("*.json"))
ROLLOUT = "run7.12-0"
ODD_FIELDS: dict[str, Any] = {
    "prompt_prefix": {"call_id": "z", "length": 7, "digest": "0" * 32},
    "routed_experts": np.zeros((2, 1, 2), np.uint16),
    "parent_call_id": "",
    "policy_version": 0,
    "finish_reason": "stop",
    "response_id": "é",
}
"""All that is not in every entry."""


def schema_of(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = orjson.loads((SCHEMAS / "json/v1" / f"{name}.json").read_bytes())
    return schema


def test_the_generated_documents_are_the_committed_ones() -> None:
    """After a change of the models: ``make schemas``."""
    committed = [SCHEMAS / "asyncapi.json", *(SCHEMAS / "json").rglob("*.json")]
    assert {str(path.relative_to(SCHEMAS)): path.read_bytes() for path in committed} == documents()


def test_generating_removes_what_is_no_schema_any_more(tmp_path: Path) -> None:
    (tmp_path / "json/v1").mkdir(parents=True)
    (tmp_path / "json/v1/gone.json").write_text("{}")
    main(tmp_path)
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")}
    assert written == documents().keys()


def test_every_event_has_a_good_example() -> None:
    assert {path.name.split(".")[0] for path in GOOD} == set(EVENTS)


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_good_example_decodes_and_fits_its_schema(path: Path) -> None:
    raw = path.read_bytes()
    event = codec.decode_event(ROLLOUT, raw)
    assert event.event == path.name.split(".")[0]
    jsonschema.validate(orjson.loads(raw), schema_of(event.event))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_good_example_survives_both_encodings(path: Path, packed: bool) -> None:
    event = codec.decode_event(ROLLOUT, path.read_bytes())
    raw = codec.encode_event(event, packed=packed)
    again = codec.decode_event(ROLLOUT, raw)
    assert codec.encode_event(again) == codec.encode_event(event)
    jsonschema.validate(orjson.loads(raw), schema_of(event.event))


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_a_bad_example_is_refused_for_the_reason_in_its_name(path: Path) -> None:
    with pytest.raises(DecodeError) as caught:
        codec.decode_event(ROLLOUT, path.read_bytes())
    assert caught.value.reason == Reason(path.name.split(".")[0])
    assert str(caught.value)


class _Item(BaseModel):
    """Not JSON by itself; a caller's item may hold one."""

    kind: str = "text"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {name: value for name, value in ODD_FIELDS.items() if name != "prompt_prefix"},
        ODD_FIELDS,
        {"routed_experts": [[[1, 2]], [[3, 300]]]},
        {"routed_experts": [["ragged"], []]},
        {"generation_log_probs": [-0.1]},
        {"output_items": [{"a": None, "deep": [{"b": None}]}], "token_item_index": None},
        {"output_items": [{"part": _Item()}]},
    ],
    ids=lambda fields: ",".join(fields) or "few",
)
def test_a_packed_entry_is_what_its_model_writes(fields: dict[str, Any]) -> None:
    """It is written without the model's serializers, which must have made the same of it, field for field."""
    event = entry(ROLLOUT, "a", [1, 2, 3], [4], **fields)
    assert {*ODD_FIELDS, "token_item_index", *orjson.loads(codec.encode_event(event))} == {
        *TokenEntry.model_fields
    }
    by_model = {"event": event.event, **event.model_dump(context=PACKED, exclude_none=True)}
    assert codec.encode_event(event, packed=True) == orjson.dumps(by_model)


def test_packed_and_plain_examples_mean_the_same() -> None:
    plain, packed = (
        codec.decode_event(ROLLOUT, (SCHEMAS / f"examples/v1/good/token_entry.{name}.json").read_bytes())
        for name in ("plain", "packed")
    )
    assert isinstance(plain, TokenEntry)
    assert isinstance(packed, TokenEntry)
    for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
        assert np.array_equal(getattr(plain, name), getattr(packed, name))
        assert getattr(plain, name).dtype == getattr(packed, name).dtype


def test_inline_arrays_move_off_their_item() -> None:
    event = codec.decode_event(
        ROLLOUT, (SCHEMAS / "examples/v1/good/token_entry.inline_arrays.json").read_bytes()
    )
    assert isinstance(event, TokenEntry)
    assert event.token_item_index == 1
    assert event.output_items[1] == {"type": "message", "content": []}


@pytest.mark.parametrize("packed", [False, True])
def test_a_result_fits_its_schema_and_survives_its_encoding(packed: bool) -> None:
    bench = Bench()
    routes = [[[300]], [[2]], [[3]]]
    (result,) = bench.run(
        records_of([entry("r", "c", [1, 2], [3], routed_experts=routes), complete("r", reward=1.0)])
    )
    raw = codec.encode_result(result, packed=packed)
    jsonschema.validate(orjson.loads(raw), schema_of("result"))
    again = codec.decode_result(raw)
    assert codec.encode_result(again) == codec.encode_result(result)


def test_ledger_records_fit_their_schemas() -> None:
    bench = Bench()
    bench.run(records_of([entry("r", "c", [1, 2], [3]), complete("r")]))
    for key, value in bench.ledger.items():
        name = "progress_record" if key == b"!progress" else "ledger_record"
        jsonschema.validate(orjson.loads(value), schema_of(name))


def test_a_newer_result_or_ledger_is_refused() -> None:
    for decode in (codec.decode_result, codec.decode_ledger, codec.decode_progress):
        with pytest.raises(DecodeError):
            decode(b'{"schema_version": 2}')
        with pytest.raises(DecodeError):
            decode(b"[]")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt_token_id": [1]}, "prompt_token_ids is missing (there is 'prompt_token_id')"),
        ({"promptTokenIds": [1], "prompt_ids": [2]}, "is missing (there is 'promptTokenIds', 'prompt_ids')"),
        ({"generation_token_ids": [1]}, "neither an event nor a token entry: prompt_token_ids is missing"),
        ({"event": None, "prompt_token_ids": [1]}, "unknown event None; there are token_entry, call_intent,"),
        ({"event": "rollout_completed"}, "unknown event 'rollout_completed'; there are token_entry,"),
        ({"prompt_token_ids": [1], "generation_tokens": [2]}, "generation_token_ids: Field required"),
    ],
)
def test_what_is_spelt_otherwise_is_told_by_name(body: dict[str, Any], message: str) -> None:
    with pytest.raises(DecodeError) as caught:
        codec.decode_event("r", orjson.dumps({"model_call_id": "c", **body}))
    assert message in str(caught.value)


def test_what_is_taken_as_it_comes() -> None:
    """As docs/schemas.md says."""
    fields = {"model_call_id": "c", "prompt_token_ids": [1], "generation_token_ids": [2]}
    numbers = f'"output_items":[{{"whole":{2**64 - 1},"beyond":{2**64}}}],"generation_log_probs":[0.5]'
    decoded = codec.decode_event("r", orjson.dumps(fields)[:-1] + f",{numbers}}}".encode())
    assert isinstance(decoded, TokenEntry)
    assert decoded.generation_log_probs.tolist() == [0.5]
    assert [type(number).__name__ for number in decoded.output_items[0].values()] == ["int", "float"]
