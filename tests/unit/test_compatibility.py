"""Records of the last release and of this one read each other's, by the schemas they were published with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from freezepoint_schemas import codec
from freezepoint_schemas.errors import DecodeError
from freezepoint_schemas.events import EVENTS
from freezepoint_schemas.generate import schema_files
from freezepoint_schemas.models import RECORDS
from freezepoint_schemas.reasons import Reason, ordered
from tests.chaos import golden
from tests.compatibility import problems, removed
from tests.events import Bench, complete, entry, records_of

TODAY: dict[str, dict[str, Any]] = {
    name.removesuffix(".json"): orjson.loads(content) for name, content in schema_files()
}
WRITTEN_BY_WORKERS = sorted(RECORDS.keys() - EVENTS.keys())


def frozen(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = orjson.loads(golden.schema_path(name).read_bytes())
    return schema


def backward(name: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What the last release writes and this one would refuse or lose."""
    return problems(old, new) + removed(old, new)


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_this_release_reads_what_the_last_one_wrote(name: str) -> None:
    assert backward(name, frozen(name), TODAY[name]) == []


@pytest.mark.parametrize("name", WRITTEN_BY_WORKERS)
def test_the_last_release_reads_what_this_one_writes(name: str) -> None:
    """Workers are updated one after the other, and trainers when they like."""
    assert problems(TODAY[name], frozen(name)) == []


Change = Callable[[dict[str, Any]], object]


def _optional_field(schema: dict[str, Any]) -> object:
    return schema["properties"].update(nickname={"type": "string", "default": ""})


COMPATIBLE: dict[str, Change] = {
    "a new optional field": _optional_field,
    "a new optional field of a part": lambda schema: _optional_field(schema["$defs"]["PromptPrefix"]),
    "another description": lambda schema: schema.update(description="other words"),
    "a looser bound": lambda schema: schema["$defs"]["PromptPrefix"]["properties"]["length"].update(
        maximum=2**50
    ),
    "one more type": lambda schema: schema["properties"].update(
        model={"anyOf": [{"type": "string"}, {"type": "null"}]}
    ),
    "a number for an integer": lambda schema: schema["properties"]["token_item_index"]["anyOf"][0].update(
        type="number"
    ),
}

INCOMPATIBLE: dict[str, Change] = {
    "a field removed": lambda schema: schema["properties"].pop("finish_reason"),
    "a field of a part removed": lambda schema: schema["$defs"]["PromptPrefix"]["properties"].pop("digest"),
    "a field renamed": lambda schema: schema["properties"].update(
        response=schema["properties"].pop("response_id")
    ),
    "a new required field": lambda schema: schema["required"].append("policy_version"),
    "a type changed": lambda schema: schema["properties"]["model"].update(type="integer"),
    "a type of several taken away": lambda schema: schema["properties"]["policy_version"]["anyOf"].pop(0),
    "null taken away": lambda schema: schema["properties"]["finish_reason"]["anyOf"].pop(),
    "a tighter bound": lambda schema: schema["properties"]["model_call_id"].update(maxLength=100),
    "a new bound": lambda schema: schema["properties"]["model"].update(maxLength=100),
    "another pattern": lambda schema: schema["properties"]["rollout_id"].update(pattern="^[a-z]+$"),
    "narrower elements": lambda schema: schema["properties"]["generation_token_ids"]["anyOf"][0][
        "items"
    ].update(maximum=255),
    "an encoding taken away": lambda schema: schema["properties"]["prompt_token_ids"]["anyOf"].pop(),
    "an array type taken away": lambda schema: schema["properties"]["prompt_token_ids"]["anyOf"][1][
        "properties"
    ]["dtype"]["enum"].remove("i64"),
    "values listed": lambda schema: schema["properties"]["model"].update(enum=["a", "b"]),
    "another constant": lambda schema: schema["properties"]["event"].update(const="entry"),
    "further fields refused": lambda schema: schema.update(additionalProperties=False),
    "the shape of values fixed": lambda schema: schema["properties"]["output_items"]["items"].update(
        additionalProperties={"type": "string"}
    ),
}


@pytest.mark.parametrize("what", COMPATIBLE)
def test_what_the_policy_allows_passes(what: str) -> None:
    changed = copy.deepcopy(TODAY["token_entry"])
    COMPATIBLE[what](changed)
    assert changed != TODAY["token_entry"]
    assert backward("token_entry", TODAY["token_entry"], changed) == []


@pytest.mark.parametrize("what", INCOMPATIBLE)
def test_what_the_policy_refuses_is_found(what: str) -> None:
    changed = copy.deepcopy(TODAY["token_entry"])
    INCOMPATIBLE[what](changed)
    assert backward("token_entry", TODAY["token_entry"], changed)


def test_what_workers_write_may_not_widen_either() -> None:
    widenings: tuple[Change, ...] = (
        lambda schema: schema["$defs"]["Reason"].update(pattern="^.*$"),
        lambda schema: schema["$defs"]["Span"]["properties"]["start"].update(type="number"),
        lambda schema: schema["required"].remove("snapshot"),
        lambda schema: schema["$defs"]["RoutePatch"]["properties"]["rows"].update(
            anyOf=[{"type": "integer"}, {"type": "null"}]
        ),
    )
    for widen in widenings:
        changed = copy.deepcopy(TODAY["result"])
        widen(changed)
        assert problems(changed, TODAY["result"])


def test_the_elements_of_a_pair_are_compared_by_place() -> None:
    changed = copy.deepcopy(TODAY["progress_record"])
    changed["properties"]["clock_marks"]["items"]["prefixItems"][0] = {"type": "string"}
    assert problems(TODAY["progress_record"], changed)
    assert problems(changed, TODAY["progress_record"])


def test_a_keyword_without_a_rule_is_no_agreement() -> None:
    with pytest.raises(NotImplementedError, match="oneOf"):
        problems({"type": "string"}, {"oneOf": []})


def test_a_reason_of_a_newer_release_is_read_and_written_as_it_is() -> None:
    """Trainers are updated when they like; what masks a result must not keep them from reading it."""
    bench = Bench()
    bench.run(records_of([entry("r", "c", [1], [2]), complete("r", n_calls=2)]))
    newer = orjson.loads(bench.result_values[0])
    newer["reasons"].append("solar_flare")
    result = codec.decode_result(orjson.dumps(newer))
    assert result.reasons == [Reason.CALL_COUNT_MISMATCH, "solar_flare"]
    assert orjson.loads(codec.encode_result(result))["reasons"] == newer["reasons"]
    assert ordered(set(result.reasons)) == result.reasons
    for nonsense in ("Solar flare", "", 7, None):
        with pytest.raises(DecodeError):
            codec.decode_result(orjson.dumps({**newer, "reasons": [nonsense]}))
