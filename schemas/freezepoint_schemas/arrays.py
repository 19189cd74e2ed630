"""Token arrays: two encodings on the wire, one meaning in memory.

On the wire an array is a JSON array of numbers or ``{"dtype", "data", "shape"?}`` with base64 of little-endian
contiguous values. In memory it is a read-only numpy array. Everything is checked in bulk, never element by element.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pybase64

from freezepoint_schemas.errors import ArrayError

TokenArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float64]
AnyArray: TypeAlias = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "u8": np.dtype("<u1"),
    "u16": np.dtype("<u2"),
    "i32": np.dtype("<i4"),
    "i64": np.dtype("<i8"),
    "f32": np.dtype("<f4"),
    "f64": np.dtype("<f8"),
}
_PACKED = (dict, Mapping)
"""What a packed array may be: of the two, the first is asked at a tenth of the price."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_TOKENS = np.dtype(np.int32)
_FLOATS = np.dtype(np.float64)
_INT32_MAX = 2**31 - 1
DIMENSIONS_MAX = 8
"""Of a packed array. Deeper lists stay lists."""


def unpack(packed: Mapping[str, Any]) -> AnyArray:
    """The array of a packed object, read-only and without a copy of the decoded bytes.

    :raises ArrayError: unknown dtype, bad base64, a length that does not fit the dtype or the shape.
    """
    dtype = DTYPES.get(packed["dtype"]) if isinstance(packed.get("dtype"), str) else None
    if dtype is None:
        raise ArrayError(f"dtype must be one of {', '.join(DTYPES)}")
    data = packed.get("data")
    if not isinstance(data, str):
        raise ArrayError("data must be a base64 string")
    try:
        raw = pybase64.b64decode(data, validate=True)
    except ValueError as error:
        raise ArrayError(f"data is no base64: {error}") from None
    if len(raw) % dtype.itemsize:
        raise ArrayError(f"{len(raw)} bytes do not hold whole {packed['dtype']} values")
    values = np.frombuffer(raw, dtype=dtype)
    return (
        values.reshape(_checked_shape(packed["shape"], values.size))
        if packed.get("shape") is not None
        else values
    )


def _checked_shape(shape: Any, size: int) -> tuple[int, ...]:
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= DIMENSIONS_MAX
        or any(type(n) is not int or n < 0 or n > 2**40 for n in shape)
    ):
        raise ArrayError(f"shape must be a list of 1 to {DIMENSIONS_MAX} non-negative integers")
    count = 1
    for dimension in shape:
        count *= dimension
    if count != size:
        raise ArrayError(f"shape {shape} needs {count} values, data holds {size}")
    if not count and shape[0]:
        raise ArrayError(f"shape {shape} holds no values, so its first dimension must be 0")
    return tuple(shape)


def pack(values: AnyArray) -> dict[str, Any]:
    """The packed object of an array; the shape stands only where there is more than one dimension."""
    name = _NAMES.get(values.dtype.newbyteorder("<") if values.dtype.itemsize > 1 else values.dtype)
    if name is None:
        raise ArrayError(f"dtype {values.dtype} has no packed form")
    flat = np.ascontiguousarray(values, dtype=DTYPES[name])
    packed: dict[str, Any] = {"dtype": name, "data": pybase64.b64encode_as_string(flat.data)}
    if values.ndim > 1:
        packed["shape"] = list(values.shape)
    return packed


def frozen(values: AnyArray) -> AnyArray:
    """The same array, marked read-only: arrays are shared between logs, traces and results."""
    values.flags.writeable = False
    return values


def token_ids(value: Any) -> TokenArray:
    """Token ids (int32, shape [n], read-only) from either encoding.

    :raises ArrayError: not whole numbers, negative, or beyond int32.
    """
    if isinstance(value, list):
        return frozen(_tokens_of_list(value))
    if isinstance(value, np.ndarray):
        return frozen(_tokens_of_array(value))
    if isinstance(value, _PACKED):
        return frozen(_tokens_of_array(unpack(value)))
    raise ArrayError("token ids must be an array of integers or a packed array")


def _tokens_of_list(value: list[Any]) -> TokenArray:
    """Of the array types, the unsigned ones take a list fastest, and refuse by themselves what is no integer."""
    try:
        tokens = np.frombuffer(array("I", value), dtype=np.int32)
    except TypeError:
        raise ArrayError("token ids must be integers") from None
    except OverflowError:
        raise ArrayError("a token id is negative or does not fit int32") from None
    if not tokens.size:
        return tokens
    low = _lowest(tokens)
    if low < 0:
        raise ArrayError("a token id does not fit int32")
    if low <= 1:
        _refuse_booleans(value, tokens, "token ids must be integers")
    return tokens


def _refuse_booleans(value: list[Any], read: AnyArray, message: str) -> None:
    """Only behind a 0 or a 1 can a boolean hide, so that few elements need a look."""
    suspects = np.flatnonzero((read == 0) | (read == 1)).tolist()
    if bool in {type(value[index]) for index in suspects}:
        raise ArrayError(message)


def _lowest(values: AnyArray) -> int:
    return int(np.minimum.reduce(values))  # what values.min() comes to, without its wrapper


