"""The ledger as others read it."""

from __future__ import annotations

from typing import Any

from freezepoint.core.records import InputRecord
from freezepoint.source.ledger_view import LedgerView
from freezepoint_schemas import codec
from freezepoint_schemas.ledger import Carried, LedgerRecord
from freezepoint_schemas.topics import TopicNames


def test_pieces_of_a_carried_log_are_passed_over() -> None:
    reader: Any = None
    view = LedgerView(reader, TopicNames(), 1.0)
    carried = Carried(through=9, generation=0, chunks=2)
    decided = LedgerRecord(first_offset=3, carried=carried)
    first, second = carried.keys("r")
    records = [
        (b"r", codec.encode_ledger(decided)),
        (first, b'{"first_offset": 3, "entr'),
        (second, b'ies": []}'),
    ]
    for offset, (key, value) in enumerate(records):
        view._take(InputRecord(0, offset, 0, key, value))
    assert view.decided(0, "r").first_offset == 3
    assert view.decided(0, first.decode()).first_offset == -1
