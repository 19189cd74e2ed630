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
    """The integers [``tokens``, layers, top_k] that a trace of these calls holds, if they align.

    They exist when every call that came with values has one row for each of its prompt and generation
    tokens, all with the same layers and top_k, and the last of these calls reaches the end. As every call's
    rows begin at the first token and later calls win, they are the last call's.
    """
    carriers = [call for call in calls if call.routes is not None]
    if not carriers or carriers[-1].cumulative_length != tokens:
        return None
    shapes = {_row_shape(call) for call in carriers}
    if any(map(is_mismatch, carriers)) or len(shapes) > 1 or None in shapes:
        return None
    rows = carriers[-1].routes
    return rows if isinstance(rows, np.ndarray) else None


def is_mismatch(call: ResolvedCall) -> bool:
    """Whether a call has an integer array of routed experts that is not one row per token."""
    routes = call.routes
    return (
        isinstance(routes, np.ndarray)
        and routes.ndim == _DIMENSIONS
        and len(routes) != call.cumulative_length
    )


def _row_shape(call: ResolvedCall) -> tuple[int, ...] | None:
    """(layers, top_k) of a call's values, None where they are no such array."""
    routes = call.routes
    return routes.shape[1:] if isinstance(routes, np.ndarray) and routes.ndim == _DIMENSIONS else None


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