def _is_ours(values: AnyArray) -> bool:
    """Whether it may be handed on as it is: read-only already, so that marking it changes nobody's array."""
    flags = values.flags
    return flags.c_contiguous and not flags.writeable


def _tokens_of_array(values: AnyArray) -> TokenArray:
    if values.ndim != 1:
        raise ArrayError("token ids must have one dimension")
    if values.dtype == _TOKENS:
        if values.size and _lowest(values) < 0:
            raise ArrayError("a token id is negative")
        return values if _is_ours(values) else np.ascontiguousarray(values).view()
    if values.dtype.kind not in "iu":
        raise ArrayError("token ids must be integers")
    if values.size and (int(values.min()) < 0 or int(values.max()) > _INT32_MAX):
        raise ArrayError("a token id is negative or does not fit int32")
    return np.ascontiguousarray(values, dtype=np.int32).view()


def log_probs(value: Any) -> FloatArray:
    """Log probabilities (float64, shape [n], finite, read-only) from either encoding.

    :raises ArrayError: not numbers, NaN or infinite.
    """
    if isinstance(value, list):
        return frozen(_floats_of_list(value))
    if isinstance(value, np.ndarray):
        return frozen(_floats_of_array(value))
    if isinstance(value, _PACKED):
        return frozen(_floats_of_array(unpack(value)))
    raise ArrayError("log probabilities must be an array of numbers or a packed array")


def _floats_of_list(value: list[Any]) -> FloatArray:
    try:
        floats = np.frombuffer(array("d", value), dtype=np.float64)
    except TypeError:
        raise ArrayError("log probabilities must be numbers") from None
    except OverflowError:
        raise ArrayError("a log probability is out of range") from None
    _refuse_booleans(value, floats, "log probabilities must be numbers")
    return _finite(floats)


def _floats_of_array(values: AnyArray) -> FloatArray:
    if values.ndim != 1:
        raise ArrayError("log probabilities must have one dimension")
    if values.dtype.kind not in "fiu":
        raise ArrayError("log probabilities must be numbers")
    if values.dtype == _FLOATS and _is_ours(values):
        return _finite(values)
    return np.ascontiguousarray(
        _finite(values), dtype=np.float64
    ).view()  # a signalling NaN is not cast in silence


def _finite(values: AnyArray) -> AnyArray:
    if not np.logical_and.reduce(np.isfinite(values)):
        raise ArrayError("log probabilities must be finite")
    return values


def pack_floats(values: FloatArray) -> dict[str, Any]:
    """Packed as f32 where that loses nothing, else as f64."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return pack(narrow if np.array_equal(narrow.astype(np.float64), values) else values)


def pack_routes(values: AnyArray | list[Any]) -> Any:
    """Routed experts packed where they are integers [tokens, layers, top_k], or an array; else as they are."""
    whole = values if isinstance(values, np.ndarray) else integer_array(values)
    return values if whole is None else pack(whole)


def routed_experts(value: Any) -> Any:
    """Routed experts as they came: a packed object becomes its array, nested lists stay lists.

    :raises ArrayError: neither of both, or NaN or infinite, which JSON cannot hold: written plainly, all of them would
        become the same null.
    """
    if isinstance(value, list):
        return value
    if not isinstance(value, Mapping | np.ndarray):
        raise ArrayError("routed_experts must be nested arrays or a packed array")
    values = value if isinstance(value, np.ndarray) else unpack(value)
    if not 1 <= values.ndim <= DIMENSIONS_MAX:
        raise ArrayError(f"routed_experts must have 1 to {DIMENSIONS_MAX} dimensions")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ArrayError("routed_experts must be finite")
    return frozen(values)


def integer_array(value: Any, dimensions: int = 3) -> AnyArray | None:
    """The integer array (u8, u16, i32 or i64 by need) that this value is, or None where it is ragged, not of that many
    dimensions or not of whole numbers: such values stay raw."""
    if isinstance(value, np.ndarray):
        return narrowed(value) if value.ndim == dimensions and value.dtype.kind in "iu" else None
    if not _nests_integers(value, dimensions):
        return None
    try:
        values = np.asarray(value)
    except (ValueError, OverflowError):
        return None
    if values.ndim != dimensions or values.dtype.kind not in "iu":
        return None
    if values.dtype.kind == "u" and values.size and int(values.max()) > 2**63 - 1:
        return None
    return narrowed(values)


def _nests_integers(value: Any, dimensions: int) -> bool:
    """Whether these are lists of that depth with integers alone in the innermost ones.

    Asked before numpy sees them: it reads true as 1, and widens every string to the longest one.
    """
    level = [value]
    for _ in range(dimensions):
        if set(map(type, level)) != {list}:
            return False
        level = list(chain.from_iterable(level))
    return set(map(type, level)) == {int}


def narrowed(values: AnyArray) -> AnyArray:
    """The same integers in the smallest of u8, u16, i32, i64 that holds them."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for name in ("u8", "u16", "i32"):
        limits = np.iinfo(DTYPES[name])
        if limits.min <= low and high <= limits.max:
            return values.astype(DTYPES[name])
    return values.astype(np.int64)
