"""A broker that asks for credentials and rights, one a module, and its user alice."""

import asyncio
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from freezepoint.errors import FreezepointError
from freezepoint.settings import KafkaSettings
from kafka_local import LocalKafka, _free_port, _java_command, fetch_jars, find_java
from tests.integration.kafka_kit import SETTINGS

PASSWORD = "alice-secret"


@dataclass
class SecuredKafka:
    """A broker with three ways in: openly (a super user), by password, and by password over TLS."""

    kafka: LocalKafka
    password_port: int
    tls_port: int
    pem: Path

    @property
    def by_password(self) -> str:
        return f"127.0.0.1:{self.password_port}"

    @property
    def by_tls(self) -> str:
        return f"127.0.0.1:{self.tls_port}"


def openssl(folder: Path, *arguments: str) -> bytes:
    """What it prints, run in that folder; skips where there is none."""
    try:
        return subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True).stdout
    except FileNotFoundError:
        pytest.skip("openssl is not installed")


def certificate(folder: Path) -> Path:
    """A self-signed certificate of 127.0.0.1, and its key in the same file for the broker."""
    make = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=broker -addext subjectAltName=IP:127.0.0.1 "
    openssl(folder, *make.split(), "-keyout", "key.pem", "-out", "cert.pem")
    (folder / "both.pem").write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return folder / "cert.pem"


def securely(
    folder: Path, listeners: Mapping[str, str], properties: Mapping[str, str] | None = None
) -> tuple[LocalKafka, list[int]]:
    """A broker, to be started, that knows rights and shows the certificate in that folder; and a port for each of these
    listeners, by their protocols, beside the one that is open and makes everybody a super user.

    :param properties: further ones, or others than those of here.
    """
    kafka = LocalKafka()
    ports: list[int] = []
    while len(ports) < len(listeners):
        port = _free_port(other_than=kafka.port)
        if port not in (kafka._controller_port, *ports):
            ports.append(port)
    reached = [f"{name}://127.0.0.1:{port}" for name, port in zip(listeners, ports, strict=True)]
    advertised = ",".join([f"PLAINTEXT://{kafka.bootstrap}", *reached])
    protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", **listeners}
    kafka._extra_properties |= {
        "listeners": f"{advertised},CONTROLLER://127.0.0.1:{kafka._controller_port}",
        "advertised.listeners": advertised,
        "listener.security.protocol.map": ",".join(f"{name}:{spoken}" for name, spoken in protocols.items()),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(folder / "both.pem"),
        "ssl.client.auth": "none",
        **(properties or {}),
    }
    return kafka, ports


def add_scram_user(kafka: LocalKafka, mechanism: str, password: str = PASSWORD) -> None:
    """Alice, or another password for her."""
    command = _java_command(
        find_java(),
        fetch_jars(),
        "kafka.admin.ConfigCommand",
        *(
            "--bootstrap-server",
            kafka.bootstrap,
            "--alter",
            "--entity-type",
            "users",
            "--entity-name",
            "alice",
        ),
        *("--add-config", f"{mechanism}=[password={password}]"),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")  # a right that any test granted to alice would hide that another one lacks it
def secured(kafka_jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    folder = tmp_path_factory.mktemp("broker-pem")
    pem = certificate(folder)
    kafka, ports = securely(folder, {"PASSWORD": "SASL_PLAINTEXT", "TLS": "SASL_SSL"})
    plain = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    for listener in ("password", "tls"):
        name = f"listener.name.{listener}"
        kafka._extra_properties |= {
            f"{name}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
            f"{name}.plain.sasl.jaas.config": f'{plain} user_alice="{PASSWORD}";',
            f"{name}.scram-sha-256.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            f"{name}.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
        }
    with kafka:
        for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
            add_scram_user(kafka, mechanism)
        yield SecuredKafka(kafka, ports[0], ports[1], pem)


def alice(**more: Any) -> KafkaSettings:
    given = {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_username": "alice",
        "sasl_password": SecretStr(PASSWORD),
        "request_timeout_ms": 5_000,
    }
    return SETTINGS.model_copy(update=given | more)


async def eventually(attempt: Any, refusal: str = "not authorized") -> Any:
    """Rights reach the broker's authorizer a moment after they were granted."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await attempt()
            except FreezepointError as error:
                if refusal not in str(error):
                    raise
            await asyncio.sleep(0.05)
