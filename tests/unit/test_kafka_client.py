import logging
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from aiokafka.abc import AbstractTokenProvider
from aiokafka.protocol.admin import SaslAuthenticateRequest
from aiokafka.protocol.metadata import MetadataRequest
from pydantic import SecretStr

from freezepoint.errors import ConfigurationError
from freezepoint.settings import KafkaSettings
from freezepoint.transport.kafka.client import Clients, connection_arguments
from freezepoint.transport.kafka.examine import tells_secret
from freezepoint.transport.kafka.tls import Certificates, tls_context

SECRET = "correct horse battery staple"


def arguments(**settings: Any) -> dict[str, Any]:
    return connection_arguments("one:9092,two:9092", KafkaSettings(**settings))


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate, its key, and the key encrypted with SECRET."""
    folder = tmp_path_factory.mktemp("pem")
    make = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=freezepoint -keyout key.pem -out cert.pem"
    encrypt = f"rsa -aes256 -passout pass:{SECRET.replace(' ', '-')} -in key.pem -out locked.pem"
    try:
        for command in (make, encrypt):
            subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return folder


def test_plaintext_carries_neither_credentials_nor_tls() -> None:
    made = arguments()
    assert made["bootstrap_servers"] == ["one:9092", "two:9092"]
    assert made["security_protocol"] == "PLAINTEXT"
    assert not [name for name in made if name.startswith(("sasl", "ssl"))]


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_credentials_reach_the_client(protocol: str, mechanism: str) -> None:
    made = arguments(
        security_protocol=protocol,
        sasl_mechanism=mechanism,
        sasl_username="alice",
        sasl_password=SecretStr(SECRET),
    )
    assert made["sasl_mechanism"] == mechanism
    assert (made["sasl_plain_username"], made["sasl_plain_password"]) == ("alice", SECRET)
    assert ("ssl_context" in made) == (protocol == "SASL_SSL")


@pytest.mark.parametrize("given", [{}, {"sasl_username": "alice"}, {"sasl_password": SecretStr(SECRET)}])
def test_missing_credentials_name_the_settings(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="FREEZEPOINT_KAFKA__SASL_PASSWORD") as caught:
        arguments(security_protocol="SASL_SSL", **given)
    assert SECRET not in str(caught.value)


TOKEN_URL = {
    "sasl_oauth_token_url": "https://issuer.test/token",
    "sasl_oauth_client_id": "worker",
    "sasl_oauth_client_secret": SecretStr(SECRET),
}
TOKEN_FILE = {"sasl_oauth_token_file": Path("/run/token")}
BEARER = {"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}


@pytest.mark.parametrize("given", [TOKEN_FILE, TOKEN_URL], ids=["file", "endpoint"])
def test_a_token_provider_reaches_the_client_and_no_password(given: dict[str, Any]) -> None:
    made = arguments(**BEARER, **given)
    assert made["sasl_mechanism"] == "OAUTHBEARER"
    assert isinstance(made["sasl_oauth_token_provider"], AbstractTokenProvider)
    assert not [name for name in made if name.startswith("sasl_plain")]
    assert SECRET not in repr(made)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (BEARER, "FREEZEPOINT_KAFKA__SASL_OAUTH_TOKEN_FILE.*FREEZEPOINT_KAFKA__SASL_OAUTH_TOKEN_URL"),
        (BEARER | TOKEN_FILE | TOKEN_URL, r"kafka\.sasl_oauth_token_file gives the token.*unset the one"),
        (BEARER | TOKEN_FILE | {"sasl_oauth_scope": "x"}, "FREEZEPOINT_KAFKA__SASL_OAUTH_SCOPE"),
        (BEARER | TOKEN_FILE | {"sasl_username": "alice"}, "no use for kafka.sasl_username"),
        (BEARER | {"sasl_oauth_client_id": "worker"}, "FREEZEPOINT_KAFKA__SASL_OAUTH_TOKEN_URL"),
        (BEARER | TOKEN_URL | {"sasl_oauth_client_id": None}, "needs kafka.sasl_oauth_client_id"),
        (BEARER | TOKEN_URL | {"sasl_oauth_client_secret": None}, "none is set"),
        (BEARER | TOKEN_URL | {"sasl_oauth_client_secret_file": Path("/x")}, "both are set"),
        (BEARER | TOKEN_URL | {"sasl_oauth_token_url": "http://issuer.test/token"}, "must be https"),
        (BEARER | TOKEN_URL | {"sasl_oauth_token_url": "http://127.0.0.1.test/token"}, "must be https"),
        (BEARER | TOKEN_URL | {"sasl_oauth_token_url": "file:///etc/passwd"}, "is no URL"),
        (
            BEARER | TOKEN_URL | {"sasl_oauth_token_url": f"https://a:{SECRET}@b/"},
            "is no URL|holds credentials",
        ),
        (BEARER | TOKEN_URL | {"sasl_oauth_token_url": "https://a:pw@b/"}, "holds credentials"),
        (BEARER | TOKEN_URL | {"sasl_oauth_token_url": "https://b:99999/"}, "is no URL"),
        (
            BEARER | TOKEN_URL | {"sasl_oauth_ca_file": Path("/nowhere")},
            r"kafka\.sasl_oauth_ca_file /nowhere",
        ),
        (BEARER | TOKEN_FILE | {"security_protocol": "SSL"}, "FREEZEPOINT_KAFKA__SECURITY_PROTOCOL=SASL_SSL"),
        ({"security_protocol": "SASL_SSL"} | TOKEN_FILE, "FREEZEPOINT_KAFKA__SASL_MECHANISM"),
        (TOKEN_URL, r"which has no use for kafka\.sasl_oauth_token_url"),
        (BEARER | TOKEN_URL | {"sasl_oauth_token_url": "https://idp..example/token"}, "is no URL"),
        (
            {"sasl_username": "alice", "sasl_password": SecretStr(SECRET)},
            r"PLAINTEXT, which has no use for kafka\.sasl_username and kafka\.sasl_password .*=SASL_SSL",
        ),
        (
            {"security_protocol": "SASL_PLAINTEXT", "sasl_username": "a", "sasl_password": SecretStr(SECRET)}
            | {"ssl_cert_file": Path("cert.pem")},
            r"SASL_PLAINTEXT, which has no use for kafka\.ssl_cert_file .*=SSL, or SASL_SSL",
        ),
        (
            {"security_protocol": "SSL", "ssl_key_file": Path("key.pem")},
            r"kafka\.ssl_key_file .* is of no use without kafka\.ssl_cert_file",
        ),
    ],
)
def test_missing_or_contradicting_token_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        arguments(**given)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("protocol", "mechanism", "host", "expected"),
    [
        ("SASL_PLAINTEXT", "PLAIN", "broker1", True),
        ("SASL_PLAINTEXT", "OAUTHBEARER", "10.0.0.1", True),
        ("SASL_PLAINTEXT", "OAUTHBEARER", "127.0.0.1", False),
        ("SASL_PLAINTEXT", "SCRAM-SHA-256", "broker1", False),
        ("SASL_SSL", "PLAIN", "broker1", False),
    ],
)
def test_a_secret_that_goes_over_the_network_as_it_is_is_known(
    protocol: str, mechanism: str, host: str, expected: bool
) -> None:
    settings = KafkaSettings.model_validate({"security_protocol": protocol, "sasl_mechanism": mechanism})
    assert tells_secret(settings, ["127.0.0.1", host]) is expected


def test_the_clients_own_log_never_holds_a_credential(caplog: pytest.LogCaptureFixture) -> None:
    """At level debug it logs whole requests."""
    arguments(security_protocol="SASL_SSL", sasl_username="alice", sasl_password=SecretStr(SECRET))
    with caplog.at_level(logging.DEBUG, "aiokafka.conn"):
        log = logging.getLogger("aiokafka.conn")
        log.debug(
            "Request to %s: %s", "broker", SaslAuthenticateRequest(SECRET.encode()).prepare({36: (0, 1)})
        )
        log.debug("Request to %s: %s", "broker", MetadataRequest(["a-topic"]).prepare({3: (0, 5)}))
    assert SECRET not in caplog.text
    assert "a-topic" in caplog.text


def test_tls_verifies_certificates_and_hostnames() -> None:
    context: ssl.SSLContext = arguments(security_protocol="SSL")["ssl_context"]
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


def test_not_checking_the_hostname_still_verifies_the_certificate(pem: Path) -> None:
    context: ssl.SSLContext = arguments(
        security_protocol="SSL", ssl_ca_file=pem / "cert.pem", ssl_check_hostname=False
    )["ssl_context"]
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert not context.check_hostname
    assert [dict(item[0] for item in ca["subject"])["commonName"] for ca in context.get_ca_certs()] == [  # type: ignore[misc]
        "freezepoint"
    ]


def test_client_certificates_with_an_open_and_a_locked_key(pem: Path) -> None:
    arguments(security_protocol="SSL", ssl_cert_file=pem / "cert.pem", ssl_key_file=pem / "key.pem")
    password = SecretStr(SECRET.replace(" ", "-"))
    arguments(
        security_protocol="SSL",
        ssl_cert_file=pem / "cert.pem",
        ssl_key_file=pem / "locked.pem",
        ssl_key_password=password,
    )


def test_files_that_are_being_written_are_not_read(pem: Path, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert", tmp_path / "key"
    settings = KafkaSettings(security_protocol="SSL", ssl_ca_file=cert, ssl_cert_file=cert, ssl_key_file=key)
    for source, copy in (("cert.pem", cert), ("key.pem", key)):
        copy.write_bytes((pem / source).read_bytes())
    context, certificates = tls_context(settings), Certificates(settings)
    for damage in (lambda: cert.write_text("half a cert"), key.unlink, cert.unlink):
        damage()
        certificates.renew(context)
    assert len(context.get_ca_certs()) == 1


@pytest.mark.parametrize("password", [None, SecretStr("wrong")])
def test_a_locked_key_without_its_password_neither_prompts_nor_tells(
    pem: Path, password: SecretStr | None
) -> None:
    with pytest.raises(ConfigurationError, match=r"kafka\.ssl_key_password cannot be used") as caught:
        arguments(
            security_protocol="SSL",
            ssl_cert_file=pem / "cert.pem",
            ssl_key_file=pem / "locked.pem",
            ssl_key_password=password,
        )
    assert "wrong" not in str(caught.value)


def test_a_missing_ca_file_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"kafka\.ssl_ca_file /nowhere/ca\.pem: FileNotFoundError"):
        arguments(security_protocol="SSL", ssl_ca_file=Path("/nowhere/ca.pem"))


async def test_the_consumer_never_commits_resets_or_reads_uncommitted_by_itself() -> None:
    clients = Clients("one:9092", KafkaSettings(session_timeout_ms=45_000, partition_fetch_bytes=12_345))
    consumer = clients.consumer("group")
    try:
        assert consumer._enable_auto_commit is False
        assert consumer._auto_offset_reset == "none"
        assert consumer._isolation_level == "read_committed"
        assert consumer._check_crcs is True
        assert [assignor.name for assignor in consumer._partition_assignment_strategy] == ["range"]
        assert consumer._session_timeout_ms == 45_000
        assert consumer._rebalance_timeout_ms < consumer._request_timeout_ms
        assert consumer._max_partition_fetch_bytes == 12_345
    finally:
        await clients.close(consumer)


async def test_every_producer_is_idempotent_and_waits_for_all_replicas() -> None:
    clients = Clients("one:9092", KafkaSettings(compression="zstd", transaction_timeout_ms=12_345))
    for transactional_id in (None, "prefix.topic.0"):
        producer = clients.producer(
            batch_bytes=1_000, record_bytes_max=2_000, linger_ms=0, transactional_id=transactional_id
        )
        try:
            assert producer._sender._acks == -1
            assert producer._txn_manager.transactional_id == transactional_id
            assert producer._compression_type == "zstd"
            assert producer._max_request_size == 2_000
            if transactional_id:
                assert producer._txn_manager.transaction_timeout_ms == 12_345
        finally:
            await clients.close(producer)
