"""SASL OAUTHBEARER against a broker that checks signed tokens: from a file, and from a token endpoint."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from freezepoint.doctor import examine
from freezepoint.errors import BrokerUnavailableError, ConfigurationError
from freezepoint.settings import KafkaSettings, Settings, WorkerSettings
from freezepoint.transport.kafka import KafkaTransport
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs
from tests.events import complete, entry
from tests.integration.kafka_kit import SETTINGS, read_count, worker_variables
from tests.integration.oauth_kafka import (
    SESSION_S,
    OauthKafka,
    Signer,
)
from tests.integration.workers import publish, worker
from tests.polling import poll_until, poll_until_async
from tests.rights import grant, granted
from tests.token_endpoint import CLIENT_SECRET, TokenEndpoint, served

pytestmark = [pytest.mark.slow, pytest.mark.kafka]


@pytest.fixture
def endpoint(oauth: OauthKafka) -> Iterator[TokenEndpoint]:
    with served(issuing(oauth)) as made:
        yield made


def issuing(oauth: OauthKafka) -> Callable[[int], str]:
    return lambda life_s: oauth.signer.token(life_s=life_s)


def by_endpoint(oauth: OauthKafka, endpoint: TokenEndpoint, **more: Any) -> KafkaSettings:
    given = {
        "sasl_oauth_token_url": endpoint.url,
        "sasl_oauth_client_id": "worker 1",
        "sasl_oauth_client_secret": CLIENT_SECRET,
        "sasl_oauth_scope": "kafka produce",
    }
    return oauth.settings(**given | more)


def by_file(oauth: OauthKafka, path: Path, token: str, **more: Any) -> KafkaSettings:
    path.write_text(token + "\n")
    return oauth.settings(sasl_oauth_token_file=path, **more)


@asynccontextmanager
async def topics(oauth: OauthKafka, prefix: str) -> AsyncIterator[KafkaTransport]:
    """The super user's transport; alice has a worker's published rights on the topics, and no more."""
    names = TopicNames(f"{prefix}.")
    async with KafkaTransport(oauth.kafka.bootstrap, names, SETTINGS) as root:
        await root.admin().apply(topic_specs(names, 1))
        await grant(root, granted("worker", "User:alice", PREFIX=names.prefix, GROUP=f"{prefix}-workers"))
        yield root


async def work(root: KafkaTransport, rollout_id: str, results: int) -> None:
    """Publish a rollout, and wait for its result."""
    await publish(root, [entry(rollout_id, "c", [1, 2], [3]), complete(rollout_id, reward=1.0)])
    assert len(await read_count(root, Topic.TRAJECTORIES, results)) == results


@pytest.mark.parametrize("source", ["file", "endpoint"])
async def test_a_worker_works_by_a_token_with_exactly_the_published_rights(
    oauth: OauthKafka, endpoint: TokenEndpoint, unique_prefix: str, tmp_path: Path, source: str
) -> None:
    settings = (
        by_endpoint(oauth, endpoint)
        if source == "endpoint"
        else by_file(oauth, tmp_path / "token", oauth.signer.token())
    )
    async with topics(oauth, unique_prefix) as root:
        with worker(worker_variables(oauth.by_token, unique_prefix, settings), tmp_path / "log") as running:
            running.until_acquired(1)
            await work(root, "r", 1)
            assert running.terminate() == 0
    if source == "endpoint":
        assert len(endpoint.asked) == 1, "one token serves every connection"
        assert endpoint.asked[0] == {"grant_type": "client_credentials", "scope": "kafka produce"}
    told = running.log.read_text()
    assert not [token for token in endpoint.given if token in told]
    assert CLIENT_SECRET not in told


async def test_the_doctor_works_by_a_token_and_names_who_it_is(
    oauth: OauthKafka, endpoint: TokenEndpoint, unique_prefix: str
) -> None:
    settings = Settings(
        broker=f"kafka://{oauth.by_token}",
        topic_prefix=f"{unique_prefix}.",
        kafka=by_endpoint(oauth, endpoint),
        worker=WorkerSettings(group=f"{unique_prefix}-workers"),
    )
    async with topics(oauth, unique_prefix) as root:
        await work_as_root(root, settings, oauth)
        checks = [check async for check in examine(settings)]
        assert [check for check in checks if check.verdict != "ok"] == []
    lacking = settings.model_copy(update={"worker": WorkerSettings(group="not-hers")})
    (group,) = [check async for check in examine(lacking) if check.subject == "group not-hers"]
    assert group.verdict == "fail"
    assert "--allow-principal User:alice --operation Read --group not-hers" in (group.mend or "")
    refused = settings.model_copy(
        update={"kafka": by_endpoint(oauth, endpoint, sasl_oauth_client_id="somebody")}
    )
    (connection,) = [check async for check in examine(refused) if check.subject == "connection"]
    assert connection.verdict == "fail"
    assert "invalid_client" in connection.message
    assert connection.mend == "as it says"
    endpoint.answer = (503, {})
    (connection,) = [check async for check in examine(settings) if check.subject == "connection"]
    assert "status 503" in connection.message
    assert connection.mend == "as it says"


async def work_as_root(root: KafkaTransport, settings: Settings, oauth: OauthKafka) -> None:
    from freezepoint.app import run_worker

    await publish(root, [entry("r", "c", [1, 2], [3]), complete("r")])
    own = settings.model_copy(update={"broker": f"kafka://{oauth.kafka.bootstrap}", "kafka": SETTINGS})
    assert (await run_worker(own, until_idle=True)).results == 1


@pytest.mark.parametrize(
    "claims", [{"aud": "another"}, {"iss": "https://another.test"}], ids=["audience", "issuer"]
)
async def test_a_refused_token_names_what_to_check(
    oauth: OauthKafka, unique_prefix: str, tmp_path: Path, claims: Mapping[str, Any]
) -> None:
    token = oauth.signer.token(**claims)
    settings = by_file(oauth, tmp_path / "token", token)
    async with KafkaTransport(oauth.by_token, TopicNames(unique_prefix), settings) as made:
        with pytest.raises(
            ConfigurationError, match=r"refused the token: check kafka\.sasl_oauth_token_file.*audience"
        ) as caught:
            await made.producer()
    assert token not in str(caught.value)
    gc.collect()
    assert not [found for found in gc.get_objects() if is_open(found)], "it left a connection behind"


def is_open(found: object) -> bool:
    """Whether this is a connection that nobody has closed, or whose end is still awaited."""
    return type(found).__name__ == "_SelectorSocketTransport" and getattr(found, "_sock", None) is not None


async def test_a_token_that_nobody_signed_is_refused(
    oauth: OauthKafka, unique_prefix: str, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    settings = by_file(oauth, tmp_path / "token", Signer(tmp_path / "other").token())
    async with KafkaTransport(oauth.by_token, TopicNames(unique_prefix), settings) as made:
        with pytest.raises(ConfigurationError, match="refused the token"):
            await made.producer()


async def test_an_expired_token_is_waited_out_and_its_file_read_anew(
    oauth: OauthKafka, unique_prefix: str, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    settings = by_file(oauth, path, oauth.signer.token(life_s=-60))
    async with topics(oauth, unique_prefix) as root:
        with worker(worker_variables(oauth.by_token, unique_prefix, settings), tmp_path / "log") as running:
            poll_until(lambda: "waiting_for_broker" in running.log.read_text(), 30, "it says that it waits")
            assert f"the token in kafka.sasl_oauth_token_file {path} expired" in running.log.read_text()
            path.write_text(oauth.signer.token())
            running.until_acquired(1)
            await work(root, "r", 1)
            assert running.terminate() == 0


async def test_a_token_endpoint_that_is_down_is_waited_for(
    oauth: OauthKafka, unique_prefix: str, tmp_path: Path
) -> None:
    with served(issuing(oauth)) as gone:
        settings = by_endpoint(oauth, gone)
    port = int(gone.url.rpartition(":")[2].partition("/")[0])
    async with topics(oauth, unique_prefix) as root:
        with worker(worker_variables(oauth.by_token, unique_prefix, settings), tmp_path / "log") as running:
            poll_until(lambda: "waiting_for_broker" in running.log.read_text(), 30, "it says that it waits")
            assert f"no answer from the token endpoint {gone.url}" in running.log.read_text()
            with served(issuing(oauth), port=port):
                running.until_acquired(1)
                await work(root, "r", 1)
                assert running.terminate() == 0


async def test_a_token_endpoint_that_refuses_ends_a_worker(
    oauth: OauthKafka, endpoint: TokenEndpoint, unique_prefix: str, tmp_path: Path
) -> None:
    settings = by_endpoint(oauth, endpoint, sasl_oauth_client_secret="wrong-secret")
    with worker(worker_variables(oauth.by_token, unique_prefix, settings), tmp_path / "log") as running:
        assert running.wait() == 2
    told = running.log.read_text()
    assert "refused us (status 401, invalid_client): check kafka.sasl_oauth_token_url" in told
    assert "wrong-secret" not in told


@pytest.mark.parametrize("source", ["file", "endpoint"])
async def test_what_is_refused_later_ends_a_worker_too(
    oauth: OauthKafka, endpoint: TokenEndpoint, unique_prefix: str, tmp_path: Path, source: str
) -> None:
    """The client takes a refusal for an outage, and would try again for ever."""
    endpoint.life_s = 2 * SESSION_S
    (tmp_path / "other").mkdir()
    unknown, path = Signer(tmp_path / "other").token(), tmp_path / "token"
    settings = (
        by_endpoint(oauth, endpoint) if source == "endpoint" else by_file(oauth, path, oauth.signer.token())
    )
    async with topics(oauth, unique_prefix) as root:
        with worker(
            worker_variables(oauth.by_short_sessions, unique_prefix, settings), tmp_path / "log"
        ) as running:
            running.until_acquired(1)
            await work(root, "r", 1)
            path.write_text(unknown)
            endpoint.answer = (401, {"error": "invalid_client"})
            assert running.wait() == 2
    expected = {
        "file": f"the broker refused the token: check kafka.sasl_oauth_token_file {path}",
        "endpoint": f"the token endpoint {endpoint.url} refused us (status 401, invalid_client)",
    }
    assert f"error: {expected[source]}" in running.log.read_text()


@pytest.mark.timeout(180)
async def test_a_worker_outlives_its_connections_sessions(
    oauth: OauthKafka, endpoint: TokenEndpoint, unique_prefix: str, tmp_path: Path
) -> None:
    """The broker closes each connection that does not authenticate again (KIP-368), which the client never does."""
    endpoint.life_s = 2 * SESSION_S
    settings = by_endpoint(oauth, endpoint)
    async with topics(oauth, unique_prefix) as root:
        with worker(
            worker_variables(oauth.by_short_sessions, unique_prefix, settings), tmp_path / "log"
        ) as running:
            running.until_acquired(1)
            began, results = time.monotonic(), 0
            while time.monotonic() - began < 6 * SESSION_S:
                results += 1
                await work(root, f"r{results}", results)
                assert running.process.poll() is None, running.log.read_text()
            assert len(endpoint.given) > 2, "expired tokens were replaced"
            assert running.acquired == [0], "it kept its partition"
            assert running.terminate() == 0
    told = running.log.read_text()
    assert "Traceback" not in told
    assert not [token for token in endpoint.given if token in told]


async def test_a_broker_that_takes_no_tokens_says_so(
    oauth: OauthKafka, endpoint: TokenEndpoint, unique_prefix: str
) -> None:
    """And passwords are refused where tokens are wanted."""
    password = oauth.settings(sasl_mechanism="SCRAM-SHA-512", sasl_username="alice", sasl_password="geheim")
    async with KafkaTransport(oauth.by_token, TopicNames(unique_prefix), password) as made:
        with pytest.raises(ConfigurationError, match=r"does not offer kafka\.sasl_mechanism"):
            await made.producer()


async def test_an_endpoint_that_fails_later_is_the_reason_that_is_told(
    oauth: OauthKafka, endpoint: TokenEndpoint, unique_prefix: str
) -> None:
    settings = by_endpoint(oauth, endpoint)
    endpoint.answer = (503, {})
    async with KafkaTransport(oauth.by_token, TopicNames(unique_prefix), settings) as made:
        with pytest.raises(BrokerUnavailableError, match=r"token endpoint .* status 503"):
            await made.producer()
        endpoint.answer = None

        async def connected() -> bool:
            try:
                await (await made.producer()).close()
            except BrokerUnavailableError:
                return False
            return True

        await poll_until_async(connected, 20, "the endpoint is asked again")
