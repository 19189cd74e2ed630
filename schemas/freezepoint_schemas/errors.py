"""Errors of the contract: what a record can be wrong in."""

from __future__ import annotations

from freezepoint_schemas.reasons import Reason


class FreezepointError(Exception):
    """Base class of every error this project raises on purpose."""


class InputError(FreezepointError):
    """Somebody sent something that breaks the contract."""


class ArrayError(InputError, ValueError):
    """A token array is not what the contract allows; the message says in what."""


class DecodeError(InputError):
    """One record could not be decoded.

    ``reason`` is the code its rollout is masked with (a record of it was lost), the message is for people.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
