"""TokenSink: token entries and marks of rollouts to the broker, durable before a call returns, small on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self, get_args

import orjson
from pydantic import ValidationError

from freezepoint.core.records import OutputRecord
from freezepoint.errors import (
    BrokerError,
    ConfigurationError,
    FreezepointError,
    InputError,
    MissingTopicError,
)
from freezepoint.settings import Settings, load
from freezepoint.sink.channel import Channel
from freezepoint.sink.given import entry_of, event_of, named, rollout_of
from freezepoint.sink.owed import OwedMarks
from freezepoint.sink.references import References, RolloutCalls
from freezepoint_schemas import codec
from freezepoint_schemas.events import InputEvent, RolloutClear, RolloutComplete, TokenEntry
from freezepoint_schemas.topics import Topic, is_rollout_id

Wire = Literal["packed", "json"]
log = logging.getLogger(__name__)

REFERENCE_CACHE_BYTES = 256 * 1024 * 1024
PENDING_BYTES_MAX = 512 * 1024 * 1024
OFF_LOOP_TOKENS = 16_384
"""Entries of more tokens, or with routed experts, are checked and encoded on a thread: some take seconds."""
RETRY_MIN_S = 0.5
RETRY_MAX_S = 10.0
_REQUEST_TIMEOUT_MS_MIN = 1_000


class TokenSink:
    """Publishes the calls of rollouts; one instance for each server process and event loop.

    It is built without a loop and connects on first use. Every method returns once the record is durable and raises
    one of ``freezepoint.errors`` otherwise, at the latest after ``deadline_s``, connecting included; a record that was
    not acknowledged in time may still arrive, which a repeat of it does no harm to.

    :param broker: ``kafka://host:port,…`` or ``sqlite:///file``; default: the settings' (environment, TOML file).
    :param run: put before every rollout id, with a dot: the same ids recur in every training run.
    :param topic_prefix: as in the settings.
    :param deadline_s: how long a model call is held up at most, in seconds.
    :param wire: how token arrays are written.
    :param by_reference: write of a prompt only what follows an earlier call of its rollout that this sink published.
        Where other processes clear ids that come again under the same name, use ``run``, or turn it off.
    :param reference_cache_bytes: memory for the tokens of earlier calls.
    :param pending_bytes_max: above this, what waits for a slow broker makes further puts fail at once.
    :param kafka: more of the ``kafka`` settings, by name.
    :param sqlite: more of the ``sqlite`` settings, by name.
    :raises ConfigurationError: an argument cannot be used.
    """

    def __init__(  # noqa: PLR0913 - each is a keyword that a server's configuration may name
        self,
        *,
        broker: str | None = None,
        run: str = "",
        topic_prefix: str | None = None,
        deadline_s: float = 10.0,
        wire: Wire = "packed",
        by_reference: bool = True,
        reference_cache_bytes: int = REFERENCE_CACHE_BYTES,
        pending_bytes_max: int = PENDING_BYTES_MAX,
        kafka: Mapping[str, Any] | None = None,
        sqlite: Mapping[str, Any] | None = None,
    ) -> None:
        if run and not is_rollout_id(run):
            raise ConfigurationError(
                f"run {run!r} cannot begin a rollout id: letters, digits, '.', '_' and '-', beginning with a letter or digit"
            )
        if wire not in get_args(Wire):
            raise ConfigurationError(f"wire {wire!r} is none of {', '.join(get_args(Wire))}")
        if deadline_s <= 0:
            raise ConfigurationError("deadline_s must be above 0")
        self.deadline_s = float(deadline_s)
        self._run = run
        self._packed = wire == "packed"
        self._references = References(reference_cache_bytes) if by_reference else None
        self._unremembered: list[tuple[TokenEntry, RolloutCalls]] = []
        self._owed = OwedMarks()
        self._repaying: asyncio.Task[None] | None = None
        self._closing = False
        self._wake: asyncio.Event | None = None
        settings = _settings(broker, topic_prefix, self.deadline_s, kafka or {}, sqlite or {})
        self._channel = Channel(settings, self.deadline_s, pending_bytes_max)

    async def put(self, entry: Any) -> None:
        """Publish one finished call: a ``TokenEntry``, a dict, or an object with an entry's attributes.

        :raises InputError: the entry is not what the contract allows.
        :raises BrokerError: it is not known to be durable; mark the rollout, or put the same entry again.
        :raises ConfigurationError: topics are missing or the broker refuses this user.
        """
        began = time.monotonic()
        self._remember()
        rollout_id = named(self._run, rollout_of(entry))
        work = partial(entry_of, entry, rollout_id)
        checked = await asyncio.to_thread(work) if _is_large(entry) else work()
        calls = self._references.rollout(rollout_id) if self._references is not None else None
        encode = partial(_record, self._shortened(checked, calls), packed=self._packed)
        record = await asyncio.to_thread(encode) if _is_large(checked) else encode()
        acknowledged = (
            None
            if calls is None or checked.prompt_prefix is not None
            else partial(self._acknowledged, checked, calls)
        )
        told = self._start(rollout_id, [record], acknowledged)
        await self._channel.finished(told, began, f"putting call {checked.model_call_id[:80]}")

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", *, reason: str = "") -> None:
        """Say that a call of this rollout could not be captured, so that its result is masked.

        When this raises, the mark is not lost: it is kept and sent as soon as the broker answers, while this process
        lives.
        """
        fields = {"model_call_id": model_call_id or "", "reason": reason}
        mark = self._event("capture_incomplete", rollout_id, fields)
        try:
            await self._publish(mark)
        except (BrokerError, MissingTopicError):
            self._owe(_record(mark))
            raise

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Say that a call is about to be dispatched: if no entry follows, it was lost."""
        await self._publish(self._event("call_intent", rollout_id, {"model_call_id": model_call_id}))

    async def cancel_call(self, rollout_id: str, model_call_id: str) -> None:
        """Withdraw :meth:`begin_call`: the call never generated anything."""
        await self._publish(self._event("call_cancelled", rollout_id, {"model_call_id": model_call_id}))

    async def complete(self, rollout_id: str, **fields: Any) -> None:
        """End the rollout: freeze what was recorded and build the result.

        :param fields: ``n_calls``, ``reward``, ``group_id``, … of ``freezepoint_schemas.events.RolloutComplete``.
        """
        unknown = sorted(set(fields) - set(RolloutComplete.model_fields))
        if unknown:
            raise InputError(f"complete() knows no {', '.join(unknown)}")
        given = {name: value for name, value in fields.items() if value is not None}
        event = self._event("rollout_complete", rollout_id, given)
        await self._publish(event)
        self._forget(event.rollout_id)

    async def clear(self, rollout_id: str) -> None:
        """Forget everything recorded under this id: it is about to be dispatched (again)."""
        event = RolloutClear(rollout_id=named(self._run, rollout_id))
        self._owed.settle(self._owed.of(event.rollout_id))
        self._forget(event.rollout_id)
        try:
            await self._publish(event)
        finally:  # what was put meanwhile may lie before the clear
            self._forget(event.rollout_id)

    async def close(self) -> None:
        """Wait for what is under way and release everything. Closing again does nothing."""
        if self._closing:
            return
        self._closing = True
        if self._repaying is not None and self._wake is not None and not self._repaying.done():
            self._wake.set()
            await asyncio.wait({self._repaying}, timeout=self.deadline_s)
        if self._owed:
            log.error(
                "closed while the broker had not taken the incomplete marks of rollouts %s: mask them by hand",
                ", ".join(self._owed.rollout_ids()[:100]),
            )
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # -------------------------------------------------------------------------------------------------- publishing

    def _event(self, name: str, rollout_id: str, fields: Mapping[str, Any]) -> InputEvent:
        return event_of(named(self._run, rollout_id), name, fields)

    async def _publish(self, event: InputEvent) -> None:
        began = time.monotonic()
        told = self._start(event.rollout_id, [_record(event)])
        await self._channel.finished(told, began, f"sending {event.event}")

    def _start(
        self,
        rollout_id: str,
        records: Sequence[OutputRecord],
        on_durable: Callable[[], None] | None = None,
    ) -> asyncio.Future[None]:
        """Begin to send, behind the marks that are owed for this rollout: what follows may be its end."""
        marks = self._owed.of(rollout_id)
        if not marks:
            return self._channel.start(records, on_durable)

        def durable() -> None:
            self._owed.settle(marks)
            if on_durable is not None:
                on_durable()

        return self._channel.start([*marks, *records], durable)

    @staticmethod
    def _shortened(entry: TokenEntry, calls: RolloutCalls | None) -> TokenEntry:
        """The entry with its prompt by reference, where there is something to refer to."""
        if calls is None or entry.prompt_prefix is not None:
            return entry
        continued = calls.continued(entry.prompt_token_ids, entry.model_call_id)
        if continued is None:
            return entry
        rest = entry.prompt_token_ids[continued.call.length :]
        return entry.model_copy(update={"prompt_prefix": continued.prefix, "prompt_token_ids": rest})

    def _acknowledged(self, entry: TokenEntry, calls: RolloutCalls) -> None:
        """From here on, later prompts may refer to this call. It is remembered behind whoever waits for it, and before
        anything else is put."""
        self._unremembered.append((entry, calls))
        asyncio.get_running_loop().call_soon(self._remember)

    def _remember(self) -> None:
        acknowledged, self._unremembered = self._unremembered, []
        for entry, calls in acknowledged:
            if self._references is not None:
                self._references.add(
                    entry.rollout_id,
                    calls,
                    entry.model_call_id,
                    entry.prompt_token_ids,
                    entry.generation_token_ids,
                )

    def _forget(self, rollout_id: str) -> None:
        if self._references is not None:
            self._references.forget(rollout_id)

    # ------------------------------------------------------------------------------------------------- marks owed

    def _owe(self, mark: OutputRecord) -> None:
        dropped = self._owed.owe(mark)
        if dropped is not None:
            log.error("too many incomplete marks wait for the broker; lost that of rollout %r", dropped.key)
        if not self._closing and (self._repaying is None or self._repaying.done()):
            self._wake = asyncio.Event()
            self._repaying = self._channel.background(self._repay(self._wake))

    async def _repay(self, wake: asyncio.Event) -> None:
        """Try again until the broker has taken all; once more when the sink closes."""
        pause_s = RETRY_MIN_S
        while self._owed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), pause_s)
            marks = self._owed.all()
            try:
                await self._channel.start(marks)
            except FreezepointError:
                if wake.is_set():
                    return
                pause_s = min(2 * pause_s, RETRY_MAX_S)
            else:
                self._owed.settle(marks)


