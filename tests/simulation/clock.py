"""Virtual time, and processes that can be stopped or killed between any two steps of theirs.

An event loop without a selector: when nothing is ready, time jumps to the next timer. Nothing sleeps, one thread runs
everything, and the order of everything follows from the order of calls.

A process is whatever runs in a context that names it. Each callback of it passes :meth:`Process.admits`, so a stopped process
(SIGSTOP) does not run a single line, and its due timers run when it wakes, as they would.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("PROCESS")
STEPS_AT_ONE_TIME_MAX = 200_000
BURIAL_ROUNDS_MAX = 100


class Killed(BaseException):
    """Raised into the remains of a killed process wherever they would touch the outside world."""


class SimulationStuck(Exception):
    """Nothing can ever happen again, or time has stopped."""


class Process:
    """One operating-system process."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.alive = True
        self.stopped = False
        self.tasks: list[asyncio.Task[Any]] = []
        self._loop = loop
        self._held: list[asyncio.Handle] = []
        self._context = contextvars.copy_context()
        self._context.run(PROCESS.set, self)
        self._steps_left = -1
        self._trap: Callable[[], None] | None = None

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as part of this process."""
        return self._context.run(self._loop.create_task, work)

    def require_alive(self) -> None:
        """:raises Killed: nothing of this process reaches the outside any more."""
        if not self.alive:
            raise Killed(self.name)

    def admits(self, handle: asyncio.Handle) -> bool:
        """Whether the callback may run now; kept for later if the process is stopped."""
        if self._steps_left >= 0:
            self._steps_left -= 1
            if self._steps_left < 0 and self._trap is not None:
                trap, self._trap = self._trap, None
                trap()
        if self.stopped:
            self._held.append(handle)
        return not self.stopped

    def after_steps(self, steps: int, action: Callable[[], None]) -> None:
        """Do something just before the step that comes after so many others."""
        self._steps_left, self._trap = steps, action

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def wake(self) -> None:
        """SIGCONT: everything that became due meanwhile runs, in its order."""
        self.stopped = False
        held, self._held = self._held, []
        self._loop.resubmit(held)

    def kill(self) -> None:
        """SIGKILL. Its coroutines are unwound, since Python would otherwise do that at a time of its own; whatever they
        try on the way is refused (:meth:`require_alive`), so that nothing of it is seen outside."""
        self.alive = False
        self._trap = None
        self.wake()
        self._bury(BURIAL_ROUNDS_MAX)

    def _bury(self, rounds: int) -> None:
        pending = [task for task in self.tasks if not task.done()]
        for task in self.tasks:
            if task.done() and not task.cancelled():
                task.exception()  # seen
        if pending and not rounds:
            raise SimulationStuck(f"tasks of {self.name} survive their cancellation: {pending}")
        for task in pending:
            task.cancel()
        if pending:
            self._loop.call_soon(self._bury, rounds - 1, context=contextvars.Context())

    def unseen_failures(self) -> list[BaseException]:
        """Exceptions of finished tasks that nobody ever looked at."""
        return [
            error
            for task in self.tasks
            if task.done() and not task.cancelled() and getattr(task, "_log_traceback", False)
            if (error := task.exception()) is not None
        ]


class _Step(asyncio.Handle):
    __slots__ = ()
    _context: contextvars.Context

    def _run(self) -> None:
        process = self._context.get(PROCESS)
        if process is None or process.admits(self):
            super()._run()


class _TimedStep(asyncio.TimerHandle):
    __slots__ = ()
    _context: contextvars.Context

    def _run(self) -> None:
        process = self._context.get(PROCESS)
        if process is None or process.admits(self):
            super()._run()


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. ``problems``: what reached the loop's exception handler."""

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self._virtual_now = 0.0
        self._steps_now = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_count = 0
        self.set_exception_handler(self._remember)
        self.set_task_factory(_task_of_process)

    def time(self) -> float:
        return self._virtual_now

    def resubmit(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def call_at(  # type: ignore[override]  # the stub ties arguments to the callback; that changes nothing here
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Timers of one time run in the order in which they were set."""
        timer = _TimedStep(when, callback, args, self, context)
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, timer))
        return timer

    def _call_soon(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> asyncio.Handle:
        handle = _Step(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def _run_once(self) -> None:
        """One round of the loop: what is ready, or else what is due next.

        :raises SimulationStuck: nothing will ever be, or time has stopped.
        """
        ready, timers = self._ready, self._timers
        if not ready and not self._stopping:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise SimulationStuck("nothing is ready and nothing is scheduled")
            self._virtual_now = max(self._virtual_now, timers[0][0])
            self._steps_now = 0
        while timers and timers[0][0] <= self._virtual_now:
            ready.append(heapq.heappop(timers)[2])
        self._steps_now += len(ready)
        if self._steps_now > STEPS_AT_ONE_TIME_MAX:
            self._steps_now = 0
            raise SimulationStuck(f"time does not pass: busy without waiting are {list(ready)[:5]}")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time comes."""

    def _write_to_self(self) -> None:
        """There is only one thread, and it is awake."""

    def _remember(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, Killed):
            self.problems.append(f"{context['message']}: {error!r}")


def _task_of_process(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
    process = PROCESS.get(None)
    if process is not None:
        process.tasks.append(task)
    return task
