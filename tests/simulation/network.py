"""Requests on their way: they arrive late, get lost, or are served while the answer is lost."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from freezepoint.errors import BrokerUnavailableError
from tests.simulation.clock import Process
from tests.simulation.trace import Trace

T = TypeVar("T")
TIMEOUT_S = 30.0
LATENCY_S = 0.02
LATE_S = 50.0
"""Longer than anybody waits for an answer: the request is served when nobody expects it any more."""
NOTICED_S = 1.0


@dataclass(slots=True)
class Network:
    """``down``: the broker is. ``cut``: who cannot reach it. ``loss``: how often a request or its answer is lost, of those
    whose names begin with ``losing``. ``slowness_s``: how much longer than usual everything may take."""

    rng: random.Random
    trace: Trace
    down: bool = False
    cut: set[Process] = field(default_factory=set)
    loss: float = 0.0
    losing: str = ""
    slowness_s: float = 0.0
    crashes: int = 0
    """How often the broker crashed, which breaks every connection: what was on its way goes with it."""
    _context: contextvars.Context = field(default_factory=contextvars.Context)

    def reaches(self, process: Process) -> bool:
        return not self.down and process not in self.cut

    @overload
    async def request(
        self, process: Process, name: str, serve: Callable[[], Coroutine[Any, Any, T]], timeout_s: float = ...
    ) -> T: ...

    @overload
    async def request(
        self, process: Process, name: str, serve: Callable[[], T], timeout_s: float = ...
    ) -> T: ...

    async def request(
        self,
        process: Process,
        name: str,
        serve: Callable[[], Any],
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        """Have the broker serve it.

        :raises BrokerUnavailableError: no answer; it may have been served, or may be still.
        """
        process.require_alive()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        arrives_s, answered = self._fate(process, name)
        if arrives_s is not None:
            arrive = _Arrival(self, process, name, serve, answer if answered else None, self.crashes)
            loop.call_later(arrives_s, arrive, context=self._context)
        if arrives_s is None or not answered:
            self.trace(process.name, f"{name}: {'request' if arrives_s is None else 'answer'} gets lost")
            if self.rng.random() < 0.7:
                loop.call_later(self.rng.random() * NOTICED_S, _disconnect, answer, name)
        timer = loop.call_later(timeout_s, _give_up, answer, name)
        try:
            return await answer
        finally:
            timer.cancel()

    def latency_s(self) -> float:
        return self.rng.random() ** 2 * (LATENCY_S + self.slowness_s)

    def _fate(self, process: Process, name: str) -> tuple[float | None, bool]:
        """After how many seconds the request arrives, if it does, and whether its answer does."""
        if not self.reaches(process):
            return None, False
        if self.loss and name.startswith(self.losing) and self.rng.random() < self.loss:
            match self.rng.randrange(3):
                case 0:
                    return None, False
                case 1:
                    return self.latency_s(), False
                case _:
                    return self.rng.random() * LATE_S, True
        return self.latency_s(), True


def _give_up(answer: asyncio.Future[Any], name: str) -> None:
    if not answer.done():
        answer.set_exception(BrokerUnavailableError(f"no answer to {name} in time"))


def _disconnect(answer: asyncio.Future[Any], name: str) -> None:
    if not answer.done():
        answer.set_exception(BrokerUnavailableError(f"the connection broke during {name}"))


@dataclass(slots=True)
class _Arrival:
    network: Network
    process: Process
    name: str
    serve: Callable[[], Any]
    answer: asyncio.Future[Any] | None
    connection: int

    def __call__(self) -> None:
        unsent = not self.process.alive and self.network.rng.random() < 0.5
        if unsent or not self.network.reaches(self.process) or self.connection != self.network.crashes:
            self.network.trace(self.process.name, f"{self.name}: never arrives")
            if self.answer is not None:
                self._reply(lambda answer: _disconnect(answer, self.name))
            return
        self.network.trace(self.process.name, self.name)
        try:
            served = self.serve()
        except Exception as error:  # noqa: BLE001 - the answer
            self._fail(error)
            return
        if isinstance(served, Awaitable):
            asyncio.ensure_future(served).add_done_callback(self._finished)
        else:
            self._succeed(served)

    def _finished(self, task: asyncio.Future[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._succeed(task.result())
        else:
            self._fail(error)

    def _succeed(self, result: Any) -> None:
        self._reply(lambda answer: answer.set_result(result))

    def _fail(self, error: BaseException) -> None:
        self._reply(lambda answer: answer.set_exception(error))

    def _reply(self, deliver: Callable[[asyncio.Future[Any]], None]) -> None:
        answer, loop = self.answer, asyncio.get_running_loop()
        if answer is None:
            return

        def arrive() -> None:
            if answer.done():
                return
            if self.network.reaches(self.process):
                deliver(answer)
            elif self.network.rng.random() < 0.7:
                _disconnect(answer, self.name)

        loop.call_later(self.network.latency_s(), arrive)
