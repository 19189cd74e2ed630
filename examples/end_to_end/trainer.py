"""A trainer in NumPy: groups of results in, one policy-gradient step's numbers out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from freezepoint.reader import ResultReader
from freezepoint.transport.ports import Transport
from freezepoint_schemas.results import Result, Trace
from freezepoint_schemas.topics import Topic


@dataclass(frozen=True)
class Arrays:
    """One trace, ready to train on: all of shape [tokens]."""

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    log_probs: npt.NDArray[np.float64]


def arrays_of(trace: Trace) -> Arrays:
    """Log probabilities stand at the tokens they belong to, zero elsewhere."""
    token_ids = np.asarray(trace.token_ids)
    mask = np.zeros(token_ids.size, dtype=np.bool_)
    for span in trace.spans:
        mask[span.start : span.end] = True
    log_probs = np.zeros(token_ids.size)
    log_probs[mask] = trace.log_probs
    return Arrays(token_ids, mask, log_probs)


async def groups(transport: Transport, count: int) -> AsyncIterator[list[Result]]:
    """The first ``count`` prompt groups whose rollouts all have a result, masked ones included."""
    waiting: defaultdict[str, list[Result]] = defaultdict(list)
    reader = await transport.reader(Topic.TRAJECTORIES)
    try:
        async for read in ResultReader(reader).results(follow=True):
            group = waiting[read.result.group_id or read.result.rollout_id]
            group.append(read.result)
            if len(group) == (read.result.group_size or 1):
                yield group
                count -= 1
                if not count:
                    return
    finally:
        await reader.close()


def step(group: list[Result]) -> dict[str, float]:
    """Advantages against the group's mean reward, over the tokens that may be trained on."""
    rewards = np.array(
        [float(result.reward) if isinstance(result.reward, int | float) else 0.0 for result in group]
    )
    advantages = rewards - rewards.mean()
    loss, tokens = 0.0, 0
    for result, advantage in zip(group, advantages, strict=True):
        if result.mask_sample:
            continue
        main = arrays_of(next(trace for trace in result.traces if trace.role == "main"))
        loss -= float(advantage * main.log_probs[main.loss_mask].sum())
        tokens += int(main.loss_mask.sum())
    return {
        "loss": loss / max(tokens, 1),
        "tokens": tokens,
        "masked": sum(result.mask_sample for result in group),
    }
