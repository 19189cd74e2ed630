"""The state table is whole, and what it forbids changes nothing."""

from __future__ import annotations

import copy
import itertools

import pytest

from freezepoint.core.rollout import TRANSITIONS, Action, FrozenLogError, Input, LogLimits, RolloutLog, State
from freezepoint.core.watermark import Watermark
from freezepoint_schemas.parts import PartAssembler
from freezepoint_schemas.reasons import Reason
from tests.events import complete, entry, incomplete, intent


def new_log() -> RolloutLog:
    return RolloutLog("r", 5, LogLimits(1 << 20, 100), PartAssembler(1 << 20))


def test_every_state_answers_every_input() -> None:
    assert set(TRANSITIONS) == set(itertools.product(State, Input))


def test_only_a_clear_leaves_the_frozen_state() -> None:
    for (state, given), (action, after) in TRANSITIONS.items():
        if state is State.FROZEN:
            assert after is (State.ABSENT if given is Input.CLEAR else State.FROZEN)
            assert action not in (Action.WRITE, Action.FREEZE)


def test_a_frozen_log_refuses_everything_and_stays_as_it_is() -> None:
    log = new_log()
    log.write(entry("r", "c1", [1], [2]), 10)
    frozen = log.freeze(complete("r"), 0, 9)
    before = copy.deepcopy(
        {name: getattr(log, name) for name in ("_intents", "_marks", "_faults", "size_bytes")}
    )
    keys = set(log._entries)
    for attempt in (
        lambda: log.write(entry("r", "c2", [1], [2]), 10),
        lambda: log.write(intent("r", "c3"), 1),
        lambda: log.write(incomplete("r"), 1),
        lambda: log.fault(Reason.INVALID_ENTRY),
        lambda: log.freeze(complete("r"), 0, 10),
    ):
        with pytest.raises(FrozenLogError):
            attempt()
    assert {name: getattr(log, name) for name in before} == before
    assert set(log._entries) == keys
    assert len(frozen.entries) == 1


def test_the_watermark_refuses_a_release_of_what_is_not_held() -> None:
    watermark = Watermark()
    watermark.hold(3)
    watermark.hold(3)
    watermark.hold(7)
    watermark.release(3)
    assert watermark.lowest(99) == 3
    watermark.release(3)
    assert watermark.lowest(99) == 7
    with pytest.raises(ValueError, match="not held"):
        watermark.release(3)
    assert watermark.lowest(99) == 7
    watermark.release(7)
    assert watermark.lowest(99) == 99
