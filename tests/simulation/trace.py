"""What happened, line by line: to be read by people, and hashed to prove that a seed replays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable


class Trace:
    """``show``: where to print lines as they come. ``timeouts``: when a worker decided that, of which partition and id."""

    def __init__(self, now: Callable[[], float], show: Callable[[str], None] | None = None) -> None:
        self.timeouts: list[tuple[float, int, str]] = []
        self.now = now
        self._show = show
        self._hash = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def __call__(self, who: str, what: str) -> None:
        line = f"{self.now():12.4f} {who:<10} {what}"
        self._hash.update(line.encode())
        if self._show is not None:
            self._show(line)
