"""Tokens from files and token endpoints, and for how long a connection made with one is kept."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import socketserver
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError
from pydantic import SecretStr
from structlog.testing import capture_logs

from freezepoint.errors import BrokerUnavailableError, ConfigurationError
from freezepoint.settings import KafkaSettings
from freezepoint.transport.kafka import oidc
from freezepoint.transport.kafka.bearer import Bearer, BearerFile, BearerProvider
from freezepoint.transport.kafka.credentials import refused_token
from freezepoint.transport.kafka.oidc import ClientCredentials
from freezepoint.transport.kafka.sessions import Sessions
from tests.integration.secured_kafka import certificate
from tests.polling import poll_until_async
from tests.token_endpoint import CLIENT_SECRET, TokenEndpoint, served


def jwt(**claims: Any) -> str:
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"e30.{body}.c2ln"


# ------------------------------------------------------------------------------------------------------- tokens


def test_a_token_tells_its_expiry_and_subject_and_never_itself() -> None:
    value = jwt(exp=1_700_000_000, sub="alice")
    found = Bearer.of(value)
    assert (found.expires_at, found.subject) == (1_700_000_000, "alice")
    assert value not in repr(found)


@pytest.mark.parametrize(
    "value",
    [
        "opaque-token",
        "a.b.c",
        "a.!.c".replace("!", "bm90IGpzb24"),
        jwt(exp="soon", sub="a b\n"),
        "e30.W10.e30",
    ],
)
def test_a_token_that_tells_nothing_is_one_too(value: str) -> None:
    found = Bearer.of(value)
    assert (found.expires_at, found.subject) == (None, None)


@pytest.mark.parametrize("value", ["", "two words", "a\x01auth=b", "tökên"])
def test_what_is_no_token_is_refused_without_repeating_it(value: str) -> None:
    with pytest.raises(ValueError, match="holds characters"):
        Bearer.of(value)


# --------------------------------------------------------------------------------------------------------- files


async def test_a_file_is_read_anew_each_time(tmp_path: Path) -> None:
    path = tmp_path / "token"
    provider = BearerProvider(BearerFile(path))
    for value in ("one", "two\n"):
        path.write_text(value)
        assert await provider.token() == value.strip()


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (None, ConfigurationError, "cannot be read: No such file"),
        (b"", BrokerUnavailableError, "is empty: waiting for whoever writes it"),
        (b"geheim geheim", ConfigurationError, "is no token"),
        ("gehéim".encode(), ConfigurationError, "is not plain ASCII"),
        (b"geheim" * 20_000, ConfigurationError, "is larger than"),
        (jwt(exp=1_000_000_000, sub="geheim").encode(), BrokerUnavailableError, r"expired \d{9,} s ago"),
    ],
)
async def test_a_file_without_a_usable_token_says_why(
    tmp_path: Path, content: bytes | None, kind: type[Exception], message: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(kind, match=message) as caught:
        await BearerFile(path).bearer()
    assert f"kafka.sasl_oauth_token_file {path}" in str(caught.value)
    assert "geheim" not in str(caught.value)
    with pytest.raises(KafkaConnectionError, match=message):  # what the client retries
        await BearerProvider(BearerFile(path)).token()


async def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ConfigurationError, match=f"{path} is no regular file"):
            await BearerFile(path).bearer()


# --------------------------------------------------------------------------------------------------- token endpoint


@pytest.fixture
def endpoint() -> Iterator[TokenEndpoint]:
    with served(lambda life_s: jwt(exp=time.time() + life_s, sub="alice")) as made:
        yield made


def credentials(url: str, **more: Any) -> ClientCredentials:
    given: dict[str, Any] = {
        "sasl_oauth_token_url": url,
        "sasl_oauth_client_id": "worker 1",
        "sasl_oauth_client_secret": SecretStr(CLIENT_SECRET),
        "request_timeout_ms": 2_000,
    }
    return ClientCredentials(KafkaSettings(**given | more))


async def test_a_token_is_asked_for_once_and_kept(endpoint: TokenEndpoint) -> None:
    source = credentials(endpoint.url, sasl_oauth_scope="kafka produce")
    found = await asyncio.gather(*(source.bearer() for _ in range(5)))
    assert {bearer.value for bearer in found} == set(endpoint.given)
    assert endpoint.asked == [{"grant_type": "client_credentials", "scope": "kafka produce"}]
    assert source.last is found[0]


async def test_a_token_is_renewed_shortly_before_it_expires(endpoint: TokenEndpoint) -> None:
    endpoint.life_s = 1
    source = credentials(endpoint.url)
    first = await source.bearer()
    assert await source.bearer() is first
    async with asyncio.timeout(5):
        while (await source.bearer()) is first:
            await asyncio.sleep(0.02)
    assert first.expires_at is not None
    assert time.time() < first.expires_at + 0.5
    assert len(endpoint.given) == 2


async def test_an_endpoint_that_is_down_costs_nothing_while_the_token_lasts(endpoint: TokenEndpoint) -> None:
    endpoint.life_s = 2
    source = credentials(endpoint.url)
    first = await source.bearer()
    endpoint.answer = (500, {})
    seen: set[str] = set()
    async with asyncio.timeout(10):
        while True:
            try:
                seen.add((await source.bearer()).value)
            except BrokerUnavailableError:
                break
            await asyncio.sleep(0.05)
    assert seen == {first.value}
    assert 2 <= len(endpoint.asked) <= 5, "it is not asked all the time"
    endpoint.answer = None
    async with asyncio.timeout(5):
        while len(endpoint.given) < 2:
            try:
                await source.bearer()
            except BrokerUnavailableError:
                await asyncio.sleep(0.05)


async def test_a_secret_file_is_read_at_each_request(endpoint: TokenEndpoint, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    source = credentials(endpoint.url, sasl_oauth_client_secret=None, sasl_oauth_client_secret_file=path)
    with pytest.raises(ConfigurationError, match=r"kafka\.sasl_oauth_client_secret_file .* cannot be read"):
        await source.bearer()
    path.write_text(CLIENT_SECRET + "\n")
    await asyncio.sleep(oidc.PAUSE_S)  # the failure counts for so long
    assert (await source.bearer()).subject == "alice"
    path.write_text("\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        await credentials(
            endpoint.url, sasl_oauth_client_secret=None, sasl_oauth_client_secret_file=path
        ).bearer()


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (
            (401, {"error": "invalid_client"}),
            ConfigurationError,
            r"status 401, invalid_client.*client_secret",
        ),
        ((400, {"error": CLIENT_SECRET}), ConfigurationError, r"\(status 400\)"),
        ((403, b"<html>" + CLIENT_SECRET.encode()), ConfigurationError, r"\(status 403\)"),
        ((302, {}), ConfigurationError, r"redirects \(status 302\)"),
        ((429, {}), BrokerUnavailableError, "status 429"),
        ((408, {}), BrokerUnavailableError, "status 408"),
        ((500, {}), BrokerUnavailableError, "status 500"),
        ((200, b"<html>"), ConfigurationError, "answers without a token"),
        ((200, {"access_token": "two words"}), ConfigurationError, "answers without a token"),
        ((200, {"token": "x"}), ConfigurationError, "answers without a token"),
        ((200, []), ConfigurationError, "answers without a token"),
        ((200, {"access_token": "x", "token_type": "mac"}), ConfigurationError, "another type than bearer"),
        ((200, b"[" * 100_000), ConfigurationError, "answers without a token"),
    ],
)
async def test_an_endpoints_refusals_are_told_from_its_failures(
    endpoint: TokenEndpoint, answer: tuple[int, Any], kind: type[Exception], message: str
) -> None:
    endpoint.answer = answer
    endpoint.headers = {"Location": endpoint.url} if answer[0] == 302 else {}
    with pytest.raises(kind, match=message) as caught:
        await credentials(endpoint.url).bearer()
    assert len(endpoint.asked) == 1, "no redirect is followed"
    assert caught.value.__cause__ is None
    assert CLIENT_SECRET not in str(caught.value)


async def test_no_answer_is_told_as_such_and_in_time(endpoint: TokenEndpoint) -> None:
    release = threading.Event()
    endpoint.hold = release
    began = time.monotonic()
    try:
        with pytest.raises(BrokerUnavailableError, match=r"no answer from the token endpoint http"):
            await credentials(endpoint.url, request_timeout_ms=1_000).bearer()
    finally:
        release.set()
    assert time.monotonic() - began < 5
    with served(str) as gone:
        pass
    with pytest.raises(
        BrokerUnavailableError, match=r"no answer from the token endpoint .*: Connection refused"
    ):
        await credentials(gone.url).bearer()


@contextmanager
def dripping(head: bytes) -> Iterator[str]:
    """An endpoint that answers so much at once, and then a byte now and then, for ever."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.sendall(head)
                while not over.wait(0.1):
                    self.request.sendall(b"x")

    over = threading.Event()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/token"
        finally:
            over.set()
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "head",
    [b"", b"HTTP/1.1 200 OK\r\nX-", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 400 No\r\n\r\n"],
    ids=["line", "headers", "body", "error"],
)
async def test_an_endpoint_that_answers_byte_by_byte_keeps_no_thread(head: bytes) -> None:
    with dripping(head) as url:
        with pytest.raises(BrokerUnavailableError, match="no answer from the token endpoint"):
            await credentials(url, request_timeout_ms=1_000).bearer()
        await poll_until_async(asking_none, 5, "its thread has ended")


