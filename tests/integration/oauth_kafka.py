"""A broker that takes signed tokens over TLS, and who signs them."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from freezepoint.settings import KafkaSettings
from kafka_local import LocalKafka
from tests.integration.kafka_kit import varied
from tests.integration.secured_kafka import certificate, openssl, securely

ISSUER, AUDIENCE = "https://issuer.test", "kafka"
SESSION_S = 4
"""How long the second listener lets a connection live that does not authenticate again."""


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


@dataclass
class Signer:
    """Signs tokens, and publishes the key to check them by."""

    folder: Path
    key: str = "signer.pem"

    def __post_init__(self) -> None:
        openssl(self.folder, "genrsa", "-out", self.key, "2048")

    def key_set(self) -> Path:
        modulus = (
            openssl(self.folder, "rsa", "-in", self.key, "-noout", "-modulus")
            .decode()
            .strip()
            .partition("=")[2]
        )
        key = {"kty": "RSA", "kid": "test", "alg": "RS256", "use": "sig", "e": "AQAB"}
        path = self.folder / "jwks.json"
        path.write_text(json.dumps({"keys": [key | {"n": _encoded(bytes.fromhex(modulus))}]}))
        return path

    def token(self, subject: str = "alice", life_s: float = 600.0, **claims: Any) -> str:
        now = time.time()
        header = {"alg": "RS256", "kid": "test", "typ": "JWT"}
        body = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": subject,
            "scope": "kafka",
            "iat": int(min(now, now + life_s) - 1),
            "exp": int(now + life_s),
        } | claims
        signed = ".".join(_encoded(json.dumps(part).encode()) for part in (header, body))
        (self.folder / "signed").write_text(signed)
        return f"{signed}.{_encoded(openssl(self.folder, 'dgst', '-sha256', '-sign', self.key, 'signed'))}"


@dataclass
class OauthKafka:
    """Ways in: openly (a super user), by a token over TLS, and by one with sessions of ``SESSION_S``."""

    kafka: LocalKafka
    port: int
    short_port: int
    pem: Path
    signer: Signer

    @property
    def by_token(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def by_short_sessions(self) -> str:
        return f"127.0.0.1:{self.short_port}"

    def settings(self, **more: Any) -> KafkaSettings:
        given = {
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "OAUTHBEARER",
            "ssl_ca_file": self.pem,
            "request_timeout_ms": 5_000,
        }
        return varied(**given | more)


@pytest.fixture(scope="module")
def oauth(kafka_jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OauthKafka]:
    folder = tmp_path_factory.mktemp("oauth")
    pem, signer = certificate(folder), Signer(folder)
    keys = signer.key_set().as_uri()
    kafka, ports = securely(
        folder,
        {"TOKEN": "SASL_SSL", "SHORT": "SASL_SSL"},
        {"listener.name.short.oauthbearer.connections.max.reauth.ms": str(SESSION_S * 1_000)},
    )
    handlers = "org.apache.kafka.common.security.oauthbearer"
    for listener in ("token", "short"):
        name = f"listener.name.{listener}"
        kafka._extra_properties |= {
            f"{name}.sasl.enabled.mechanisms": "OAUTHBEARER",
            f"{name}.oauthbearer.sasl.jaas.config": f"{handlers}.OAuthBearerLoginModule required;",
            f"{name}.oauthbearer.sasl.server.callback.handler.class": f"{handlers}.OAuthBearerValidatorCallbackHandler",
            f"{name}.sasl.oauthbearer.jwks.endpoint.url": keys,
            f"{name}.sasl.oauthbearer.expected.issuer": ISSUER,
            f"{name}.sasl.oauthbearer.expected.audience": AUDIENCE,
            f"{name}.sasl.oauthbearer.clock.skew.seconds": "0",
        }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JDK_JAVA_OPTIONS", f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={keys}")
        kafka.start()
    try:
        yield OauthKafka(kafka, ports[0], ports[1], pem, signer)
    finally:
        kafka.stop()