def _settings(
    broker: str | None,
    topic_prefix: str | None,
    deadline_s: float,
    kafka: Mapping[str, Any],
    sqlite: Mapping[str, Any],
) -> Settings:
    """The settings with what was given. The transports give up by themselves at the deadline, or a little later."""
    base = load(broker=broker, topic_prefix=topic_prefix)
    timeout_ms = max(_REQUEST_TIMEOUT_MS_MIN, int(deadline_s * 1000))
    try:
        sections = {
            "kafka": {**base.kafka.model_dump(), "request_timeout_ms": timeout_ms, **kafka},
            "sqlite": {**base.sqlite.model_dump(), "busy_timeout_ms": timeout_ms, **sqlite},
        }
        return base.model_copy(
            update={
                name: type(getattr(base, name)).model_validate(section) for name, section in sections.items()
            }
        )
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ConfigurationError(f"the sink's setting {where}: {problem['msg']}") from None


def _record(event: InputEvent, *, packed: bool = True) -> OutputRecord:
    """:raises InputError: something in it is no JSON."""
    try:
        value = codec.encode_event(event, packed=packed)
    except (TypeError, orjson.JSONEncodeError) as error:
        raise InputError(
            f"{event.event} of rollout {event.rollout_id} cannot be written as JSON: {error}"
        ) from None
    return OutputRecord(Topic.TOKENS, event.rollout_id.encode("ascii"), value)


def _is_large(entry: Any) -> bool:
    read = entry.get if isinstance(entry, Mapping) else partial(getattr, entry)
    if read("routed_experts", None) is not None:
        return True
    prompt = read("prompt_token_ids", None)
    return hasattr(prompt, "__len__") and len(prompt) > OFF_LOOP_TOKENS
