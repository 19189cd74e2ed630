"""Padded and packed batches: what stands where, what is never silent."""

from __future__ import annotations

import numpy as np
import pytest

from freezepoint.errors import InputError
from freezepoint.training import Cut, collate, pack
from freezepoint.training.packing import best_fit
from freezepoint_schemas.results import Result
from tests.results import result, trace, trajectory


def some() -> list[Result]:
    """One rollout of one trace, one of two."""
    return [
        result("a", reward=1.5),
        result(
            "b",
            traces=[trace([4, 5, 6, 7], [(2, 4)]), trace([4, 8], [(1, 2)], role="branch-0")],
            delivery="all_traces",
            reward={"task": 1},
        ),
    ]


def test_a_padded_batch() -> None:
    batch = collate(some(), pad_token_id=99)
    assert batch.token_ids.tolist() == [[1, 2, 3, 99], [4, 5, 6, 7], [4, 8, 99, 99]]
    assert batch.loss_mask.astype(int).tolist() == [[0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 0, 0]]
    assert batch.log_probs.tolist() == [[0, -0.125, -0.25, 0], [0, 0, -0.125, -0.25], [0, -0.125, 0, 0]]
    assert batch.position.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 0, 0]]
    assert batch.attention_mask.sum(axis=1).tolist() == batch.lengths.tolist() == [3, 4, 2]
    assert batch.rollout_index.tolist() == [0, 1, 1]
    assert batch.trace_index.tolist() == [0, 0, 1]
    assert batch.weights.tolist() == [np.float32(1 / 2), np.float32(1 / 3), np.float32(1 / 3)]
    assert (batch.rollout_ids, batch.trace_ids) == (("a", "b"), ("t:main", "t:main", "t:branch-0"))
    assert batch.rewards[0] == 1.5
    assert np.isnan(batch.rewards[1])
    assert batch.cuts == ()


def test_every_rollout_weighs_the_same() -> None:
    batch = collate(some())
    per_rollout = np.zeros(2)
    np.add.at(per_rollout, batch.rollout_index, (batch.loss_mask * batch.weights[:, None]).sum(axis=1))
    assert per_rollout == pytest.approx([1, 1])


def test_lengths_asked_for() -> None:
    assert collate(some(), pad_to=6).token_ids.shape == (3, 6)
    assert collate(some(), multiple_of=8).token_ids.shape == (3, 8)
    assert collate([]).token_ids.shape == (0, 0)
    with pytest.raises(ValueError, match="at least 1"):
        collate(some(), pad_to=0)


def test_what_is_too_long_is_never_cut_in_silence() -> None:
    with pytest.raises(InputError, match=r"rollout b, trace main: 4 tokens, 3 are allowed.*on_long"):
        collate(some(), pad_to=3)
    cut = collate(some(), pad_to=3, on_long="truncate")
    assert cut.token_ids.tolist()[1] == [4, 5, 6]
    assert cut.cuts == (Cut("b", "main", 4, 3),)
    assert cut.weights[1] == np.float32(1 / 3), "of the whole rollout, cut or not"
    dropped = collate(some(), pad_to=3, on_long="drop")
    assert dropped.trace_ids == ("t:main", "t:branch-0")
    assert dropped.cuts == (Cut("b", "main", 4, 0),)
    assert dropped.rollout_index.tolist() == [0, 1]


def test_a_masked_result_is_an_error_or_weighs_nothing() -> None:
    masked = result("m", reasons=["capture_incomplete"])
    with pytest.raises(InputError, match=r"rollout m is masked \(capture_incomplete\)"):
        collate([masked])
    batch = collate([masked], masked="zero")
    assert batch.token_ids.tolist() == [[1, 2, 3]]
    assert not batch.loss_mask.any()
    assert not batch.log_probs.any()
    assert batch.weights.tolist() == [0]


def test_what_a_reader_hands_out_goes_by_its_delivery() -> None:
    branched = result(
        "r",
        traces=[trace([1, 2], [(1, 2)]), trace([1, 3, 4], [(1, 3)], role="branch-0")],
        reasons=["multiple_chains"],
    )
    batch = collate([trajectory(branched, delivery="all_traces")])
    assert batch.lengths.tolist() == [2, 3]
    assert batch.weights.tolist() == [np.float32(1 / 3)] * 2


def test_a_packed_batch() -> None:
    batch = pack(some(), 6, pad_token_id=99)
    assert batch.token_ids.tolist() == [[4, 5, 6, 7, 4, 8], [1, 2, 3, 99, 99, 99]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]]
    assert batch.sequence_ids.tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, -1, -1, -1]]
    assert batch.loss_mask.astype(int).tolist() == [[0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]]
    assert batch.log_probs[0].tolist() == [0, 0, -0.125, -0.25, 0, -0.125]
    assert [bounds.tolist() for bounds in batch.cu_seqlens] == [[0, 4, 6], [0, 3]]
    assert batch.max_seqlen == 4
    assert (batch.row.tolist(), batch.start.tolist(), batch.lengths.tolist()) == (
        [0, 0, 1],
        [0, 4, 0],
        [4, 2, 3],
    )
    assert (batch.rollout_index.tolist(), batch.trace_index.tolist()) == ([1, 1, 0], [0, 1, 0])
    assert batch.token_weights.sum() == pytest.approx(2), "each rollout weighs one"
    with pytest.raises(InputError, match="4 tokens, 3 are allowed"):
        pack(some(), 3)
    assert pack(some(), 3, on_long="truncate").cuts == (Cut("b", "main", 4, 3),)
    assert pack([], 3).token_ids.shape == (0, 3)


def test_best_fit_fills_the_fullest_row_that_has_room() -> None:
    assert best_fit([5, 3, 4, 2, 2], 8) == [[0, 1], [2, 3, 4]]
