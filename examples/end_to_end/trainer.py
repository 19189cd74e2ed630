"""A trainer in NumPy: groups of results in, one policy-gradient step's numbers out."""

from __future__ import annotations

import numpy as np

from freezepoint.reader import RolloutGroup
from freezepoint.training import collate


def step(group: RolloutGroup) -> dict[str, float]:
    """Advantages against the group's mean reward, over the tokens that may be trained on. A rollout that was lost counts
    as one without reward, in the mean alone."""
    batch = collate(group.results)
    rewards = np.nan_to_num(batch.rewards)
    mean = rewards.sum() / len(group.members)
    advantages = (rewards - mean)[batch.rollout_index]
    tokens = int(batch.loss_mask.sum())
    loss = -float((advantages[:, None] * batch.log_probs).sum())
    return {"loss": loss / max(tokens, 1), "tokens": tokens, "masked": len(group.masked)}
