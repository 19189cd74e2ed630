"""What we show a broker that asks who we are, from the settings; those that are missing or contradict are refused by name."""

from __future__ import annotations

import logging
from typing import Any, Final

from aiokafka.protocol.admin import SaslAuthenticateRequest

from freezepoint.addresses import shown_url
from freezepoint.errors import ConfigurationError
from freezepoint.settings import KafkaSettings
from freezepoint.transport.kafka.bearer import BearerFile, BearerProvider, BearerSource
from freezepoint.transport.kafka.oidc import ClientCredentials

OAUTH: Final = "OAUTHBEARER"
PASSWORD: Final = ("sasl_username", "sasl_password")
CERTIFICATE, KEY = "ssl_cert_file", "ssl_key_file"
FILE, URL, CLIENT_ID, SECRET, SECRET_FILE = (
    "sasl_oauth_token_file",
    "sasl_oauth_token_url",
    "sasl_oauth_client_id",
    "sasl_oauth_client_secret",
    "sasl_oauth_client_secret_file",
)
OF_ENDPOINT: Final = (URL, CLIENT_ID, SECRET, SECRET_FILE, "sasl_oauth_scope", "sasl_oauth_ca_file")


def credentials(settings: KafkaSettings) -> dict[str, Any]:
    """The client's arguments; none where the protocol asks for none.

    :raises ConfigurationError: settings are missing, or contradict each other.
    """
    _check_oauth_is_meant(settings)
    _check_nothing_is_shown_in_vain(settings)
    if not settings.security_protocol.startswith("SASL_"):
        return {}
    logging.getLogger("aiokafka.conn").addFilter(_hides_credentials)
    if settings.sasl_mechanism == OAUTH:
        return {
            "sasl_mechanism": OAUTH,
            "sasl_oauth_token_provider": BearerProvider(_bearer_source(settings)),
        }
    if settings.sasl_username is None or settings.sasl_password is None:
        raise ConfigurationError(
            f"kafka.security_protocol {settings.security_protocol} needs credentials: set {_named(*PASSWORD)}, or for tokens "
            f"kafka.sasl_mechanism {OAUTH}"
        )
    return {
        "sasl_mechanism": settings.sasl_mechanism,
        "sasl_plain_username": settings.sasl_username,
        "sasl_plain_password": settings.sasl_password.get_secret_value(),
    }


def _check_oauth_is_meant(settings: KafkaSettings) -> None:
    """Settings of one mechanism beside another one are a mistake in either; which, we cannot know."""
    uses_tokens = settings.sasl_mechanism == OAUTH
    if uses_tokens and not settings.security_protocol.startswith("SASL_"):
        raise ConfigurationError(
            f"kafka.sasl_mechanism {OAUTH} is for kafka.security_protocol SASL_SSL, which is "
            f"{settings.security_protocol}: set {_variable('security_protocol')}=SASL_SSL"
        )
    others = _given(settings, PASSWORD) if uses_tokens else _given(settings, (FILE, *OF_ENDPOINT))
    if others:
        raise ConfigurationError(
            f"kafka.sasl_mechanism is {settings.sasl_mechanism}, which has no use for {_named(*others)}: unset what is not "
            f"meant, or set {_variable('sasl_mechanism')}"
        )


def _check_nothing_is_shown_in_vain(settings: KafkaSettings) -> None:
    """Whoever sets a password or a certificate believes that the broker sees it."""
    protocol = settings.security_protocol
    passwords, certificate = _given(settings, PASSWORD), _given(settings, (CERTIFICATE, KEY))
    if passwords and not protocol.startswith("SASL_"):
        raise ConfigurationError(
            f"kafka.security_protocol is {protocol}, which has no use for {_named(*passwords)}: unset what is not meant, or set "
            f"{_variable('security_protocol')}=SASL_SSL"
        )
    if certificate and not protocol.endswith("SSL"):
        raise ConfigurationError(
            f"kafka.security_protocol is {protocol}, which has no use for {_named(*certificate)}: unset what is not meant, or "
            f"set {_variable('security_protocol')}=SSL, or SASL_SSL"
        )
    if certificate == (KEY,):
        raise ConfigurationError(f"{_named(KEY)} is of no use without {_named(CERTIFICATE)}")


def _bearer_source(settings: KafkaSettings) -> BearerSource:
    path, of_endpoint = settings.sasl_oauth_token_file, _given(settings, OF_ENDPOINT)
    if path is not None:
        if of_endpoint:
            raise ConfigurationError(
                f"kafka.{FILE} gives the token, and {_named(*of_endpoint)} would too: unset the one or the other"
            )
        return BearerFile(path)
    if URL not in of_endpoint:
        raise ConfigurationError(
            f"kafka.sasl_mechanism {OAUTH} needs a token: set {_named(FILE)} or {_named(URL)}"
        )
    if CLIENT_ID not in of_endpoint:
        raise ConfigurationError(f"kafka.{URL} needs {_named(CLIENT_ID)}")
    secrets = _given(settings, (SECRET, SECRET_FILE))
    if len(secrets) != 1:
        wanted = f"one of {_named(SECRET, SECRET_FILE)}"
        raise ConfigurationError(f"kafka.{URL} needs {wanted}: {'both are' if secrets else 'none is'} set")
    return ClientCredentials(settings)


def refused_token(settings: KafkaSettings) -> ConfigurationError:
    """What to look at when the broker does not accept a token. Its own words are left out: a validator may repeat the token."""
    where = f"kafka.{FILE} {settings.sasl_oauth_token_file}"
    if settings.sasl_oauth_token_file is None:
        url = shown_url(settings.sasl_oauth_token_url or "")
        where = f"kafka.{URL} {url}, kafka.{CLIENT_ID} and kafka.sasl_oauth_scope"
    return ConfigurationError(
        f"the broker refused the token: check {where}, and that the token's issuer, audience and expiry are what the broker "
        "wants (its sasl.oauthbearer.expected.issuer and .audience, its key set and its clock)"
    )


def _given(settings: KafkaSettings, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if getattr(settings, name) is not None)


def _named(*names: str) -> str:
    settings, variables = (f"kafka.{name}" for name in names), (_variable(name) for name in names)
    return f"{' and '.join(settings)} ({', '.join(variables)})"


def _variable(name: str) -> str:
    return f"FREEZEPOINT_KAFKA__{name.upper()}"


def _hides_credentials(record: logging.LogRecord) -> bool:
    """A filter: at level debug the client logs every request, and those that authenticate hold password or token."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    return not any(
        getattr(argument, "API_KEY", None) == SaslAuthenticateRequest.API_KEY for argument in arguments
    )
