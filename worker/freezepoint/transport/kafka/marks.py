"""The text that the group's coordinator keeps beside an offset: how far the ledger had come by then.

It outlives the ledger's topic, and tells one that is new from one that was lost. Kafka's own tools commit without any text, and a
text of another form says nothing.
"""

from __future__ import annotations

import re

_MARK = re.compile(r"freezepoint:1:recorded=([0-9]{1,19})")


def mark(recorded: int) -> str:
    """The text of an owner whose ledger has recorded that every record below this offset was applied."""
    return f"freezepoint:1:recorded={recorded}"


def recorded_in(text: str | None) -> int | None:
    """What such a text says; None of any other."""
    found = _MARK.fullmatch(text or "")
    return None if found is None else int(found[1])
