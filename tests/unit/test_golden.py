"""What the previous release left is read by this one, and what this one writes by the previous one's schemas."""

from __future__ import annotations

from typing import Any

import jsonschema
import orjson
import pytest

from freezepoint_schemas import codec
from freezepoint_schemas.events import InputEvent
from freezepoint_schemas.ledger import CARRY_MARK, PROGRESS_KEY
from freezepoint_schemas.topics import Topic
from tests.chaos import golden
from tests.chaos.checker import Claims, Evidence, check
from tests.chaos.tails import Line
from tests.events import Bench, clear, complete, entry, incomplete, records_of


@pytest.fixture(scope="module")
def topics() -> dict[Topic, list[Line]]:
    return golden.read()


def evidence(topics: dict[Topic, list[Line]], **changes: list[Line]) -> Evidence:
    lines: dict[str, Any] = {
        "tokens": topics[Topic.TOKENS],
        "results": topics[Topic.TRAJECTORIES],
        "ledger": topics[Topic.LEDGER],
        "letters": topics[Topic.DEAD_LETTERS],
        **changes,
    }
    ends: dict[int, int] = {}
    for line in topics[Topic.TOKENS]:
        ends[line.partition] = max(ends.get(line.partition, 0), line.offset + 1)
    return Evidence(partitions=4, end_offsets=ends, open_transactions={}, **lines)


def test_this_release_agrees_with_everything_the_previous_one_published(
    topics: dict[Topic, list[Line]],
) -> None:
    verdict = check(evidence(topics), Claims())
    assert verdict.differences == []
    assert verdict.counts["results"] == len(topics[Topic.TRAJECTORIES]) > 80
    assert verdict.counts["open"] == len(golden.OPEN)


def test_a_record_of_the_previous_release_is_written_again_as_it_was(topics: dict[Topic, list[Line]]) -> None:
    for line in topics[Topic.TRAJECTORIES]:
        assert line.value == codec.encode_result(codec.decode_result(line.value or b""))
    for line in topics[Topic.LEDGER]:
        if line.value is not None and CARRY_MARK not in (line.key or b"")[1:]:
            decode = codec.decode_progress if line.key == PROGRESS_KEY else codec.decode_ledger
            assert line.value == codec.encode_ledger(decode(line.value))


def test_the_previous_release_can_read_what_this_one_writes() -> None:
    """By the schemas that the release was published with."""
    bench = Bench()
    first: list[InputEvent] = [entry("r", "c", [1], [2], policy_version=3), complete("r", reward=1.0)]
    second: list[InputEvent] = [clear("r", group_id="g"), incomplete("r"), complete("r")]
    bench.run(records_of(first + second))
    validate = {name: _validator(name) for name in ("result", "ledger_record", "progress_record")}
    for result in bench.results:
        validate["result"](orjson.loads(codec.encode_result(result)))
    for key, value in bench.ledger.items():
        validate["progress_record" if key == PROGRESS_KEY else "ledger_record"](orjson.loads(value))


def _validator(name: str) -> Any:
    schema = orjson.loads(golden.schema_path(name).read_bytes())
    return jsonschema.Draft202012Validator(schema).validate


def one_more(lines: list[Line]) -> list[Line]:
    return [*lines, lines[0]]


@pytest.mark.parametrize(
    ("broken", "kinds"),
    [
        ({"results": lambda lines: lines[1:]}, {"lost", "ledger_exceeds"}),
        ({"results": one_more}, {"duplicates"}),
        ({"ledger": lambda lines: [line for line in lines if line.key == PROGRESS_KEY]}, {"ledger_lacks"}),
        ({"ledger": lambda lines: [line for line in lines if line.key != PROGRESS_KEY]}, {"lagging"}),
        ({"letters": lambda lines: lines[1:]}, {"letters_lost"}),
        ({"letters": one_more}, {"letters_doubled"}),
        ({"tokens": lambda lines: lines[:1] + lines[2:]}, {"content", "lost", "unfounded"}),
    ],
)
def test_the_checker_names_what_is_wrong(
    topics: dict[Topic, list[Line]], broken: dict[str, Any], kinds: set[str]
) -> None:
    names = {
        "tokens": Topic.TOKENS,
        "results": Topic.TRAJECTORIES,
        "ledger": Topic.LEDGER,
        "letters": Topic.DEAD_LETTERS,
    }
    changes = {name: change(topics[names[name]]) for name, change in broken.items()}
    verdict = check(evidence(topics, **changes), Claims())
    found = {difference.partition(":")[0] for difference in verdict.differences}
    assert found & kinds
