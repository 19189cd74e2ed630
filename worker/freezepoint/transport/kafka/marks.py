"""What the group's coordinator keeps: offsets, and the text beside each, how far the ledger had come by then.

It outlives the ledger's topic, and tells one that is new from one that was lost. Kafka's own tools commit without any text, and a
text of another form says nothing.
"""

from __future__ import annotations

import re
from typing import Any

from aiokafka import errors as kafka
from aiokafka.protocol.commit import OffsetFetchRequest

_MARK = re.compile(r"freezepoint:1:recorded=([0-9]{1,19})")


def mark(recorded: int) -> str:
    """The text of an owner whose ledger has recorded that every record below this offset was applied."""
    return f"freezepoint:1:recorded={recorded}"


def recorded_in(text: str | None) -> int | None:
    """What such a text says; None of any other."""
    found = _MARK.fullmatch(text or "")
    return None if found is None else int(found[1])


def require_answer(response: Any, group: str) -> None:
    """A coordinator that has just moved or started answers without any partition, and says why beside them, where the client
    never looks: it would take a group's offsets for none.

    :raises KafkaError: what it says there.
    """
    error = kafka.for_code(getattr(response, "error_code", 0))
    if error is not kafka.NoError:
        raise error(group)


def watch_answers(coordinator: Any) -> None:
    """Let a consumer's own coordination take such an answer for what it is: it asks again where that may help."""
    send = coordinator._send_req  # noqa: SLF001 - see require_answer

    async def watched(request: Any) -> Any:
        response = await send(request)
        if isinstance(request, OffsetFetchRequest):
            try:
                require_answer(response, coordinator.group_id)
            except kafka.NotCoordinatorForGroupError:
                coordinator.coordinator_dead()
                raise
        return response

    coordinator._send_req = watched  # noqa: SLF001 - as above
