"""Some hundred seeds, and proof that they would find what is wrong. More: ``python -m tests.simulation --seeds 10000``."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation.mutations import MUTATIONS, mutated
from tests.simulation.world import run_seed

SEEDS = 200
SEEDS_A_TEST = 20
MUTANT_SEEDS_MAX = 250


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_A_TEST))
def test_every_seed_ends_with_one_result_of_each_frozen_life(first: int) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        outcome = run_seed(seed)
        replay = f"python -m tests.simulation --seed {seed} --trace"
        assert not outcome.violations, f"{replay}\n" + "\n".join(outcome.violations)


def test_a_seed_replays_to_the_letter() -> None:
    assert run_seed(7).digest == run_seed(7).digest != run_seed(8).digest


def test_a_seed_replays_in_any_process() -> None:
    """Nothing depends on the order of hashes or on where objects lie in memory."""
    command = [sys.executable, "-m", "tests.simulation", "--seed", "7"]
    said = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_broken_on_purpose_is_caught(name: str) -> None:
    with mutated(name):
        for seed in range(MUTANT_SEEDS_MAX):
            violations = run_seed(seed).violations
            if violations:
                sys.stdout.write(f"{name}: seed {seed}: {violations[0]}\n")
                return
    pytest.fail(f"{name} was not caught by {MUTANT_SEEDS_MAX} seeds")
