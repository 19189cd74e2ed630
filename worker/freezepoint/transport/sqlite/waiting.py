"""How to notice another process's commit: look often after something came, seldom when nothing does."""

from __future__ import annotations

import asyncio
import contextlib

from freezepoint.settings import SqliteSettings


class Pace:
    """Waits between looks at the database, doubling up to the idle interval; :meth:`wake` ends one at once."""

    def __init__(self, settings: SqliteSettings) -> None:
        self._first_s = settings.poll_interval_ms / 1000
        self._last_s = max(settings.idle_poll_interval_ms, settings.poll_interval_ms) / 1000
        self._next_s = self._first_s
        self._woken = asyncio.Event()

    def reset(self) -> None:
        """Something came: more may follow soon."""
        self._next_s = self._first_s

    def wake(self) -> None:
        self.reset()
        self._woken.set()

    async def wait(self, at_most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), min(self._next_s, at_most_s))
        self._woken.clear()
        self._next_s = min(2 * self._next_s, self._last_s)
