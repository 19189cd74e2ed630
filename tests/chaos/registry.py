"""The list of scenarios. One is added by writing a coroutine function and decorating it."""

from __future__ import annotations

import importlib
import pkgutil
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos import scenarios
from tests.chaos.broker import ChaosBroker
from tests.chaos.figures import Report
from tests.chaos.stage import Stage, stage

DEFAULT_SECONDS = 60.0


@dataclass(frozen=True)
class Scenario:
    """``row``: of DELIVERY.md's table of faults, or what it covers beside it. ``setting``: arguments of the stage.
    ``share``: which part of ``--duration`` its load lasts."""

    name: str
    row: str
    play: Callable[[Stage], Awaitable[None]]
    setting: dict[str, Any]
    share: float


_SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *, share: float = 1.0, **setting: Any
) -> Callable[[Callable[[Stage], Awaitable[None]]], Callable[[Stage], Awaitable[None]]]:
    """Register a scenario under its function's name. The first line of its docstring names its row of the table."""

    def register(play: Callable[[Stage], Awaitable[None]]) -> Callable[[Stage], Awaitable[None]]:
        name = play.__name__.replace("_", "-")
        assert name not in _SCENARIOS, f"two scenarios are called {name}"
        assert play.__doc__, f"{name} does not name its row"
        _SCENARIOS[name] = Scenario(name, play.__doc__.splitlines()[0].rstrip("."), play, setting, share)
        return play

    return register


def all_scenarios() -> dict[str, Scenario]:
    """Every scenario by name, in the order of the modules and of their definition."""
    for module in sorted(pkgutil.iter_modules(scenarios.__path__), key=lambda module: module.name):
        importlib.import_module(f"{scenarios.__name__}.{module.name}")
    return dict(_SCENARIOS)


async def play(
    chosen: Scenario, broker: ChaosBroker, folder: Path, *, seed: int, seconds: float = DEFAULT_SECONDS
) -> Report:
    """Play one scenario and report; whatever goes wrong is part of the report."""
    report = Report(chosen.name, chosen.row)
    own = folder / chosen.name
    own.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        async with stage(
            broker, report, own, seed=seed, seconds=max(1.0, seconds * chosen.share), **chosen.setting
        ) as made:
            await chosen.play(made)
    except Exception as error:  # noqa: BLE001 - one broken scenario must not keep the others from being played
        report.error = f"{type(error).__name__}: {error}"
        (own / "error.txt").write_text(traceback.format_exc())
    report.seconds = time.monotonic() - began
    return report
