"""Routed experts of a trace: aligned rows once, and each call's own values as what differs from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from freezepoint.core.snapshot import ResolvedCall
from freezepoint_schemas.arrays import AnyArray, narrowed
from freezepoint_schemas.results import RoutePatch, Trace, TraceItem

_DIMENSIONS = 3


def aligned_routes(calls: Sequence[ResolvedCall], tokens: int) -> AnyArray | None:
    """The integers [``tokens``, layers, top_k] that a trace of these calls holds, or None where there are none.

    They exist when every call that came with values has one row for each of its prompt and generation tokens, all
    with the same layers and top_k, and the last of these calls reaches the end. As every call's rows begin at the
    first token and later calls win, they are the last call's.
    """
    carriers = [call for call in calls if call.routes is not None]
    if not carriers or carriers[-1].cumulative_length != tokens or not all(map(_fits, carriers)):
        return None
    rows = carriers[-1].routes
    same = all(_row_shape(call) == _row_shape(carriers[-1]) for call in carriers)
    return rows if same and isinstance(rows, np.ndarray) else None


def _is_whole(call: ResolvedCall) -> bool:
    return isinstance(call.routes, np.ndarray) and call.routes.ndim == _DIMENSIONS


def _fits(call: ResolvedCall) -> bool:
    return _is_whole(call) and len(call.routes or ()) == call.cumulative_length


def _row_shape(call: ResolvedCall) -> tuple[int, ...]:
    return call.routes.shape[1:] if isinstance(call.routes, np.ndarray) else ()


def is_mismatch(call: ResolvedCall) -> bool:
    """Whether a call has an integer array of routed experts that is not one row per token."""
    return _is_whole(call) and not _fits(call)


def route_patch(values: AnyArray, rows: AnyArray) -> RoutePatch:
    """A call's ``values`` as what differs from the first of a trace's ``rows``."""
    index = np.flatnonzero((values != rows[: len(values)]).any(axis=(1, 2))).astype(np.int32)
    if not index.size:
        return RoutePatch(rows=len(values))
    return RoutePatch(rows=len(values), index=index, values=narrowed(values[index]))


def routes_of(trace: Trace, item: TraceItem) -> list[Any] | None:
    """A call's routed experts as its server sent them, as nested lists; None where it sent none."""
    if item.routed_experts is not None:
        return _as_lists(item.routed_experts)
    if item.routed_patch is None or trace.routed_experts is None:
        return None
    patch = item.routed_patch
    rows = np.asarray(trace.routed_experts)[: patch.rows]
    if patch.index is not None:
        values = np.asarray(patch.values)
        rows = rows.astype(np.result_type(rows, values))
        rows[patch.index] = values
    return _as_lists(rows)


def _as_lists(values: AnyArray | list[Any]) -> list[Any]:
    lists: list[Any] = values.tolist() if isinstance(values, np.ndarray) else values
    return lists
