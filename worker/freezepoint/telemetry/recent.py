"""What happened lately in one worker, for people who look at it: bounded, in memory, gone with the process."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from typing import Any, Final

FINISHED_MAX: Final = 50
SAMPLES_MAX: Final = 60
SAMPLE_S: Final = 1.0
ERROR_CHARS_MAX: Final = 500
RATED: Final = ("records", "results", "masked", "dead_letters")


@dataclass(frozen=True, slots=True)
class Finished:
    """One published result. ``at``: Unix seconds of its commit; ``seconds``: from its freeze to there."""

    rollout_id: str
    partition: int
    freeze_offset: int
    masked: bool
    reasons: tuple[str, ...]
    seconds: float
    at: float


@dataclass(slots=True)
class Recent:
    """The last results, the rates of the last minute, the last error."""

    finished: deque[Finished] = field(default_factory=lambda: deque(maxlen=FINISHED_MAX))
    last_error: tuple[float, str, str] | None = None
    """Unix seconds, what failed, and how."""
    _samples: deque[tuple[float, dict[str, int]]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))

    def failed(self, what: str, error: BaseException | None) -> None:
        """Note an error that the worker survives."""
        self.last_error = (time.time(), what, " ".join(str(error).split())[:ERROR_CHARS_MAX])

    def sample(self, now: float, counts: Counter[str]) -> None:
        """Take the counts down, once a second at most; ``now`` is monotonic."""
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now, {name: counts[name] for name in RATED}))

    def per_second(self, now: float, counts: Counter[str]) -> dict[str, float]:
        """How fast it went since the oldest sample, a minute ago at most."""
        began, before = self._samples[0] if self._samples else (now, {})
        elapsed_s = max(now - began, SAMPLE_S)
        return {name: round((counts[name] - before.get(name, 0)) / elapsed_s, 3) for name in RATED}

    def as_json(self) -> dict[str, Any]:
        """The newest first."""
        error = self.last_error
        return {
            "finished": [asdict(result) for result in reversed(self.finished)],
            "last_error": None if error is None else dict(zip(("at", "what", "error"), error, strict=True)),
        }
