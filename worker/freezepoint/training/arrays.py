"""One trace as aligned arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from freezepoint.core.projection import response_form, trace_response
from freezepoint.errors import InputError
from freezepoint_schemas.arrays import AnyArray
from freezepoint_schemas.results import Result, Span, Trace

UNKNOWN_VERSION = -1
"""In ``TraceArrays.policy_version``: a token that was not sampled, or whose call came without a whole-numbered version."""

_INT64 = np.iinfo(np.int64)
_MAIN = "main"


@dataclass(frozen=True, slots=True, eq=False)
class TraceArrays:
    """The arrays of one trace, all of shape [n] and aligned by token.

    ``token_ids``: int32. ``loss_mask``: bool, True where the token was sampled and is owned by this trace.
    ``log_probs``: float32 (or float64 if asked for), as sampled; 0 where ``loss_mask`` is False. ``position``: int32,
    0 to n-1. ``policy_version``: int64, :data:`UNKNOWN_VERSION` where not known, or None where no token's is.
    ``routed_experts``: integers [n, layers, top_k], or None; always read-only, shared with the result.
    """

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    log_probs: npt.NDArray[Any]
    position: npt.NDArray[np.int32]
    policy_version: npt.NDArray[np.int64] | None
    policy_version_min: int | None
    policy_version_max: int | None
    routed_experts: AnyArray | None

    def __len__(self) -> int:
        return int(self.token_ids.size)

    @property
    def sampled(self) -> int:
        """How many tokens are trained on."""
        return int(np.count_nonzero(self.loss_mask))


def to_arrays(
    result: Result,
    trace: Trace | str | None = None,
    *,
    writable: bool = True,
    float_type: Literal["float32", "float64"] = "float32",
) -> TraceArrays:
    """The arrays of a trace, named by its role (``main``, ``branch-0``, ...), by default of the main one.

    :param writable: True: all arrays are fresh and may be written to, which costs one copy of ``token_ids`` (and is what
        ``torch.from_numpy`` wants: it warns of read-only arrays). False: ``token_ids`` is the result's own, read-only
        array; nothing of it is copied.
    :param float_type: of ``log_probs``. Results hold float64; what float32 cannot hold becomes its largest or smallest
        finite value, never an infinity.
    :raises InputError: no such trace, or its spans contradict its arrays.
    """
    chosen = find_trace(result, trace)
    length = chosen.token_ids.size
    mask = _mask(result, chosen)
    log_probs = np.zeros(length, dtype=float_type)
    log_probs[mask] = _as_type(chosen.log_probs, log_probs.dtype)
    versions = _versions(chosen.spans)
    return TraceArrays(
        token_ids=chosen.token_ids.copy() if writable else chosen.token_ids,
        loss_mask=mask,
        log_probs=log_probs,
        position=np.arange(length, dtype=np.int32),
        policy_version=_version_per_token(chosen, length) if versions else None,
        policy_version_min=min(versions, default=None),
        policy_version_max=max(versions, default=None),
        routed_experts=chosen.routed_experts if isinstance(chosen.routed_experts, np.ndarray) else None,
    )


def find_trace(result: Result, trace: Trace | str | None = None) -> Trace:
    """The trace itself, the one of that role, or without one the main trace or the only one.

    :raises InputError: there is none; the message names those there are.
    """
    if isinstance(trace, Trace):
        return trace
    wanted = _MAIN if trace is None else trace
    found = next((candidate for candidate in result.traces if candidate.role == wanted), None)
    if found is None and trace is None and len(result.traces) == 1:
        found = result.traces[0]
    if found is None:
        roles = ", ".join(candidate.role for candidate in result.traces) or "none at all"
        raise InputError(f"rollout {result.rollout_id} has no trace {wanted!r}; it has: {roles}")
    return found


def to_response(result: Result, trace: Trace | str | None = None) -> dict[str, Any]:
    """The reference's form: without ``trace`` the result's whole dictionary with its ``rebuilt_response``, else that
    trace as a response. Quadratic in the turns, since every item carries its whole prompt.

    :raises InputError: no such trace.
    """
    if trace is None:
        return response_form(result)
    return trace_response(result, find_trace(result, trace))


def _mask(result: Result, trace: Trace) -> npt.NDArray[np.bool_]:
    mask = np.zeros(trace.token_ids.size, dtype=np.bool_)
    reached = 0
    for span in trace.spans:
        if not reached <= span.start <= span.end <= mask.size:
            raise InputError(
                f"rollout {result.rollout_id}, trace {trace.role}: span {span.start}:{span.end} overlaps another or lies "
                f"outside its {mask.size} tokens"
            )
        mask[span.start : span.end] = True
        reached = span.end
    sampled = int(np.count_nonzero(mask))
    if sampled != trace.log_probs.size:
        raise InputError(
            f"rollout {result.rollout_id}, trace {trace.role}: {sampled} sampled tokens and {trace.log_probs.size} log "
            "probabilities"
        )
    return mask


def _as_type(values: npt.NDArray[np.float64], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if dtype == values.dtype:
        return values
    limits = np.finfo(dtype)
    return np.clip(values, limits.min, limits.max).astype(dtype)


def whole_version(version: int | str | None) -> int | None:
    """The version as a number that an int64 array can hold, or None: it is a name, or missing."""
    if isinstance(version, int) and _INT64.min <= version <= _INT64.max:
        return version
    return None


def _versions(spans: Iterable[Span]) -> list[int]:
    found = (whole_version(span.policy_version) for span in spans if span.end > span.start)
    return [version for version in found if version is not None]


def _version_per_token(trace: Trace, length: int) -> npt.NDArray[np.int64]:
    versions = np.full(length, UNKNOWN_VERSION, dtype=np.int64)
    for span in trace.spans:
        version = whole_version(span.policy_version)
        if version is not None:
            versions[span.start : span.end] = version
    return versions
