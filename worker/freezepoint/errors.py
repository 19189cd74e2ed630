"""Errors by who is to blame: the input, the configuration, the broker, or us. Messages say what to do."""

from __future__ import annotations

from freezepoint_schemas.errors import ArrayError, DecodeError, FreezepointError, InputError


class ConfigurationError(FreezepointError):
    """The set-up is wrong; the message names the setting or command that mends it."""


class MissingTopicError(ConfigurationError):
    """A topic does not exist; ``freezepoint topics apply`` creates it."""


class BrokerError(FreezepointError):
    """The broker refused or failed."""


class BrokerUnavailableError(BrokerError):
    """No answer from the broker within the deadline."""


class PublishError(BrokerError):
    """A publication failed or its outcome is unknown: nothing may be assumed but what the ledger says."""


class FencedError(PublishError):
    """Another owner of the partition started: this one publishes nothing any more."""


class OwnershipLostError(BrokerError):
    """The partition was assigned elsewhere before the acquisition was proved."""


class StalledError(BrokerError):
    """Records are there and none comes: the client is stuck, and only a new one helps."""


class RecordTooLargeError(InputError):
    """A record is above the topic's limit and cannot be split further."""


__all__ = [
    "ArrayError",
    "BrokerError",
    "BrokerUnavailableError",
    "ConfigurationError",
    "DecodeError",
    "FencedError",
    "FreezepointError",
    "InputError",
    "MissingTopicError",
    "OwnershipLostError",
    "PublishError",
    "RecordTooLargeError",
    "StalledError",
]
