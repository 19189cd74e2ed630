"""What batches are made of: one row per trace, weighed by its rollout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from freezepoint.errors import InputError
from freezepoint.training.arrays import TraceArrays, to_arrays
from freezepoint.training.delivery import view
from freezepoint_schemas.reasons import Reason
from freezepoint_schemas.results import Result, Trace

OnLong: TypeAlias = Literal["error", "truncate", "drop"]
OnMasked: TypeAlias = Literal["error", "zero"]


class Sample(Protocol):
    """What the reader yields: a result under the delivery chosen there."""

    @property
    def result(self) -> Result: ...

    @property
    def traces(self) -> Sequence[Trace]: ...

    @property
    def reasons(self) -> Sequence[Reason]: ...


@dataclass(frozen=True, slots=True)
class Cut:
    """A trace that was longer than allowed: ``kept`` of its ``length`` tokens are in the batch (0: dropped)."""

    rollout_id: str
    role: str
    length: int
    kept: int


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One trace: ``rollout`` counts the samples given, ``trace`` that rollout's traces; ``weight`` is 1 over the sampled
    tokens of the whole rollout, 0 where it has none or is masked."""

    rollout: int
    trace: int
    trace_id: str
    arrays: TraceArrays
    weight: float


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """All rows of some samples. ``rewards``: float64 [samples], NaN where a rollout has no single number."""

    rows: Sequence[Row]
    rollout_ids: tuple[str, ...]
    rewards: npt.NDArray[np.float64]
    cuts: tuple[Cut, ...]


def rows_of(
    samples: Iterable[Sample | Result], *, length_max: int | None, on_long: OnLong, on_masked: OnMasked
) -> Rows:
    """The rows, none longer than ``length_max``.

    :raises InputError: a masked sample, or a trace that is too long, and the caller did not say what to do with it.
    """
    rows: list[Row] = []
    cuts: list[Cut] = []
    ids: list[str] = []
    rewards: list[float] = []
    for number, sample in enumerate(samples):
        result = sample if isinstance(sample, Result) else sample.result
        seen = view(sample) if isinstance(sample, Result) else sample
        masked = bool(seen.reasons)
        if masked and on_masked == "error":
            raise InputError(
                f"rollout {result.rollout_id} is masked ({', '.join(seen.reasons)}): leave it out, or say masked='zero'"
            )
        sampled = sum(trace.log_probs.size for trace in seen.traces)
        weight = 0.0 if masked or not sampled else 1.0 / sampled
        for index, trace in enumerate(seen.traces):
            arrays = to_arrays(result, trace, writable=False)
            if masked:
                arrays.loss_mask[:] = False
                arrays.log_probs[:] = 0
            kept, cut = _fitted(arrays, length_max, on_long, result.rollout_id, trace.role)
            cuts += [cut] if cut is not None else []
            if kept:
                rows.append(Row(number, index, trace.trace_id, arrays, weight))
        ids.append(result.rollout_id)
        rewards.append(_number(result.reward))
    return Rows(rows, tuple(ids), np.array(rewards, dtype=np.float64), tuple(cuts))


def _fitted(
    arrays: TraceArrays, length_max: int | None, on_long: OnLong, rollout_id: str, role: str
) -> tuple[bool, Cut | None]:
    """Whether the trace is in the batch, and what was cut of it."""
    length = len(arrays)
    if length_max is None or length <= length_max:
        return True, None
    if on_long == "error":
        raise InputError(
            f"rollout {rollout_id}, trace {role}: {length} tokens, {length_max} are allowed: allow more, or say "
            "on_long='truncate' or on_long='drop'"
        )
    return on_long == "truncate", Cut(rollout_id, role, length, length_max if on_long == "truncate" else 0)


def copy_into(target: npt.NDArray[np.generic], start: int, values: npt.NDArray[np.generic]) -> int:
    """Copy as much as fits from ``start`` on; how many values that was."""
    count = min(values.size, target.size - start)
    target[start : start + count] = values[:count]
    return count


def _number(reward: object) -> float:
    """The reward as one number, NaN where it is none."""
    return float(reward) if isinstance(reward, int | float) else float("nan")
