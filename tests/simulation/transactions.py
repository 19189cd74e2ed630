"""The transaction coordinator: epochs, fencing, markers that take their time, and a commit request without a sequence."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from freezepoint.core.records import OutputRecord
from freezepoint.errors import BrokerError, FencedError
from tests.simulation.log import Log, Transaction, TxnState

TIMEOUT_S = 60.0
MARKER_S = 0.05
SLOW_MARKER_S = 8.0


@dataclass(slots=True)
class _Owner:
    """What the coordinator knows of one transactional id."""

    epoch: int = -1
    current: Transaction | None = None
    settled: list[asyncio.Future[None]] = field(default_factory=list)
    last_was_commit: bool = False


class TransactionCoordinator:
    """``on_commit`` is told of every transaction when it is decided, which is when it cannot be undone any more."""

    def __init__(self, rng: random.Random, on_commit: Callable[[Transaction], None]) -> None:
        self._rng = rng
        self._on_commit = on_commit
        self._owners: dict[str, _Owner] = {}
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.Context()

    @property
    def open(self) -> list[str]:
        """Transactional ids whose transaction has not ended."""
        return [name for name, owner in self._owners.items() if owner.current is not None]

    async def initialise(self, transactional_id: str) -> int:
        """A new epoch: fences whoever had the id, and answers once its transaction is settled."""
        owner = self._owners.setdefault(transactional_id, _Owner())
        owner.epoch += 1
        epoch = owner.epoch
        if owner.current is not None and owner.current.state is TxnState.OPEN:
            self._end(owner, owner.current, commit=False)
        await self._settled(owner)
        return epoch

    async def produce(
        self, transactional_id: str, epoch: int, log: Log, records: Sequence[tuple[int, OutputRecord]]
    ) -> None:
        """Append to a log as part of the id's transaction, which begins with the first record.

        :raises FencedError: a newer epoch exists.
        """
        owner = self._owner(transactional_id, epoch)
        while owner.current is not None and owner.current.state is not TxnState.OPEN:
            await self._settled(
                owner
            )  # the client asks again while the markers of the last one are being written
            owner = self._owner(transactional_id, epoch)
        if owner.current is None:
            owner.current = Transaction(transactional_id, epoch)
            self._loop.call_later(TIMEOUT_S, self._expire, owner, owner.current, context=self._context)
        for place, record in records:
            log.append(record, owner.current)
            owner.current.records.append((place, record))

    def end(self, transactional_id: str, epoch: int) -> None:
        """EndTxn in its version 0: commits whatever transaction of that epoch is open when it arrives.

        :raises FencedError: a newer epoch exists.
        :raises BrokerError: there is no transaction.
        """
        owner = self._owner(transactional_id, epoch)
        if owner.current is not None and owner.current.state is TxnState.OPEN:
            self._end(owner, owner.current, commit=True)
        elif not owner.last_was_commit:
            raise BrokerError("there is no transaction to commit")

    def _owner(self, transactional_id: str, epoch: int) -> _Owner:
        owner = self._owners[transactional_id]
        if owner.epoch != epoch:
            raise FencedError(f"{transactional_id} has epoch {owner.epoch}, not {epoch}")
        return owner

    def _end(self, owner: _Owner, transaction: Transaction, *, commit: bool) -> None:
        transaction.state = TxnState.COMMITTING if commit else TxnState.ABORTING
        transaction.commits = commit
        owner.last_was_commit = commit
        if commit:
            self._on_commit(transaction)
        for log in list(transaction.logs):
            longest = SLOW_MARKER_S if self._rng.random() < 0.02 else MARKER_S
            self._loop.call_later(
                self._rng.random() * longest, self._mark, owner, transaction, log, context=self._context
            )

    def _mark(self, owner: _Owner, transaction: Transaction, log: Log) -> None:
        log.mark(transaction)
        if transaction.logs:
            return
        transaction.state = TxnState.ENDED
        owner.current = None
        settled, owner.settled = owner.settled, []
        for future in settled:
            if not future.done():
                future.set_result(None)

    def _expire(self, owner: _Owner, transaction: Transaction) -> None:
        if transaction.state is TxnState.OPEN:
            owner.epoch += 1
            self._end(owner, transaction, commit=False)

    async def _settled(self, owner: _Owner) -> None:
        """Until the transaction of now, which ends by itself, has all its markers."""
        if owner.current is not None:
            future: asyncio.Future[None] = self._loop.create_future()
            owner.settled.append(future)
            await future
