"""TLS with the broker: whom we trust and what we show, by files that may be renewed, and whose fault it is that it fails."""

from __future__ import annotations

import re
import ssl
from typing import Final

from freezepoint.errors import ConfigurationError
from freezepoint.settings import KafkaSettings
from freezepoint.transport.kafka.faults import one_line

_OF_OUR_CERTIFICATE: Final = re.compile(r"ALERT_.*CERTIFICATE|ALERT_UNKNOWN_CA|ALERT_ACCESS_DENIED")
"""Alerts by which a broker refuses us. From TLS 1.3 on they come after the handshake, upon the first request."""


def tls_context(settings: KafkaSettings) -> ssl.SSLContext:
    """Certificates are always verified; ``ssl_check_hostname`` off only stops comparing the name.

    :raises ConfigurationError: a file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=settings.ssl_ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"kafka.ssl_ca_file {settings.ssl_ca_file}: {one_line(error)}") from None
    context.check_hostname = settings.ssl_check_hostname
    _load_certificate(context, settings)
    return context


def _load_certificate(context: ssl.SSLContext, settings: KafkaSettings) -> None:
    if settings.ssl_cert_file is None:
        return
    secret = settings.ssl_key_password
    # An empty password instead of none: OpenSSL would prompt on the terminal for a key that turns out to be encrypted.
    password = secret.get_secret_value() if secret is not None else ""
    try:
        context.load_cert_chain(settings.ssl_cert_file, settings.ssl_key_file, password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"kafka.ssl_cert_file {settings.ssl_cert_file}, kafka.ssl_key_file {settings.ssl_key_file} or "
            f"kafka.ssl_key_password cannot be used: {one_line(error)}"
        ) from None


class Certificates:
    """The files that a context is made from, looked at again. Made before it, so that no change is missed."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._read = self._written()

    def renew(self, context: ssl.SSLContext | None) -> None:
        """What was renewed in the files is shown and trusted from the next connection on; what cannot be used, as while it is
        being written, is not."""
        files = self._written()
        if context is None or files == self._read:
            return
        try:
            tls_context(self._settings)
        except ConfigurationError:
            return
        self._read = files
        if self._settings.ssl_ca_file is not None:
            context.load_verify_locations(self._settings.ssl_ca_file)
        _load_certificate(context, self._settings)

    def _written(self) -> list[tuple[int, int] | None]:
        """Differs once the files are others; None for one that cannot be looked at."""
        settings = self._settings
        found: list[tuple[int, int] | None] = []
        for path in (settings.ssl_ca_file, settings.ssl_cert_file, settings.ssl_key_file):
            try:
                about = None if path is None else path.stat()
            except OSError:
                about = None
            found.append(None if about is None else (about.st_ino, about.st_mtime_ns))
        return found


def tls_refusal(settings: KafkaSettings, error: BaseException, where: str) -> ConfigurationError | None:
    """What to look at when TLS fails for another reason than that nobody is there any more."""
    failure = error if isinstance(error, ssl.SSLError) else error.__cause__
    if not isinstance(failure, ssl.SSLError) or isinstance(failure, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return None
    if _OF_OUR_CERTIFICATE.search(failure.reason or "") is None:
        return ConfigurationError(
            f"TLS with {where} failed: {one_line(failure)}; check kafka.security_protocol and kafka.ssl_ca_file"
        )
    if settings.ssl_cert_file is None:
        return ConfigurationError(
            f"the broker at {where} wants a client certificate: set kafka.ssl_cert_file and kafka.ssl_key_file "
            "(FREEZEPOINT_KAFKA__SSL_CERT_FILE, FREEZEPOINT_KAFKA__SSL_KEY_FILE)"
        )
    return ConfigurationError(
        f"the broker at {where} refused our certificate ({failure.reason}): check kafka.ssl_cert_file {settings.ssl_cert_file} "
        "and its expiry, and that the broker's ssl.truststore has who signed it"
    )
