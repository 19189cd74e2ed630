"""Several rollouts as one padded batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from freezepoint.training.rows import Cut, OnLong, OnMasked, Sample, copy_into, rows_of
from freezepoint_schemas.results import Result


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch:
    """One row per trace, padded on the right. All arrays are fresh and writable.

    [batch, length]: ``token_ids`` int32 (``pad_token_id`` behind a row's end), ``loss_mask`` bool, ``log_probs`` float32 (0
    where the loss mask is False), ``position`` int32 (0 behind the end), ``attention_mask`` bool (True on tokens).
    [batch]: ``lengths`` int32, ``rollout_index`` int32 (into what was given, and into ``rollout_ids`` and ``rewards``),
    ``trace_index`` int32 (of that rollout's traces), ``weights`` float32: 1 / sampled tokens of the whole rollout, so that
    ``(loss * loss_mask * weights[:, None]).sum() / len(rollout_ids)`` counts every rollout the same, however it branched.
    ``trace_ids``: one a row. ``rewards``: float64 [rollouts], NaN where a rollout has no single number.
    ``cuts``: the traces that were truncated or dropped for their length.
    """

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    log_probs: npt.NDArray[np.float32]
    position: npt.NDArray[np.int32]
    attention_mask: npt.NDArray[np.bool_]
    lengths: npt.NDArray[np.int32]
    rollout_index: npt.NDArray[np.int32]
    trace_index: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    trace_ids: tuple[str, ...]
    rollout_ids: tuple[str, ...]
    rewards: npt.NDArray[np.float64]
    cuts: tuple[Cut, ...]


def collate(
    results: Iterable[Sample | Result],
    *,
    pad_to: int | None = None,
    multiple_of: int = 1,
    pad_token_id: int = 0,
    on_long: OnLong = "error",
    masked: OnMasked = "error",
) -> PaddedBatch:
    """A padded batch of all traces of the results.

    :param pad_to: every row's length; None: the longest trace's.
    :param multiple_of: without ``pad_to``, round the length up to a multiple.
    :param on_long: what becomes of a trace longer than ``pad_to``: ``error``, ``truncate`` (its end is cut off) or ``drop``;
        the last two are listed in ``cuts``. A weight stays that of the whole rollout.
    :param masked: what becomes of a masked result: ``error``, or ``zero`` (its rows have an empty loss mask, weight 0).
    :raises InputError: see ``on_long`` and ``masked``.
    """
    if (pad_to is not None and pad_to < 1) or multiple_of < 1:
        raise ValueError("pad_to and multiple_of must be at least 1")
    made = rows_of(results, length_max=pad_to, on_long=on_long, on_masked=masked)
    longest = max((len(row.arrays) for row in made.rows), default=0)
    length = pad_to if pad_to is not None else -(-longest // multiple_of) * multiple_of
    shape = (len(made.rows), length)
    token_ids = np.full(shape, pad_token_id, dtype=np.int32)
    loss_mask, attention_mask = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
    log_probs, position = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.int32)
    lengths = np.zeros(shape[0], dtype=np.int32)
    for number, row in enumerate(made.rows):
        lengths[number] = copy_into(token_ids[number], 0, row.arrays.token_ids)
        copy_into(loss_mask[number], 0, row.arrays.loss_mask)
        copy_into(log_probs[number], 0, row.arrays.log_probs)
        copy_into(position[number], 0, row.arrays.position)
        attention_mask[number, : lengths[number]] = True
    return PaddedBatch(
        token_ids=token_ids,
        loss_mask=loss_mask,
        log_probs=log_probs,
        position=position,
        attention_mask=attention_mask,
        lengths=lengths,
        rollout_index=np.array([row.rollout for row in made.rows], dtype=np.int32),
        trace_index=np.array([row.trace for row in made.rows], dtype=np.int32),
        weights=np.array([row.weight for row in made.rows], dtype=np.float32),
        trace_ids=tuple(row.trace_id for row in made.rows),
        rollout_ids=made.rollout_ids,
        rewards=made.rewards,
        cuts=made.cuts,
    )
