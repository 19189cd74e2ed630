"""Properties of a build: order and encoding do not matter, nothing is lost, and the naive rules agree."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freezepoint.core.build import ALL_TRACES, Leniency, build_result, result_tokens_max
from freezepoint.core.builder import BUILDERS
from freezepoint.core.prefixes import PrefixTree, nearest_ends
from freezepoint.core.projection import trace_response
from freezepoint.core.snapshot import take_snapshot
from freezepoint_schemas.codec import encode_result
from freezepoint_schemas.events import TokenEntry
from freezepoint_schemas.reasons import Reason
from freezepoint_schemas.results import Result
from tests import naive
from tests.events import complete, entry
from tests.frozen_logs import by_reference, cumulative, frozen, recoded

_TOKENS = st.integers(0, 2)
_SIDE_ONLY = {Reason.MULTIPLE_ROOTS, Reason.MULTIPLE_CHAINS}


@st.composite
def rollouts(draw: st.DrawFn) -> list[TokenEntry]:
    """Calls that mostly continue some earlier call, over so few tokens that prefixes collide."""
    entries: list[TokenEntry] = []
    for number in range(draw(st.integers(0, 9))):
        base: list[int] = []
        if entries and draw(st.integers(0, 5)) > 0:
            known = cumulative(entries[draw(st.integers(0, len(entries) - 1))])
            base = known[: len(known) - draw(st.integers(0, 2))]
        prompt = base + draw(st.lists(_TOKENS, max_size=2))
        generation = draw(st.lists(_TOKENS, max_size=3))
        created_at = float(draw(st.integers(0, 2)))
        call_id = f"c{draw(st.integers(0, 9))}-{number}"
        entries.append(entry("r", call_id, prompt, generation, created_at=created_at))
    return entries


@st.composite
def evident_rollouts(draw: st.DrawFn) -> tuple[list[TokenEntry], str | None]:
    """As above, with parents that are named rightly, wrongly or for calls that do not exist, and mostly a terminal."""
    entries = draw(rollouts())
    ids = [call.model_call_id for call in entries]
    named = []
    for call in entries:
        prefixes = [
            other.model_call_id
            for other in entries
            if call.prompt_token_ids.tolist()[: len(cumulative(other))] == cumulative(other)
        ]
        choices: list[str | None] = [None, *prefixes, *prefixes, draw(st.sampled_from([*ids, "gone"]))]
        named.append(call.model_copy(update={"parent_call_id": draw(st.sampled_from(choices))}))
    return named, draw(st.sampled_from([None, *ids]))


def _evident(entries: list[TokenEntry], terminal: str | None, delivery: str = ALL_TRACES) -> Result:
    return build_result(frozen(entries, complete("r", terminal_call_id=terminal)), delivery=delivery)


def _paths(result: Result) -> list[tuple[str, list[str]]]:
    return [
        (
            trace.role,
            [s.call_id for s in sorted((*trace.shared, *trace.spans), key=lambda s: s.start)],
        )
        for trace in result.traces
    ]


def _spans(result: Result) -> list[tuple[str, list[int]]]:
    return [
        (span.call_id, trace.token_ids[span.start : span.end].tolist())
        for trace in result.traces
        for span in trace.spans
    ]


def _check_ownership(entries: list[TokenEntry], result: Result) -> None:
    """Each call's generation is trained exactly once and as it was sampled, or a reason says why not."""
    owned = _spans(result)
    generations = {call.model_call_id: call.generation_token_ids.tolist() for call in entries}
    assert len({call_id for call_id, _ in owned}) == len(owned)
    assert all(generations[call_id] == tokens for call_id, tokens in owned)
    lost = result.diagnostics.get("not_delivered", {})
    in_traces = result.diagnostics["generated_tokens_in_traces"]
    assert in_traces == sum(len(tokens) for _, tokens in owned)
    assert in_traces + sum(part["tokens"] for part in lost.values()) == sum(map(len, generations.values()))
    assert len(owned) + sum(part["calls"] for part in lost.values()) == len(entries)


@given(rollouts())
def test_the_naive_rules_agree(entries: list[TokenEntry]) -> None:
    result = build_result(frozen(entries), delivery=ALL_TRACES)
    expected = naive.build(entries)
    assert _paths(result) == expected.paths()
    assert result.unresolved_retries == expected.unresolved
    quarantined = {call.id: call.quarantined for call in expected.calls if call.quarantined}
    assert result.diagnostics.get("quarantined", {}) == quarantined
    if expected.calls:
        assert result.metrics["roots"] == sum(call.parent is None for call in expected.calls)
        assert result.metrics["chains"] == len(expected.chains)
        assert result.metrics["quarantined_calls"] == len(quarantined)
        assert result.metrics["empty_generation_calls"] == len(expected.empty)


