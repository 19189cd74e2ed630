"""Routed experts as model servers send them: nested lists, arrays, or base64 of an array."""

from __future__ import annotations

import binascii
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from freezepoint.errors import ArrayError

_NPY_MAGIC = b"\x93NUMPY"


def decode_routes(value: Any) -> Any:
    """Routed experts in a form the contract takes: nested lists stay, arrays of any library become numpy's.

    A string is base64: of a ``.npy`` file (vLLM), whose shape is kept, or of bare little-endian int32 values (SGLang),
    whose shape only the server's model configuration knows: those become one flat array.

    :raises ArrayError: none of these.
    """
    if value is None or isinstance(value, list | Mapping):
        return value
    if isinstance(value, str):
        return _from_base64(value)
    if isinstance(value, tuple) or hasattr(value, "__array__"):
        return np.asarray(value)
    raise ArrayError(f"routed_experts is a {type(value).__name__}, not nested lists, an array or base64")


def _from_base64(text: str) -> np.ndarray[Any, np.dtype[Any]]:
    try:
        raw = binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise ArrayError(f"routed_experts is a string, but no base64: {error}") from None
    if not raw.startswith(_NPY_MAGIC):
        if len(raw) % 4:
            raise ArrayError(f"routed_experts holds {len(raw)} bytes, which are no int32 values")
        return np.frombuffer(raw, dtype="<i4")
    try:
        values = np.load(io.BytesIO(raw), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ArrayError(f"routed_experts is no readable .npy file: {error}") from None
    if values.dtype.kind not in "iu":
        raise ArrayError(f"routed_experts holds {values.dtype} values, not integers")
    return np.asarray(values)
