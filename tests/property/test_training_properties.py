"""Arrays and batches against the results they were made of."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freezepoint.training import collate, pack, to_arrays
from freezepoint.training.packing import best_fit
from freezepoint_schemas import codec
from freezepoint_schemas.results import Result, Trace
from tests.results import result, trace


@st.composite
def traces(draw: st.DrawFn, role: str = "main") -> Trace:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40))
    cuts = sorted(draw(st.sets(st.integers(0, len(tokens)), max_size=8)))
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    sampled = sum(end - start for start, end in spans)
    finite = st.floats(allow_nan=False, allow_infinity=False, max_value=0)
    log_probs = draw(st.lists(finite, min_size=sampled, max_size=sampled))
    versions = draw(
        st.lists(st.none() | st.integers(0, 9) | st.just("v1"), min_size=len(spans), max_size=len(spans))
    )
    return trace(tokens, spans, role=role, log_probs=log_probs, versions=versions)


@st.composite
def rollouts(draw: st.DrawFn) -> list[Result]:
    made = []
    for number in range(draw(st.integers(0, 6))):
        roles = ["main", *(f"branch-{n}" for n in range(draw(st.integers(0, 3))))]
        made.append(
            result(f"r{number}", traces=[draw(traces(role)) for role in roles], delivery="all_traces")
        )
    return made


@given(traces())
def test_arrays_say_what_the_trace_says(made: Trace) -> None:
    """Also after a way over the wire, where arrays are packed."""
    for held in (
        result("r", traces=[made]),
        codec.decode_result(codec.encode_result(result("r", traces=[made]))),
    ):
        arrays = to_arrays(held, float_type="float64")
        assert arrays.token_ids.tolist() == made.token_ids.tolist()
        inside = [any(span.start <= n < span.end for span in made.spans) for n in range(len(arrays))]
        assert arrays.loss_mask.tolist() == inside
        assert arrays.log_probs[arrays.loss_mask].tolist() == made.log_probs.tolist()
        assert not arrays.log_probs[~arrays.loss_mask].any()
        versions = [
            next(
                (
                    s.policy_version
                    for s in made.spans
                    if s.start <= n < s.end and isinstance(s.policy_version, int)
                ),
                -1,
            )
            for n in range(len(arrays))
        ]
        found = arrays.policy_version
        assert (versions if found is not None else [-1] * len(arrays)) == versions
        if found is not None:
            assert found.tolist() == versions


@given(rollouts(), st.integers(0, 20), st.integers(1, 8))
def test_a_padded_batch_holds_every_trace(made: list[Result], extra: int, multiple_of: int) -> None:
    longest = max((len(t.token_ids) for r in made for t in r.traces), default=0)
    for batch in (collate(made, pad_to=longest + extra or 1), collate(made, multiple_of=multiple_of)):
        rows = [(number, index) for number, r in enumerate(made) for index in range(len(r.traces))]
        assert list(zip(batch.rollout_index.tolist(), batch.trace_index.tolist(), strict=True)) == rows
        for row, (number, index) in enumerate(rows):
            arrays = to_arrays(made[number], made[number].traces[index])
            size = int(batch.lengths[row])
            assert size == len(arrays)
            assert np.array_equal(batch.token_ids[row, :size], arrays.token_ids)
            assert np.array_equal(batch.log_probs[row, :size], arrays.log_probs)
            assert np.array_equal(batch.loss_mask[row, :size], arrays.loss_mask)
            assert not batch.loss_mask[row, size:].any()
            assert not batch.token_ids[row, size:].any()


@given(rollouts(), st.integers(0, 30))
def test_a_packed_batch_holds_every_trace_once_in_one_piece(made: list[Result], extra: int) -> None:
    length = max((len(t.token_ids) for r in made for t in r.traces), default=0) + extra or 1
    batch = pack(made, length)
    names = sorted(zip(batch.rollout_index.tolist(), batch.trace_index.tolist(), strict=True))
    assert names == [(number, index) for number, r in enumerate(made) for index in range(len(r.traces))]
    for sequence in range(len(batch.row)):
        row, start, size = int(batch.row[sequence]), int(batch.start[sequence]), int(batch.lengths[sequence])
        number, index = int(batch.rollout_index[sequence]), int(batch.trace_index[sequence])
        arrays = to_arrays(made[number], made[number].traces[index])
        assert np.array_equal(batch.token_ids[row, start : start + size], arrays.token_ids)
        assert np.array_equal(batch.position_ids[row, start : start + size], arrays.position)
        assert np.array_equal(batch.log_probs[row, start : start + size], arrays.log_probs)
        bounds = batch.cu_seqlens[row].tolist()
        assert bounds.index(start) + 1 < len(bounds)
        assert bounds[bounds.index(start) + 1] == start + size
    assert (batch.sequence_ids >= 0).sum() == batch.lengths.sum()


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 50))
def test_packing_wastes_less_than_half(sizes: list[int], capacity: int) -> None:
    """No two rows fit into one: the guarantee of any-fit."""
    rows = best_fit(sizes, capacity)
    loads = sorted(sum(sizes[index] for index in row) for row in rows)
    assert sorted(index for row in rows for index in row) == list(range(len(sizes)))
    assert all(load <= capacity for load in loads)
    assert len(loads) < 2 or loads[0] + loads[1] > capacity
