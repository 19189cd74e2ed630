"""Runs cases: each is a function of the run's seed and its own number alone, so that it replays alone."""

from __future__ import annotations

import re
import resource
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from freezepoint_schemas import prompts
from tests.fuzz import checks, grammar

STREAM_RECORDS = 14
STREAM_SHARE = 0.08
"""Of the cases; about half of the inputs, for a stream has many."""
MEMORY_SAMPLE = 101
PEAK_FACTOR = 400
PEAK_CONSTANT = 1 << 20
"""Peak of everything that one value of n bytes causes, from its decoding to its result in three encodings:
``PEAK_FACTOR * n + PEAK_CONSTANT``."""
CPU_S_MAX = 0.25
CPU_S_PER_BYTE = 20e-6
ADDRESS_SPACE_BYTES = 3 << 30


@dataclass(slots=True)
class Report:
    """What a run saw."""

    cases: int = 0
    inputs: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    worst_factor: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)


class FailedCaseError(Exception):
    """A case broke a rule; the message says how to run it alone."""


def run(seed: int, cases: Iterable[int], *, inputs_max: int, seconds_max: float) -> Report:
    """Run these cases until so many inputs or seconds are spent. :raises FailedCaseError: at the first that fails."""
    report = Report()
    began = time.monotonic()
    prompts.TEXT_BYTES_MIN = 1  # so that the short prompts here are read as long ones are
    for case in cases:
        if report.inputs >= inputs_max or report.seconds >= seconds_max:
            break
        try:
            _run_case(seed, case, report)
        except Exception as error:
            raise FailedCaseError(
                f"{type(error).__name__}: {error}\nalone: python -m tests.fuzz --seed {seed} --case {case}"
            ) from error
        report.cases += 1
        report.seconds = time.monotonic() - began
    return report


def _run_case(seed: int, case: int, report: Report) -> None:
    random = Random((seed << 40) + case)
    before = time.process_time()
    if random.random() < STREAM_SHARE:
        hostility = random.choice([0.0, 0.1, 0.3, 0.8])
        stream = grammar.Stream(random, hostility).make(STREAM_RECORDS)
        size = sum(len(item.value or b"") for item in stream)
        report.inputs += len(stream)
        for outcome in checks.check_stream(stream, random):
            report.outcomes[outcome] += 1
        stream_factor = 20
    else:
        value = grammar.event_value(random, _conversation(random))
        size = len(value)
        report.inputs += 1
        outcome = _measured(value, report) if case % MEMORY_SAMPLE == 0 else checks.check_value(value)
        report.outcomes[_kind(outcome)] += 1
        stream_factor = 1
    spent = time.process_time() - before
    report.slowest_s = max(report.slowest_s, spent)
    assert spent < stream_factor * (CPU_S_MAX + CPU_S_PER_BYTE * size), f"{spent:.3f} s for {size} bytes"


def _conversation(random: Random) -> grammar.Conversation:
    conversation = grammar.Conversation(random)
    for _ in range(random.randrange(3)):
        conversation.entry()
    return conversation


def _measured(value: bytes, report: Report) -> str:
    tracemalloc.start()
    try:
        outcome = checks.check_value(value)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < PEAK_FACTOR * len(value) + PEAK_CONSTANT, f"{peak} bytes at the peak for {len(value)}"
    report.worst_factor = max(report.worst_factor, (peak - PEAK_CONSTANT) / max(1, len(value)))
    return outcome


def _kind(outcome: str) -> str:
    """The outcome without what is the input's own."""
    outcome = re.sub(r"(names rollout|unknown event) .*", r"\1", outcome)
    return re.sub(r"\[.*\]|'.*'|\d+", "_", outcome)[:120]


def limit_address_space() -> None:
    """A memory bomb becomes a MemoryError of the case that holds it."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, hard))


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