@given(evident_rollouts())
def test_the_naive_rules_agree_with_evidence(rollout: tuple[list[TokenEntry], str | None]) -> None:
    entries, terminal = rollout
    result = _evident(entries, terminal)
    expected = naive.build(entries, terminal)
    assert _paths(result) == expected.paths()
    assert result.unresolved_retries == expected.unresolved
    said = result.diagnostics
    assert said.get("quarantined", {}) == {
        call.id: call.quarantined for call in expected.calls if call.quarantined
    }
    assert said.get("parent_mismatch", 0) == len(expected.links("mismatch"))
    assert said.get("verified_parents", 0) == len(expected.links("verified"))
    assert said.get("parent_recovered", 0) == sum(call.recovered for call in expected.calls)
    after = [call for call in expected.calls if call.after_terminal]
    assert said.get("not_delivered", {}).get("after_terminal", {}).get("calls", 0) == len(after)
    if expected.calls:
        assert result.metrics["roots"] == sum(call.parent is None for call in expected.calls)
        assert result.metrics["chains"] == len(expected.chains)
    single = _evident(entries, terminal, "single_response")
    if terminal is not None and expected.calls:
        assert single.reasons == ([] if expected.failure is None else [Reason(expected.failure)])


@given(evident_rollouts())
def test_a_single_response_trains_the_chain_that_was_scored(
    rollout: tuple[list[TokenEntry], str | None],
) -> None:
    entries, terminal = rollout
    result = _evident(entries, terminal, "single_response")
    if terminal is None or result.mask_sample:
        return
    known = {call.model_call_id: call for call in entries}
    (main,) = (trace for trace in result.traces if trace.role == "main")
    last = known[main.spans[-1].call_id]
    if known[terminal].generation_token_ids.size:
        assert last is known[terminal]
    else:
        assert known[terminal].prompt_token_ids.tolist()[: len(cumulative(last))] == cumulative(last)
    assert main.token_ids.tolist() == cumulative(last)


@given(evident_rollouts(), st.randoms(use_true_random=False))
def test_evidence_does_not_depend_on_order_or_encoding(
    rollout: tuple[list[TokenEntry], str | None], random: Random
) -> None:
    entries, terminal = rollout
    first = encode_result(_evident(entries, terminal))
    assert encode_result(_evident(random.sample(entries, len(entries)), terminal)) == first
    assert encode_result(_evident(by_reference(entries, random), terminal)) == first
    assert encode_result(_evident([recoded(call, packed=True) for call in entries], terminal)) == first


@given(evident_rollouts())
def test_evidence_loses_no_sampled_token_without_a_reason(
    rollout: tuple[list[TokenEntry], str | None],
) -> None:
    entries, terminal = rollout
    for delivery in ("single_response", ALL_TRACES):
        result = _evident(entries, terminal, delivery)
        _check_ownership(entries, result)
        account = result.diagnostics.get("tokens", {})
        captured = account.pop("captured", 0)
        assert captured == sum(account.values()) == sum(call.generation_token_ids.size for call in entries)


@given(st.lists(st.tuples(st.integers(-1, 8), st.booleans()), min_size=1, max_size=9), st.data())
def test_a_chain_that_is_kept_though_calls_were_lost_is_the_whole_chain(
    made: list[tuple[int, bool]], data: st.DataObject
) -> None:
    """Calls that truly continue each other and say so; some are lost. What is kept is what would have been without losses."""
    entries: list[TokenEntry] = []
    for number, (wanted, _) in enumerate(made):
        parent = entries[wanted] if 0 <= wanted < number else None
        prompt = [*(cumulative(parent) if parent else []), data.draw(_TOKENS)]
        named = parent.model_call_id if parent else None
        entries.append(entry("r", f"c{number}", prompt, [data.draw(_TOKENS)], parent_call_id=named))
    terminal = data.draw(st.sampled_from(entries)).model_call_id
    closing = complete("r", terminal_call_id=terminal, n_calls=len(entries))
    lost = [call.model_call_id for call, (_, is_lost) in zip(entries, made, strict=True) if is_lost]
    log = frozen(
        [call for call in entries if call.model_call_id not in lost], closing, intents=frozenset(lost)
    )
    whole = build_result(frozen(entries, closing))
    kept = build_result(log, leniency=Leniency(keep_attributed=True))
    if not kept.mask_sample:
        assert [span.call_id for span in kept.traces[0].spans] == [
            span.call_id for span in whole.traces[0].spans
        ]
        assert kept.traces[0].token_ids.tolist() == whole.traces[0].token_ids.tolist()


@given(rollouts(), st.randoms(use_true_random=False))
def test_order_encoding_and_repeats_do_not_matter(entries: list[TokenEntry], random: Random) -> None:
    first = encode_result(build_result(frozen(entries)))
    shuffled = random.sample(entries, len(entries))
    recodings = [recoded(call, packed=random.random() < 0.5) for call in shuffled]
    referring = by_reference(entries, random)
    more = [
        call for call in (*referring, *recodings, *by_reference(entries, random)) if random.random() < 0.5
    ]
    assert encode_result(build_result(frozen(recodings))) == first
    assert encode_result(build_result(frozen(referring))) == first
    assert encode_result(build_result(frozen(entries, alternatives=tuple(more)))) == first
    assert encode_result(build_result(frozen(recodings, alternatives=tuple(more)))) == first
    assert encode_result(build_result(frozen([*referring, *recodings]))) == first


