"""Run seeds: ``python -m tests.simulation --seeds 1000``, or one with its trace: ``--seed 7 --trace``."""

from __future__ import annotations

import argparse
import sys
import time
from multiprocessing import Pool

from tests.simulation.world import Outcome, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        outcome = run_seed(arguments.seed, show=_say if arguments.trace else None)
        _report(outcome)
        _say(f"seed {outcome.seed}: {outcome}")
        return int(bool(outcome.violations))
    return _run_all(range(arguments.first, arguments.first + arguments.seeds), arguments.processes)


def _run_all(seeds: range, processes: int) -> int:
    began, failed, virtual_s, results = time.monotonic(), 0, 0.0, 0
    with Pool(processes) as pool:
        for outcome in pool.imap_unordered(run_seed, seeds, chunksize=4):
            _report(outcome)
            failed += bool(outcome.violations)
            virtual_s += outcome.virtual_s
            results += outcome.results
    took_s = time.monotonic() - began
    _say(
        f"{len(seeds)} seeds, {failed} failed; {results} results, {virtual_s / 3600:.0f} virtual hours in {took_s:.0f} s, "
        f"{len(seeds) / took_s:.1f} seeds a second"
    )
    return int(bool(failed))


def _report(outcome: Outcome) -> None:
    for violation in outcome.violations:
        _say(f"seed {outcome.seed}: {violation[:600]}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
