"""A short run of the fuzzer, and proof that it finds what is broken. More: ``python -m tests.fuzz --inputs 10000000``."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from freezepoint.core.ledger import LedgerBook
from freezepoint.core.rollout import RolloutLog
from freezepoint_schemas import arrays, codec
from tests.fuzz.engine import FailedCaseError, run

INPUTS = 200_000
PLANTED_INPUTS = 60_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_a_producer_sends_does_harm() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--seed", "1", "--inputs", str(INPUTS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def nothing(*_: Any) -> None:
    """What a forgotten check does."""


def same(values: Any) -> Any:
    return values


PLANTED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "unwritable values are taken": (codec, "_require_writable", nothing),
    "infinite log probabilities are taken": (arrays, "_finite", same),
    "booleans are tokens": (arrays, "_refuse_booleans", nothing),
    "an oversized log keeps its payload": (RolloutLog, "_drop_payload", nothing),
    "carried chunks are never dropped": (LedgerBook, "_drop_carried", nothing),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken = PLANTED[fault]
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(FailedCaseError):
        run(1, itertools.count(), inputs_max=PLANTED_INPUTS, seconds_max=300)
