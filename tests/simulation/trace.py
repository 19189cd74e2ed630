"""What happened, line by line: to be read by people, and hashed to prove that a seed replays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable


class Trace:
    """``show``: where to print lines as they come."""

    def __init__(self, now: Callable[[], float], show: Callable[[str], None] | None = None) -> None:
        self.lines = 0
        self._now = now
        self._show = show
        self._hash = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def __call__(self, who: str, what: str) -> None:
        line = f"{self._now():12.4f} {who:<10} {what}"
        self.lines += 1
        self._hash.update(line.encode())
        if self._show is not None:
            self._show(line)
