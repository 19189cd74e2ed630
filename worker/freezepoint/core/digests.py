"""What a call's payload is, as digests: equal for equal decoded fields, whatever encoding they came in."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import xxhash

from freezepoint_schemas.arrays import DIMENSIONS_MAX, AnyArray, TokenArray, integer_array
from freezepoint_schemas.events import PromptPrefix, TokenEntry

_LITTLE_ENDIAN_TOKENS = np.dtype("<i4")
_LITTLE_ENDIAN_FLOATS = np.dtype("<f8")


def body_digest(entry: TokenEntry) -> bytes:
    """xxh3-128 of everything of a call except how its prompt is written (16 bytes).

    Output items count as JSON with sorted keys; integer routed experts count by their values, whatever
    their dtype.
    """
    return body_digest_of(entry, canonical_routes(entry.routed_experts))


def body_digest_of(entry: TokenEntry, routes: AnyArray | list[Any] | None) -> bytes:
    """:func:`body_digest` where the canonical routed experts are at hand."""
    hasher = xxhash.xxh3_128(
        orjson.dumps(
            [
                entry.model_call_id,
                entry.model,
                entry.output_items,
                entry.token_item_index,
                entry.created_at,
                entry.parent_call_id,
                entry.policy_version,
                entry.finish_reason,
                entry.response_id,
                entry.generation_token_ids.size,
            ],
            option=orjson.OPT_SORT_KEYS,
        )
    )
    hasher.update(_as(_LITTLE_ENDIAN_TOKENS, entry.generation_token_ids))
    hasher.update(_as(_LITTLE_ENDIAN_FLOATS, entry.generation_log_probs))
    _update_routes(hasher, routes)
    return hasher.digest()


def _as(dtype: np.dtype[Any], values: AnyArray) -> memoryview:
    """Their bytes, contiguous and in this byte order: on nearly every machine without a copy."""
    if values.dtype == dtype and values.flags.c_contiguous:
        return values.data
    return np.ascontiguousarray(values, dtype=dtype).data


def _update_routes(hasher: xxhash.xxh3_128, routes: AnyArray | list[Any] | None) -> None:
    if routes is None:
        hasher.update(b"null")
    elif isinstance(routes, np.ndarray):
        hasher.update(orjson.dumps([routes.dtype.str, routes.shape]))
        hasher.update(np.ascontiguousarray(routes).data)
    else:
        hasher.update(orjson.dumps(routes, option=orjson.OPT_SORT_KEYS))


def prompt_form(entry: TokenEntry) -> bytes:
    """xxh3-128 of how a prompt is written: any reference, and the tokens after it (16 bytes)."""
    hasher = form_hasher(entry.prompt_prefix)
    hasher.update(_as(_LITTLE_ENDIAN_TOKENS, entry.prompt_token_ids))
    return hasher.digest()


def form_hasher(prefix: PromptPrefix | None) -> xxhash.xxh3_128:
    """What has :func:`prompt_form` for its digest, once it has read the tokens as little-endian int32."""
    reference = None if prefix is None else [prefix.call_id, prefix.length, prefix.digest]
    return xxhash.xxh3_128(orjson.dumps(reference))


def tokens_digest(tokens: TokenArray) -> bytes:
    """xxh3-128 of tokens as little-endian int32 (16 bytes; in hex a prompt prefix's ``digest``)."""
    return xxhash.xxh3_128_digest(_as(_LITTLE_ENDIAN_TOKENS, tokens))


def payload_digest(entry: TokenEntry, prompt_digest: bytes | None = None) -> bytes:
    """xxh3-128 of a call's whole payload, however its prompt is written (16 bytes).

    :param prompt_digest: :func:`tokens_digest` of the whole prompt; needed where the entry has a
        ``prompt_prefix``.
    """
    if prompt_digest is None:
        if entry.prompt_prefix is not None:
            raise ValueError("a prompt by reference must be resolved before its payload has a digest")
        prompt_digest = tokens_digest(entry.prompt_token_ids)
    return joined_digest(body_digest(entry), prompt_digest)


def joined_digest(body: bytes, prompt: bytes) -> bytes:
    """The payload digest of a body digest and a prompt digest."""
    return xxhash.xxh3_128_digest(body + prompt)


def canonical_routes(value: AnyArray | list[Any] | None) -> AnyArray | list[Any] | None:
    """Routed experts in the one form all their encodings share: an integer array in the narrowest dtype
    where they are one (of as many dimensions as a packed array may have), else nested lists as JSON would hold them."""
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        whole = integer_array(value, value.ndim) if value.size else None
        return value.tolist() if whole is None else whole
    dimensions = _nesting(value)
    if dimensions > DIMENSIONS_MAX:
        return value
    whole = integer_array(value, dimensions)
    return value if whole is None or not whole.size else whole


def _nesting(value: Any) -> int:
    dimensions = 0
    while isinstance(value, list):
        dimensions += 1
        value = value[0] if value else None
    return dimensions