@given(rollouts())
def test_every_sampled_token_is_trained_once_or_accounted_for(entries: list[TokenEntry]) -> None:
    result = build_result(frozen(entries), delivery=ALL_TRACES)
    _check_ownership(entries, result)


@given(evident_rollouts())
def test_each_result_says_what_masks_under_the_other_delivery(
    rollout: tuple[list[TokenEntry], str | None],
) -> None:
    single = _evident(*rollout, "single_response")
    every = _evident(*rollout)
    assert single.diagnostics.get("reasons_as", {}).get(ALL_TRACES, single.reasons) == every.reasons
    assert every.diagnostics.get("reasons_as", {}).get("single_response", every.reasons) == single.reasons


@given(rollouts())
def test_a_delivery_decides_only_the_reasons(entries: list[TokenEntry]) -> None:
    single = build_result(frozen(entries))
    every = build_result(frozen(entries), delivery=ALL_TRACES)
    assert [trace.model_dump(mode="json") for trace in single.traces] == [
        trace.model_dump(mode="json") for trace in every.traces
    ]
    assert set(every.reasons) <= set(single.reasons)
    assert set(single.reasons) - set(every.reasons) <= {*_SIDE_ONLY, Reason.NO_SAFE_CHAIN}
    if not single.mask_sample:
        assert single.metrics == every.metrics


@given(rollouts())
def test_every_trace_is_a_contiguous_response(entries: list[TokenEntry]) -> None:
    result = build_result(frozen(entries))
    known = {call.model_call_id: call for call in entries}
    for trace in result.traces:
        ids = [s.call_id for s in sorted((*trace.shared, *trace.spans), key=lambda s: s.start)]
        output = trace_response(result, trace)["output"]
        assert [item["prompt_token_ids"] for item in output] == [
            known[i].prompt_token_ids.tolist() for i in ids
        ]
        assert [item["generation_log_probs"] for item in output] == [
            known[i].generation_log_probs.tolist() for i in ids
        ]


@given(rollouts(), st.sampled_from(sorted(BUILDERS)), st.randoms(use_true_random=False))
def test_a_result_has_no_more_tokens_than_its_log_lets_expect(
    entries: list[TokenEntry], builder: str, random: Random
) -> None:
    """However the calls are written, and whatever of it is lost."""
    whole = frozen(entries)
    referring = by_reference(entries, random)
    lost = [call for call in referring if random.random() > 0.2]
    for log in (whole, frozen(referring), frozen(lost), frozen(entries, alternatives=tuple(lost))):
        result = build_result(log, builder=builder, delivery=ALL_TRACES)
        tokens = sum(trace.token_ids.size for trace in result.traces)
        assert tokens <= result_tokens_max(log, builder=builder)


@given(rollouts())
def test_per_request_keeps_every_call(entries: list[TokenEntry]) -> None:
    result = build_result(frozen(entries), builder="per_request", delivery=ALL_TRACES)
    order = sorted(entries, key=lambda call: (call.prompt_token_ids.size, call.model_call_id))
    assert [trace.token_ids.tolist() for trace in result.traces] == [cumulative(call) for call in order]
    assert [trace.items[0].call_id for trace in result.traces] == [call.model_call_id for call in order]


@given(st.lists(st.tuples(st.lists(_TOKENS, max_size=6), st.lists(_TOKENS, max_size=6)), max_size=12))
def test_the_tree_finds_the_longest_prefix(pairs: list[tuple[list[int], list[int]]]) -> None:
    tree = PrefixTree()
    prompts = [tree.intern(tree.root, np.array(prompt, dtype=np.int32)) for prompt, _ in pairs]
    ends = [
        tree.intern(node, np.array(generation, dtype=np.int32))
        for node, (_, generation) in zip(prompts, pairs, strict=True)
    ]
    sequences = [prompt + generation for prompt, generation in pairs]
    for node, (prompt, _) in zip(prompts, pairs, strict=True):
        assert tree.tokens(node).tolist() == prompt
    for (prompt, _), found in zip(pairs, nearest_ends(prompts, set(ends)), strict=True):
        lengths = [len(sequence) for sequence in sequences if prompt[: len(sequence)] == sequence]
        assert (found.depth if found else None) == max(lengths, default=None)
    for end, sequence in zip(ends, sequences, strict=True):
        assert tree.tokens(end).tolist() == sequence


@given(rollouts())
def test_the_snapshot_says_what_was_recorded(entries: list[TokenEntry]) -> None:
    taken = take_snapshot(frozen(entries))
    recorded = {call.call_id: taken.tree.tokens(call.end_node).tolist() for call in taken.calls}
    assert recorded == {call.model_call_id: cumulative(call) for call in entries}
