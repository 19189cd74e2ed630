"""The transaction coordinator: epochs, fencing, markers that take their time, and a commit request without a sequence. A
careless one, as Kafka's of 4.3, writes no marker to a partition that has no leader, and forgets it."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from freezepoint.core.records import OutputRecord
from freezepoint.errors import BrokerError, BrokerUnavailableError, FencedError
from freezepoint.transport.kafka.decisions import Decision
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
    decision: Decision = Decision.FORGOTTEN


class TransactionCoordinator:
    """``on_commit`` is told of every transaction when it is decided, which is when it cannot be undone any more;
    ``on_contradiction`` of one that a partition is told the opposite of.

    ``begun``: who asked for an epoch, and when. ``logs``: what workers write to.
    """

    def __init__(
        self,
        rng: random.Random,
        on_commit: Callable[[Transaction], None],
        on_contradiction: Callable[[Transaction, Log], None],
        logs: Sequence[Log],
    ) -> None:
        self.careless = rng.random() < 0.5
        self.crashes = 0
        self._on_contradiction = on_contradiction
        self._logs = logs
        self.begun: dict[tuple[str, int], tuple[str, float]] = {}
        self._rng = rng
        self._on_commit = on_commit
        self._owners: dict[str, _Owner] = {}
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.Context()

    @property
    def open(self) -> list[str]:
        """Transactional ids whose transaction has not ended."""
        return [name for name, owner in self._owners.items() if owner.current is not None]

    @property
    def states(self) -> set[TxnState]:
        """Of the workers' transactions that have not ended, all that hold records."""
        current = (owner.current for name, owner in self._owners.items() if not name.startswith("foreign."))
        return {
            transaction.state for transaction in current if transaction is not None and transaction.records
        }

    def decision(self, transactional_id: str) -> Decision:
        """What became of its last transaction: nothing that is known, once a producer has started since."""
        owner = self._owners.get(transactional_id, _Owner())
        if owner.current is not None and owner.current.state is TxnState.OPEN:
            return Decision.OPEN
        return owner.decision

    def initialise(self, transactional_id: str, process: str) -> int | None:
        """A new epoch, which fences whoever had the id. None while a transaction of it is not ended; an open one is aborted,
        and its owner fenced all the same."""
        owner = self._owners.setdefault(transactional_id, _Owner())
        if owner.current is not None:
            if owner.current.state is TxnState.OPEN:
                owner.epoch += 1
                self._end(owner, owner.current, commit=False)
            return None
        if self.begun.get((transactional_id, owner.epoch), (process,))[0] != process:
            self._forget(owner, transactional_id)
        owner.epoch += 1
        owner.decision = Decision.FORGOTTEN
        self.begun[transactional_id, owner.epoch] = process, self._loop.time()
        return owner.epoch

    def _forget(self, owner: _Owner, transactional_id: str) -> None:
        if owner.decision is Decision.FORGOTTEN:
            self.excuse(transactional_id)

    def excuse(self, transactional_id: str) -> None:
        """Whoever knew what was decided could not tell it, and nobody else can know."""
        for log in self._logs:
            for left in log.left_open(transactional_id):
                left.excused = True

    async def add(self, transactional_id: str, epoch: int, logs: Sequence[Log]) -> None:
        """Partitions of the id's transaction, which begins with the first; they need no leader for that.

        :raises FencedError: a newer epoch exists.
        """
        owner = await self._begun(transactional_id, epoch)
        assert owner.current is not None
        owner.current.logs += [log for log in logs if log not in owner.current.logs]

    async def produce(
        self, transactional_id: str, epoch: int, log: Log, records: Sequence[tuple[int, OutputRecord]]
    ) -> None:
        """Append to a log as part of the id's transaction, which begins with the first record.

        :raises FencedError: a newer epoch exists.
        :raises BrokerUnavailableError: the log has no leader.
        """
        log.require_leader()
        owner = await self._begun(transactional_id, epoch)
        assert owner.current is not None
        for place, record in records:
            log.append(record, owner.current)
            owner.current.records.append((place, record))

    async def _begun(self, transactional_id: str, epoch: int) -> _Owner:
        """Its transaction is open."""
        connection = self.crashes
        owner = self._owner(transactional_id, epoch)
        while owner.current is not None and owner.current.state is not TxnState.OPEN:
            await self._settled(
                owner
            )  # the client asks again while the markers of the last one are being written
            owner = self._owner(transactional_id, epoch)
            if connection != self.crashes:
                raise BrokerUnavailableError("the broker crashed")
        if owner.current is None:
            owner.current = Transaction(transactional_id, epoch)
            self._loop.call_later(TIMEOUT_S, self._expire, owner, owner.current, context=self._context)
        return owner

    def end(self, transactional_id: str, epoch: int, *, commit: bool = True) -> None:
        """EndTxn in its version 0: ends whatever transaction of that epoch is open when it arrives.

        :raises FencedError: a newer epoch exists.
        :raises BrokerError: there is no transaction.
        """
        owner = self._owner(transactional_id, epoch)
        if owner.current is not None and owner.current.state is TxnState.OPEN:
            self._end(owner, owner.current, commit=commit)
        elif owner.last_was_commit is not commit:
            raise BrokerError("there is no transaction to end")

    def _owner(self, transactional_id: str, epoch: int) -> _Owner:
        owner = self._owners[transactional_id]
        if owner.epoch != epoch:
            raise FencedError(f"{transactional_id} has epoch {owner.epoch}, not {epoch}")
        return owner

    def _end(self, owner: _Owner, transaction: Transaction, *, commit: bool) -> None:
        if not commit and not transaction.records:
            self._interrupted(transaction)
        transaction.state = TxnState.COMMITTING if commit else TxnState.ABORTING
        transaction.commits = commit
        owner.last_was_commit = commit
        owner.decision = Decision.COMMIT if commit else Decision.ABORT
        if commit and transaction.records:
            self._on_commit(transaction)
        for log in list(transaction.logs):
            longest = SLOW_MARKER_S if self._rng.random() < 0.02 else MARKER_S
            self._loop.call_later(
                self._rng.random() * longest, self._mark, owner, transaction, log, context=self._context
            )

    def _interrupted(self, transaction: Transaction) -> None:
        """It was to tell what was decided before, and is aborted: its partitions are told that."""
        owner = self._owners[transaction.transactional_id]
        if owner.epoch != transaction.epoch:
            self.excuse(transaction.transactional_id)

    def _mark(self, owner: _Owner, transaction: Transaction, log: Log) -> None:
        if log.has_leader:
            for left in log.mark(transaction):
                if left.commits is not transaction.commits and not left.excused:
                    self._on_contradiction(left, log)
        elif self.careless:
            transaction.logs.remove(log)
        else:
            self._loop.call_later(MARKER_S, self._mark, owner, transaction, log, context=self._context)
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
