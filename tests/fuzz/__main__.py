"""``python -m tests.fuzz``: run the fuzzer, or one of its cases alone."""

from __future__ import annotations

import argparse
import itertools
import sys
import traceback
import warnings

from tests.fuzz.engine import FailedCaseError, limit_address_space, peak_rss_bytes, run

RSS_GROWTH_BYTES_MAX = 200 << 20
TRACING_LEAVES_BYTES = 32
"""What tracemalloc leaves behind each time it is switched off (28 bytes in CPython 3.11): once for each input, not ours."""
WARM_UP_INPUTS = 500


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=sys.maxsize, help="stop after so many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--outcomes", action="store_true", help="list the distinct outcomes")
    options = parser.parse_args()
    if options.inputs == sys.maxsize and options.seconds == float("inf"):
        options.inputs = 100_000
    limit_address_space()
    warnings.simplefilter("error")
    cases = itertools.count(options.start) if options.case is None else [options.case]
    try:
        if options.case is None:
            run(
                options.seed, itertools.count(1 << 39), inputs_max=WARM_UP_INPUTS, seconds_max=options.seconds
            )
        before = peak_rss_bytes()
        report = run(options.seed, cases, inputs_max=options.inputs, seconds_max=options.seconds)
    except FailedCaseError as failure:
        traceback.print_exception(failure.__cause__)
        print(f"\nFAILED {failure}")
        return 1
    grown = peak_rss_bytes() - before
    print(
        f"seed {options.seed}: {report.inputs} inputs in {report.cases} cases, {report.seconds:.1f} s, "
        f"{report.inputs / max(report.seconds, 1e-9):.0f} inputs/s, {len(report.outcomes)} distinct outcomes, "
        f"slowest {report.slowest_s:.3f} s, peak RSS {peak_rss_bytes() >> 20} MiB (+{grown >> 20}), "
        f"worst memory factor {report.worst_factor:.1f}"
    )
    if options.outcomes:
        for outcome, count in report.outcomes.most_common():
            print(f"{count:9} {outcome}")
    if grown > RSS_GROWTH_BYTES_MAX + TRACING_LEAVES_BYTES * report.inputs:
        print(f"FAILED: the process grew by {grown} bytes")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
