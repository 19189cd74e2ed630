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


class NoTokenError(BrokerUnavailableError):
    """There is no token to ask the broker with; whoever gives them is waited for."""


class StorageFullError(BrokerError):
    """The disk that the broker writes to is full: nothing is written, on any partition, until there is room."""


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


class InvalidRolloutIdError(InputError, ValueError):
    """An id that is no rollout id, or too long for a file's name."""


class ConflictingEntryError(InputError, ValueError):
    """A call id was used again with another payload: the first one is kept, its rollout is incomplete."""


class FrozenRolloutError(InputError, RuntimeError):
    """The rollout was frozen or retired before; clear it before it is dispatched again."""


class ExpiredCaptureError(InputError):
    """Records of a rollout that was frozen before are in the topic no longer; its result was published then."""


class DamagedCaptureError(InputError, ValueError):
    """A capture file does not hold what was acknowledged; the message says where."""


class CaptureError(InputError, ValueError):
    """A served response does not carry exactly one generation with its token ids and log probabilities."""


__all__ = [
    "ArrayError",
    "BrokerError",
    "BrokerUnavailableError",
    "CaptureError",
    "ConfigurationError",
    "ConflictingEntryError",
    "DamagedCaptureError",
    "DecodeError",
    "ExpiredCaptureError",
    "FencedError",
    "FreezepointError",
    "FrozenRolloutError",
    "InputError",
    "InvalidRolloutIdError",
    "MissingTopicError",
    "NoTokenError",
    "OwnershipLostError",
    "PublishError",
    "RecordTooLargeError",
    "StalledError",
    "StorageFullError",
]
