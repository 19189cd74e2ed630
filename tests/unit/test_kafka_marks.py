"""What stands beside the group's offset on Kafka, and what says nothing there."""

from __future__ import annotations

import asyncio
import gc

import pytest
from aiokafka import errors as kafka
from aiokafka.protocol.commit import OffsetFetchRequest, OffsetFetchResponse_v3

from freezepoint.transport.kafka.client import watch_commits
from freezepoint.transport.kafka.marks import mark, recorded_in, watch_answers


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


class Coordinator:
    """As much of the client's as asks its broker."""

    group_id = "g"

    def __init__(self, *codes: int) -> None:
        self._codes = list(codes)
        self.deaths = 0

    async def _send_req(self, request: object) -> OffsetFetchResponse_v3:
        assert request
        return OffsetFetchResponse_v3(0, [], self._codes.pop(0))

    def coordinator_dead(self) -> None:
        self.deaths += 1


async def test_an_answer_without_partitions_is_not_taken_for_a_group_without_offsets() -> None:
    """A coordinator that has moved (16), is loading (14), or refuses us (30) says so beside the partitions alone."""
    coordinator = Coordinator(14, 16, 30, 0)
    watch_answers(coordinator)
    asked = OffsetFetchRequest("g", [("tokens", [0])])
    with pytest.raises(kafka.GroupLoadInProgressError) as loading:
        await coordinator._send_req(asked)
    with pytest.raises(kafka.NotCoordinatorForGroupError) as moved:
        await coordinator._send_req(asked)
    assert loading.value.retriable
    assert moved.value.retriable
    assert coordinator.deaths == 1
    with pytest.raises(kafka.GroupAuthorizationFailedError, match="g"):
        await coordinator._send_req(asked)
    assert (await coordinator._send_req(asked)).topics == []


async def test_a_commit_that_nobody_waits_for_any_more_fails_without_a_word() -> None:
    """As the client does it: shielded from who waits, who is then cancelled."""
    complaints: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    answered = asyncio.Event()

    class Committing:
        async def _do_commit_offsets(self, assignment: object, offsets: object) -> None:
            await answered.wait()
            raise kafka.KafkaConnectionError(f"{assignment}, {offsets}")

    coordinator = Committing()
    watch_commits(coordinator)

    async def commit() -> None:
        await asyncio.shield(coordinator._do_commit_offsets(1, 2))

    waiting = asyncio.create_task(commit())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    answered.set()
    for _ in range(5):  # turns of the loop
        await asyncio.sleep(0)
    gc.collect()
    assert not complaints
    with pytest.raises(kafka.KafkaConnectionError, match="3, 4"):
        await asyncio.shield(coordinator._do_commit_offsets(3, 4))
