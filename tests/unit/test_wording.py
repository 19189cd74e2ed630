"""Numbers in sentences."""

from __future__ import annotations

import pytest

from freezepoint.wording import agreeing, counted


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 records are"), (1, "1 record is"), (2, "2 records are"), (11, "11 records are")],
)
def test_words_go_with_their_number(count: int, said: str) -> None:
    assert f"{counted(count, 'record')} {agreeing(count, 'is', 'are')}" == said
    assert counted(count, "record is", "records are") == said
