"""Several rollouts as rows of concatenated sequences, so that little is padding."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from freezepoint.training.rows import Cut, OnLong, OnMasked, Rows, Sample, copy_into, rows_of
from freezepoint_schemas.results import Result


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Rows of whole sequences, one sequence a trace; padding stands at the end of each row only. Arrays are writable.

    [rows, length]: ``token_ids`` int32, ``loss_mask`` bool, ``log_probs`` float32, ``position_ids`` int32 (they begin again
    at 0 in each sequence; 0 on padding), ``sequence_ids`` int32 (number within the row, -1 on padding), ``token_weights``
    float32 (1 / sampled tokens of the rollout where the loss mask is True, else 0).
    ``cu_seqlens``: per row int32 [sequences + 1], the sequences' bounds as variable-length attention kernels take them:
    from 0 to the row's used length; padding belongs to no sequence. ``max_seqlen``: the longest sequence.
    [sequences], in row order: ``row``, ``start``, ``lengths``, ``rollout_index``, ``trace_index`` int32, ``weights`` float32.
    ``trace_ids``: one a sequence. ``rollout_ids``, ``rewards``, ``cuts``: as in a padded batch.
    """

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    log_probs: npt.NDArray[np.float32]
    position_ids: npt.NDArray[np.int32]
    sequence_ids: npt.NDArray[np.int32]
    token_weights: npt.NDArray[np.float32]
    cu_seqlens: tuple[npt.NDArray[np.int32], ...]
    max_seqlen: int
    row: npt.NDArray[np.int32]
    start: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    rollout_index: npt.NDArray[np.int32]
    trace_index: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    trace_ids: tuple[str, ...]
    rollout_ids: tuple[str, ...]
    rewards: npt.NDArray[np.float64]
    cuts: tuple[Cut, ...]


def pack(
    results: Iterable[Sample | Result],
    length: int,
    *,
    pad_token_id: int = 0,
    on_long: OnLong = "error",
    masked: OnMasked = "error",
) -> PackedBatch:
    """Rows of ``length`` tokens that hold all traces of the results, each in one piece.

    Longest first, each into the fullest row that has room (best fit decreasing); the same input gives the same rows.
    ``on_long`` and ``masked`` as in :func:`freezepoint.training.collate`.

    :raises InputError: a trace longer than ``length``, or a masked result, unless the caller said what to do with it.
    """
    if length < 1:
        raise ValueError("length must be at least 1")
    made = rows_of(results, length_max=length, on_long=on_long, on_masked=masked)
    sizes = [min(len(row.arrays), length) for row in made.rows]
    return _filled(made, sizes, best_fit(sizes, length), length, pad_token_id)


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the sizes by row; no row sums up to more than the capacity. O(n log n) but for the shifts of a list."""
    rows: list[list[int]] = []
    spare: list[tuple[int, int]] = []  # (room left, row), sorted
    for index in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        place = bisect_left(spare, (sizes[index], -1))
        if place == len(spare):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room, row = spare.pop(place)
        rows[row].append(index)
        insort(spare, (room - sizes[index], row))
    return rows


def _filled(
    made: Rows, sizes: Sequence[int], plan: Sequence[Sequence[int]], length: int, pad_token_id: int
) -> PackedBatch:
    shape = (len(plan), length)
    token_ids = np.full(shape, pad_token_id, dtype=np.int32)
    loss_mask = np.zeros(shape, dtype=np.bool_)
    log_probs, token_weights = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    position_ids, sequence_ids = np.zeros(shape, dtype=np.int32), np.full(shape, -1, dtype=np.int32)
    bounds = [np.cumsum([0, *(sizes[index] for index in indices)], dtype=np.int32) for indices in plan]
    for number, indices in enumerate(plan):
        for sequence, index in enumerate(indices):
            arrays = made.rows[index].arrays
            start, stop = int(bounds[number][sequence]), int(bounds[number][sequence + 1])
            copy_into(token_ids[number, :stop], start, arrays.token_ids)
            copy_into(loss_mask[number, :stop], start, arrays.loss_mask)
            copy_into(log_probs[number, :stop], start, arrays.log_probs)
            copy_into(position_ids[number, :stop], start, arrays.position)
            sequence_ids[number, start:stop] = sequence
            token_weights[number, start:stop] = loss_mask[number, start:stop] * made.rows[index].weight
    order = [index for indices in plan for index in indices]
    return PackedBatch(
        token_ids=token_ids,
        loss_mask=loss_mask,
        log_probs=log_probs,
        position_ids=position_ids,
        sequence_ids=sequence_ids,
        token_weights=token_weights,
        cu_seqlens=tuple(bounds),
        max_seqlen=max(sizes, default=0),
        row=np.repeat(np.arange(len(plan), dtype=np.int32), [len(indices) for indices in plan]),
        start=np.array([begin for bound in bounds for begin in bound[:-1]], dtype=np.int32),
        lengths=np.array([sizes[index] for index in order], dtype=np.int32),
        rollout_index=np.array([made.rows[index].rollout for index in order], dtype=np.int32),
        trace_index=np.array([made.rows[index].trace for index in order], dtype=np.int32),
        weights=np.array([made.rows[index].weight for index in order], dtype=np.float32),
        trace_ids=tuple(made.rows[index].trace_id for index in order),
        rollout_ids=made.rollout_ids,
        rewards=made.rewards,
        cuts=made.cuts,
    )