async def asking_none() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "token-endpoint"]


async def test_a_request_that_is_cancelled_keeps_no_thread() -> None:
    with dripping(b"") as url:
        asking = asyncio.create_task(credentials(url, request_timeout_ms=60_000).bearer())
        await poll_until_async(lambda: _negated(asking_none), 5, "it asks")
        asking.cancel()
        await poll_until_async(asking_none, 5, "its thread has ended")


async def _negated(asked: Callable[[], Awaitable[bool]]) -> bool:
    return not await asked()


async def test_a_refusal_costs_nothing_while_the_token_lasts(endpoint: TokenEndpoint) -> None:
    """It may be a way that is being mended, or a secret that is being changed."""
    endpoint.life_s = 2
    source = credentials(endpoint.url)
    first = await source.bearer()
    endpoint.answer = (404, b"no such page")
    with capture_logs() as told:
        await poll_until_async(lambda: _asked(source, endpoint, 2), 5, "it asks for another one")
    assert source.last is first
    assert [line["event"] for line in told] == ["token_not_renewed"]
    assert "status 404" in told[0]["error"]
    await poll_until_async(lambda: _refused(source, "status 404"), 10, "the token is over")


async def _refused(source: ClientCredentials, message: str) -> bool:
    try:
        await source.bearer()
    except ConfigurationError as error:
        return message in str(error)
    return False


