"""A group member in a process of its own, to be killed and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from tests.contract.driving import WAIT_S, Cluster

PROGRAM = Path(__file__).with_name("member_process.py")


class MemberProcess:
    """Runs ``member_process.py``: it owns all it is assigned, and publishes when told."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def started(cls, cluster: Cluster) -> AsyncIterator[Self]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(PROGRAM),
            cluster.group,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **cluster.environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        started = cls(process)
        try:
            yield started
        finally:
            started.kill()
            await process.communicate()  # closes the pipes too

    async def until_owning(self, count: int) -> None:
        """Until it has acquired so many partitions."""
        while await self._line() != f"owning {count}":
            pass

    async def publish(self, partition: int, value: str) -> str:
        """``published``, or the name of the error."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{partition} {value}\n".encode())
        await self._process.stdin.drain()
        while (line := await self._line()).startswith("owning"):
            pass
        return line

    async def _line(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            line = await self._process.stdout.readline()
        assert line, f"the process ended: {self._process.returncode}"
        return line.decode().strip()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
