"""What collectors and model servers publish: lives of rollouts in pieces, and everything that goes wrong on their side."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from freezepoint.core.records import OutputRecord
from freezepoint_schemas import codec
from freezepoint_schemas.events import (
    CallCancelled,
    CallIntent,
    CaptureIncomplete,
    InputEvent,
    PromptPrefix,
    RolloutCancelled,
    RolloutClear,
    RolloutComplete,
    TokenEntry,
)
from freezepoint_schemas.topics import Topic
from tests.simulation.plan import Plan
from tests.simulation.publishing import Publishing


@dataclass(slots=True)
class Call:
    entry: TokenEntry
    announced: bool
    lost: bool


@dataclass(slots=True)
class Agent:
    """Makes the calls of one life: turns that continue each other, retries, references, a large output."""

    rng: random.Random
    rollout_id: str
    life: int
    calls: list[Call] = field(default_factory=list)

    def work(self) -> list[Call]:
        prompt = self._tokens()
        for turn in range(self.rng.randint(0, 4)):
            made = [self._call(f"{self.life}-{turn}", prompt)]
            if self.rng.random() < 0.1:
                made.append(self._call(f"{self.life}-{turn}-again", prompt))
            self.calls += made
            prompt = [*prompt, *made[-1].entry.generation_token_ids.tolist(), *self._tokens()]
            if self.rng.random() < 0.3:
                self._refer(made[-1])
        return self.calls

    def _call(self, call_id: str, prompt: list[int]) -> Call:
        generation = self._tokens()
        entry = TokenEntry(
            rollout_id=self.rollout_id,
            model_call_id=call_id,
            prompt_token_ids=np.array(prompt, np.int32),
            generation_token_ids=np.array(generation, np.int32),
            generation_log_probs=np.array([-0.5] * len(generation)),
            output_items=[{"type": "message", "content": "x" * (2_500 if self.rng.random() < 0.1 else 5)}],
            token_item_index=0,
            created_at=float(len(self.calls)),
        )
        return Call(entry, self.rng.random() < 0.4, self.rng.random() < 0.03)

    def _refer(self, last: Call) -> None:
        """Write the prompt of the call by reference to an earlier one: instead of in full, or besides."""
        entry, earlier = last.entry, self.calls[0].entry
        stem = [*earlier.prompt_token_ids.tolist(), *earlier.generation_token_ids.tolist()]
        prompt = entry.prompt_token_ids.tolist()
        if earlier.prompt_prefix is not None or prompt[: len(stem)] != stem:
            return
        digest = xxhash.xxh3_128_hexdigest(np.array(stem, "<i4").tobytes())
        prefix = PromptPrefix(call_id=earlier.model_call_id, length=len(stem), digest=digest)
        update = {"prompt_token_ids": np.array(prompt[len(stem) :], np.int32), "prompt_prefix": prefix}
        by_reference = entry.model_copy(update=update)
        if self.rng.random() < 0.5:
            last.entry = by_reference
        else:
            self.calls.append(Call(by_reference, announced=False, lost=False))

    def _tokens(self) -> list[int]:
        return [self.rng.randrange(1_000) for _ in range(self.rng.randint(1, 6))]


@dataclass(slots=True)
class Workload:
    """Runs until everything is published. ``publishing``: the producers, of which each keeps its order."""

    plan: Plan
    publishing: Publishing
    rng: random.Random

    async def run(self) -> None:
        await asyncio.gather(
            *(self._rollout(f"run.{number}-0") for number in range(self.plan.rollouts)),
            self._garbage(),
        )

    async def _rollout(self, rollout_id: str) -> None:
        await self._pause(self.plan.active_s * 0.6)
        for life in range(self.rng.choice([1, 1, 1, 2, 3])):
            if life and self.rng.random() < 0.9:
                await self._send(self._clear(rollout_id))
            elif not life and self.rng.random() < 0.2:
                await self._send(self._dispatch(rollout_id))
            await self._life(rollout_id, life)
            await self._pause(self.plan.active_s * 0.2)

    async def _life(self, rollout_id: str, life: int) -> None:
        calls = Agent(self.rng, rollout_id, life).work()
        sending = [asyncio.create_task(self._publish_call(call)) for call in calls]
        if self.rng.random() < 0.9:  # else a collector that does not wait, as it should
            for task in sending:
                await task
        fate = self.rng.random()
        if fate < 0.07:
            return  # nobody ever ends it
        if fate < 0.12:
            await self._send(self._dispatch(rollout_id))  # given up and cleared
        elif fate < 0.2:
            await self._send(RolloutCancelled(rollout_id=rollout_id, reason="given up", group_id="g"))
        else:
            distinct = len({call.entry.model_call_id for call in calls})
            complete = RolloutComplete(
                rollout_id=rollout_id,
                n_calls=distinct if self.rng.random() < 0.5 else None,
                reward=0.5,
                metadata={"filler": "x" * 3_000} if self.rng.random() < 0.05 else None,
            )
            await self._send(complete)
            if self.rng.random() < 0.1:
                await self._send(complete)
        for task in sending:
            await task

    async def _publish_call(self, call: Call) -> None:
        await self._pause(self.plan.active_s * 0.15)
        producer = self.rng.randrange(self.plan.producers)
        for event in self._events_of(call):
            await self._send(event, producer)
            if self.rng.random() < 0.08:
                await self._pause(self.plan.active_s * 0.3)
                await self._send(event)

    def _events_of(self, call: Call) -> Iterator[InputEvent]:
        entry = call.entry
        names = {"rollout_id": entry.rollout_id, "model_call_id": entry.model_call_id}
        if call.announced:
            yield CallIntent(**names)
        if not call.lost:
            yield entry
        elif self.rng.random() < 0.5:
            yield CaptureIncomplete(**names, reason="lost")
        elif self.rng.random() < 0.5:
            yield CallCancelled(**names)
        if self.rng.random() < 0.02:
            yield entry.model_copy(update={"finish_reason": "conflict"})

    def _clear(self, rollout_id: str) -> InputEvent | OutputRecord:
        if self.rng.random() < 0.3:
            return OutputRecord(Topic.TOKENS, rollout_id.encode(), None)
        return self._dispatch(rollout_id) if self.rng.random() < 0.4 else RolloutClear(rollout_id=rollout_id)

    @staticmethod
    def _dispatch(rollout_id: str) -> RolloutClear:
        return RolloutClear(rollout_id=rollout_id, group_id="g", group_size=2, metadata={"m": 1})

    async def _garbage(self) -> None:
        for _ in range(self.rng.randint(0, 8)):
            await self._pause(self.plan.active_s * 0.25)
            rollout_id = f"run.{self.rng.randrange(self.plan.rollouts + 2)}-0"
            await self._send(self._useless(rollout_id))

    def _useless(self, rollout_id: str) -> OutputRecord:
        record = OutputRecord(Topic.TOKENS, rollout_id.encode(), b"{}")
        intent = codec.encode_event(CallIntent(rollout_id=rollout_id, model_call_id="garbage"))
        match self.rng.randrange(6):
            case 0:
                return replace(record, value=b"not JSON")
            case 1:
                return replace(record, value=b'{"event": "token_entry"}')
            case 2:
                return replace(record, value=codec.encode_event(RolloutComplete(rollout_id="another")))
            case 3:
                return replace(record, value=intent.replace(b'"schema_version":1', b'"schema_version":9'))
            case 4:
                return replace(record, value=intent, partition=self.rng.randrange(self.plan.partitions))
            case _:
                return replace(record, value=intent, key=self.rng.choice([None, b"!", b""]), partition=0)

    async def _send(self, event: InputEvent | OutputRecord, producer: int | None = None) -> None:
        """By any producer, unless by a certain one; returns once it is acknowledged."""
        if not isinstance(event, OutputRecord):
            event = OutputRecord(Topic.TOKENS, event.rollout_id.encode(), codec.encode_event(event))
        number = self.rng.randrange(self.plan.producers) if producer is None else producer
        await self.publishing.send(number, event)

    async def _pause(self, longest_s: float) -> None:
        await asyncio.sleep(self.rng.random() * longest_s)
