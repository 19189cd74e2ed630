"""What stands beside the group's offset on Kafka, and what says nothing there."""

from __future__ import annotations

import pytest

from freezepoint.transport.kafka.marks import mark, recorded_in


@pytest.mark.parametrize("recorded", [0, 7, 2**63 - 1])
def test_what_is_written_is_read(recorded: int) -> None:
    assert recorded_in(mark(recorded)) == recorded
    assert len(mark(recorded)) < 64


@pytest.mark.parametrize(
    "text",
    [None, "", "7", "freezepoint:2:recorded=7", "freezepoint:1:recorded=", "freezepoint:1:recorded=-7", mark(7) + "\n", mark(10**19)],
    ids=["none", "empty", "a number", "newer", "cut", "negative", "more", "no offset"],
)  # fmt: skip
def test_any_other_text_says_nothing(text: str | None) -> None:
    assert recorded_in(text) is None
