"""How long a connection is welcome. A broker ends an authentication with its token, or after ``connections.max.reauth.ms``, and
then closes the connection upon the next request (KIP-368). The client never authenticates again, and a request that is cut
off is not for nothing: a commit that breaks off costs a partition its owner. So connections are renewed before, while nothing
is under way on them."""

from __future__ import annotations

import time
from typing import Any, Final
from weakref import WeakKeyDictionary

from aiokafka.conn import AIOKafkaConnection, CloseReason, OAuthAuthenticator
from aiokafka.protocol.admin import SaslAuthenticateRequest

from freezepoint.transport.kafka.bearer import BearerSource

EARLY_S_MAX: Final = 30.0
EARLY_SHARE: Final = 0.25
"""How much of a session is left when its connection is renewed, at most ``EARLY_S_MAX``."""
ROUNDING_S: Final = 2.0
_BROKEN_OFF: Final = b"\x01"


class Sessions:
    """Renews the connections of clients that authenticate. ``source``: of their tokens; None where they have passwords."""

    def __init__(self, source: BearerSource | None) -> None:
        self._source = source
        self._session_s: float | None = None
        """The broker's own limit; None where it has none."""
        self._renew_at: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        self.known = False
        """Whether the broker has told."""

    def learn(self, lifetime_ms: int) -> None:
        """What the broker told a connection just now: its own limit, or what is left of the token if that is less."""
        self.known = True
        lifetime_s, token_s = lifetime_ms / 1000, self._token_s()
        is_the_tokens = token_s is not None and lifetime_s >= token_s - ROUNDING_S
        self._session_s = None if lifetime_ms == 0 or is_the_tokens else lifetime_s

    def watch(self, client: Any) -> None:
        """``client``: the one inside a producer, a consumer or an admin client. Whatever it sends, it asks itself for a connection
        first."""
        get = client._get_conn  # noqa: SLF001 - the client has no hook

        async def renewed(node_id: Any, **options: Any) -> Any:
            for connection in list(client._conns.values()):  # noqa: SLF001 - as above
                if self._is_due(connection):
                    connection.close(reason=CloseReason.IDLE_DROP)
            found = await get(node_id, **options)
            if found is not None and found not in self._renew_at:
                self._renew_at[found] = time.monotonic() + self.renew_in_s()
            return found

        client._get_conn = renewed  # noqa: SLF001 - as above

    def _is_due(self, connection: Any) -> bool:
        due_at = self._renew_at.get(connection)
        return due_at is not None and time.monotonic() >= due_at and not connection._requests  # noqa: SLF001 - as above

    def renew_in_s(self) -> float:
        """When a connection that is made now is renewed; infinity for never."""
        ends = [end for end in (self._session_s, self._token_s()) if end is not None]
        if not ends:
            return float("inf")
        session_s = max(0.0, min(ends))
        return session_s - min(EARLY_S_MAX, EARLY_SHARE * session_s)

    def _token_s(self) -> float | None:
        last = self._source.last if self._source is not None else None
        return None if last is None or last.expires_at is None else last.expires_at - time.time()


class AskingConnection(AIOKafkaConnection):  # type: ignore[misc] # the client is untyped
    """Learns what the broker thinks of us. The client's own connection does not look how long it is welcome, and takes the
    refusal of a token, an answer like the others (RFC 7628, 3.2.3), for a welcome."""

    lifetime_ms = 0
    """How long the broker lets it live; 0 where it does not say."""

    def authenticator_oauth(self) -> OAuthAuthenticator:
        """In place of the client's."""
        return _Asking(sasl_oauth_token_provider=self._sasl_oauth_token_provider)

    def close(self, reason: Any = None, exc: BaseException | None = None) -> Any:
        """As the client's, and at once: under TLS it would wait half a minute for whoever refused us to say goodbye."""
        writer = self._writer
        closed = super().close(reason, exc)
        if writer is not None:
            writer.transport.abort()
        return closed

    async def gone(self) -> None:
        """Until a connection that was closed, if there ever was one, holds no socket any more."""
        if self._protocol is not None:
            await self._closed_fut

    def send(self, request: Any, expect_response: bool = True) -> Any:  # noqa: FBT001, FBT002 - the client's signature
        """As the client's."""
        answer = super().send(request, expect_response)
        return self._looked_at(answer) if isinstance(request, SaslAuthenticateRequest) else answer

    async def _looked_at(self, answer: Any) -> Any:
        found = await answer
        self.lifetime_ms = getattr(found, "session_lifetime_ms", 0)  # not before Kafka 2.2
        return found


class _Asking(OAuthAuthenticator):  # type: ignore[misc] # the client is untyped
    async def step(self, payload: bytes | None) -> tuple[bytes, bool] | None:
        if payload:
            return _BROKEN_OFF, True
        found: tuple[bytes, bool] | None = await super().step(payload)
        return found
