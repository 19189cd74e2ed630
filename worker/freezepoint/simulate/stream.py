"""Simulated rollouts side by side: the events of many in the order in which concurrent producers publish them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from freezepoint.simulate.agent import Agent
from freezepoint.simulate.profile import Profile
from freezepoint.simulate.recorder import Recorder, Step
from freezepoint.simulate.truth import Truth, truth_of
from freezepoint_schemas.events import InputEvent, RolloutCancelled, RolloutComplete


@dataclass(frozen=True, slots=True)
class Simulated:
    """One event in publish order. ``truth`` stands on the event that closes its rollout."""

    event: InputEvent
    truth: Truth | None = None


def simulate(profile: Profile) -> Iterator[Simulated]:
    """The events of all rollouts as concurrent producers would publish them; holds the open rollouts only."""
    running: list[tuple[float, int, Iterator[tuple[float, Simulated]], Simulated]] = []
    waiting = iter(range(profile.rollouts))

    def start(now: float) -> None:
        index = next(waiting, None)
        if index is not None:
            schedule(index, _script(profile, index, now))

    def schedule(index: int, script: Iterator[tuple[float, Simulated]]) -> bool:
        upcoming = next(script, None)
        if upcoming is not None:
            heapq.heappush(running, (upcoming[0], index, script, upcoming[1]))
        return upcoming is not None

    for _ in range(min(profile.concurrency, profile.rollouts)):
        start(0.0)
    while running:
        now, index, script, simulated = heapq.heappop(running)
        yield simulated
        if not schedule(index, script):
            start(now)


def _script(profile: Profile, index: int, begin: float) -> Iterator[tuple[float, Simulated]]:
    """One rollout's events with their times; the last one carries its truth."""
    rollout = SimulatedRollout.draw(profile, index)
    for step in rollout.steps:
        yield begin + step.at, Simulated(step.event)
    yield begin + rollout.closing.at, Simulated(rollout.closing.event, rollout.truth)


@dataclass(frozen=True, slots=True)
class SimulatedRollout:
    """Everything published of one rollout, in order, and the truth about it."""

    steps: list[Step]
    closing: Step
    truth: Truth

    @classmethod
    def draw(cls, profile: Profile, index: int) -> SimulatedRollout:
        """The rollout of that number."""
        rng = np.random.default_rng([profile.seed, index])
        task, attempt = divmod(index, profile.group_size)
        rollout_id = f"{profile.run}.{task}-{attempt}"
        agent = Agent(profile, rng)
        if rng.random() >= profile.no_records:
            agent.work()
        recorder = Recorder(profile, rng, rollout_id, agent.calls)
        recorder.record()
        cancelled = bool(recorder.steps) and rng.random() < profile.cancelled
        if cancelled:
            recorder.cut()
        closing = _closing(profile, rng, recorder, task, cancelled=cancelled)
        truth = truth_of(rollout_id, agent.calls, recorder.steps, closing.event)
        return cls(recorder.steps, closing, truth)


def _closing(
    profile: Profile, rng: np.random.Generator, recorder: Recorder, task: int, *, cancelled: bool
) -> Step:
    at = (recorder.steps[-1].at if recorder.steps else 0.0) + 0.1
    group_id = f"{profile.run}.{task}"
    group_size = min(profile.group_size, profile.rollouts - task * profile.group_size)
    if cancelled:
        event = RolloutCancelled(
            rollout_id=recorder.rollout_id, reason="given up", group_id=group_id, group_size=group_size
        )
        return Step(at, event)
    complete = RolloutComplete(
        rollout_id=recorder.rollout_id,
        n_calls=len(recorder.calls) if recorder.counted else None,
        reward=float(rng.integers(0, 2)),
        group_id=group_id,
        group_size=group_size,
    )
    return Step(at, complete)