async def _asked(source: ClientCredentials, endpoint: TokenEndpoint, times: int) -> bool:
    await source.bearer()
    return len(endpoint.asked) >= times


@pytest.mark.parametrize(
    ("told", "pause_s"), [("3", 3), ("999999", 60), ("0", 1), ("soon", 1), ("-5", 1), ("", 1)]
)
async def test_an_endpoint_is_left_alone_for_as_long_as_it_asks_for(
    endpoint: TokenEndpoint, told: str, pause_s: float
) -> None:
    endpoint.answer, endpoint.headers = (503, {}), {"Retry-After": told}
    source = credentials(endpoint.url)
    for _ in range(3):
        with pytest.raises(BrokerUnavailableError, match="status 503"):
            await source.bearer()
    assert len(endpoint.asked) == 1
    assert source._failed is not None
    assert source._failed[0] - time.monotonic() == pytest.approx(pause_s, abs=0.9)


IMF = "%a, %d %b %Y %H:%M:%S GMT"


@pytest.mark.parametrize(
    ("form", "ahead_s", "pause_s"),
    [
        (IMF, 20, 20),
        ("%A, %d-%b-%y %H:%M:%S GMT", 20, 20),
        ("%a %b %e %H:%M:%S %Y", 20, 20),
        (IMF, 7_200, 60),
        (IMF, -7_200, 1),
        ("%a, 99 %b %Y %H:%M:%S GMT", 20, 1),
        ("%a, %d %b 0000 %H:%M:%S GMT", 20, 1),
        (IMF + " and more" * 1_000, 20, 20),
        ("in a while, %Y", 20, 1),
    ],
    ids=["IMF", "RFC 850", "asctime", "far", "past", "no such day", "no such year", "long", "garbage"],
)
async def test_a_date_tells_as_well_for_how_long(
    endpoint: TokenEndpoint, monkeypatch: pytest.MonkeyPatch, form: str, ahead_s: int, pause_s: float
) -> None:
    """In the local time of any zone."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        told = time.strftime(form, time.gmtime(time.time() + ahead_s))
        endpoint.answer, endpoint.headers = (503, {}), {"Retry-After": told}
        source = credentials(endpoint.url)
        with pytest.raises(BrokerUnavailableError, match="status 503"):
            await source.bearer()
    finally:
        monkeypatch.undo()
        time.tzset()
    assert source._failed is not None
    assert source._failed[0] - time.monotonic() == pytest.approx(pause_s, abs=1.9)


@pytest.mark.parametrize(
    ("behind_s", "dated", "pause_s"), [(3_600, True, 20), (-3_600, True, 20), (0, False, 20)]
)
async def test_a_date_is_by_the_endpoints_clock_where_it_tells_that(
    behind_s: int, dated: bool, pause_s: float
) -> None:
    now = time.time() - behind_s
    headers = Message()
    headers["Retry-After"] = time.strftime(IMF, time.gmtime(now + 20))
    if dated:
        headers["Date"] = time.strftime(IMF, time.gmtime(now))
    assert oidc._retry_after_s(headers) == pytest.approx(pause_s, abs=1.1)


@pytest.mark.parametrize(
    ("expires_in", "lasts_s"),
    [
        (3600, 300),  # from a cache, as it were: the token's own end counts
        (100, 100),
        ("100", 100),
        (100.5, 100.5),
        (None, 300),
        ("soon", 300),
        ("inf", 300),
        ("nan", 300),
        ([], 300),
        (0, 0),
        (-5, 0),
    ],
)
async def test_a_token_is_kept_until_the_first_of_its_ends(
    endpoint: TokenEndpoint, expires_in: object, lasts_s: float
) -> None:
    token = jwt(exp=time.time() + 300)
    endpoint.answer = (200, {"access_token": token, "expires_in": expires_in})
    source = credentials(endpoint.url)
    await source.bearer()
    assert source._held is not None
    assert source._held.expires_at - time.monotonic() == pytest.approx(lasts_s, abs=2)


async def test_a_proxys_refusal_is_told(monkeypatch: pytest.MonkeyPatch, endpoint: TokenEndpoint) -> None:
    """It answers to POST alone, so 501 to what a proxy is asked."""
    monkeypatch.setenv(
        "HTTPS_PROXY", endpoint.url.replace("http://", "http://user:geheim@").removesuffix("/token")
    )
    monkeypatch.delenv("https_proxy", raising=False)
    with pytest.raises(
        BrokerUnavailableError, match="the proxy that HTTPS_PROXY names answers with status 501"
    ):
        await credentials("https://idp.example/token").bearer()


async def test_a_token_of_unknown_life_is_used_once(endpoint: TokenEndpoint) -> None:
    endpoint.answer = (200, {"access_token": "opaque"})
    source = credentials(endpoint.url)
    assert (await source.bearer()).expires_at is None
    await source.bearer()
    assert len(endpoint.asked) == 2


async def test_an_endpoints_certificate_is_checked_by_the_file_that_is_named(tmp_path: Path) -> None:
    pem = certificate(tmp_path)
    with served(lambda _: "opaque", tls=tmp_path) as made:
        with pytest.raises(
            ConfigurationError, match=r"self-signed certificate; check kafka\.sasl_oauth_ca_file"
        ):
            await credentials(made.url).bearer()
        found = await credentials(made.url, sasl_oauth_ca_file=pem).bearer()
    assert found.value == "opaque"
    assert found.expires_at is not None, "by expires_in, where the token does not tell"


async def test_the_query_of_an_endpoints_address_is_sent_and_not_shown(endpoint: TokenEndpoint) -> None:
    url = f"{endpoint.url}?key=geheim"
    assert (await credentials(url).bearer()).subject == "alice"
    endpoint.answer = (500, {})
    with pytest.raises(BrokerUnavailableError, match=r"/token\?… answers with status 500") as caught:
        await credentials(url).bearer()
    settings = KafkaSettings(sasl_oauth_token_url=url)
    for told in (str(caught.value), str(refused_token(settings)), settings.model_dump_json()):
        assert "geheim" not in told


async def test_nothing_logs_a_secret(endpoint: TokenEndpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        source = credentials(endpoint.url)
        await source.bearer()
        endpoint.answer = (401, {"error": "invalid_client", "error_description": CLIENT_SECRET})
        with pytest.raises(ConfigurationError):
            await credentials(endpoint.url).bearer()
    for secret in (CLIENT_SECRET, *endpoint.given):
        assert secret not in caplog.text
        assert secret not in repr(source.last) + repr(source)


# ------------------------------------------------------------------------------------------------------- sessions


class Held:
    """A source whose token expires in so many seconds."""

    def __init__(self, life_s: float) -> None:
        self.last: Bearer | None = Bearer("x", time.time() + life_s)

    async def bearer(self) -> Bearer:
        assert self.last is not None
        return self.last


@pytest.mark.parametrize(
    ("token_s", "told_ms", "renewed_in_s"),
    [
        (600, 600_000, 570),
        (600, 599_000, 570),  # the token's end again, as the broker counts
        (600, 100_000, 75),  # connections.max.reauth.ms
        (600, 0, 570),  # a broker that does not tell
        (60, 100_000, 45),
        (-5, 0, 0),
        (None, 100_000, 75),  # passwords
        (None, 0, float("inf")),
    ],
)
def test_a_connection_is_renewed_before_the_broker_ends_its_session(
    token_s: float | None, told_ms: int, renewed_in_s: float
) -> None:
    sessions = Sessions(None if token_s is None else Held(token_s))
    sessions.learn(told_ms)
    assert sessions.known
    assert sessions.renew_in_s() == pytest.approx(renewed_in_s, abs=0.5)


def test_the_brokers_own_limit_outlasts_the_token_it_was_learnt_with() -> None:
    source = Held(600)
    sessions = Sessions(source)
    sessions.learn(100_000)
    source.last = None
    assert sessions.renew_in_s() == pytest.approx(75)
