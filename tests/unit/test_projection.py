"""Flat traces and the way back: spans, shared ranges, items, routed experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from freezepoint.core.build import ALL_TRACES, Leniency, build_result
from freezepoint.core.projection import response_form, trace_response
from freezepoint_schemas.codec import decode_result, encode_result
from freezepoint_schemas.events import TokenEntry
from freezepoint_schemas.reasons import Reason
from freezepoint_schemas.results import Result, Trace
from tests.events import entry
from tests.frozen_logs import calls, frozen, recoded

FORK = "a:[1,2]->[3] b:[1,2,3,4]->[5] c:[1,2,3,9]->[6,7]"


def both_ways(result: Result) -> list[Result]:
    """The result, and what a reader gets of it."""
    return [result, decode_result(encode_result(result)), decode_result(encode_result(result, packed=False))]


def routes_in_response(response: dict[str, Any]) -> list[Any]:
    return [item["routed_experts"] for item in response["output"] if "prompt_token_ids" in item]


def with_routes(notation: str, routes: list[Any]) -> list[TokenEntry]:
    return [
        call.model_copy(update={"routed_experts": values})
        for call, values in zip(calls(notation), routes, strict=True)
    ]


def test_a_branch_holds_the_stem_as_context() -> None:
    main, branch = build_result(frozen(calls(FORK)), delivery=ALL_TRACES).traces
    assert [(span.call_id, span.start, span.end) for span in main.spans] == [("a", 2, 3), ("b", 4, 5)]
    assert main.shared == []
    assert branch.token_ids.tolist() == [1, 2, 3, 9, 6, 7]
    assert [(span.call_id, span.start, span.end) for span in branch.spans] == [("c", 4, 6)]
    assert [(span.call_id, span.start, span.end) for span in branch.shared] == [("a", 2, 3)]
    assert branch.log_probs.tolist() == [-0.25, -0.5]
    assert [item.call_id for item in branch.items] == ["c"]


def test_a_branch_is_a_whole_response() -> None:
    for result in both_ways(build_result(frozen(calls(FORK, model="m")))):
        response = trace_response(result, result.traces[1])
        assert response["id"] == "proj-r-branch-0"
        assert response["usage"] == {"input_tokens": 2, "output_tokens": 3}
        assert response["output"] == [
            {
                "type": "message",
                "content": "a",
                "prompt_token_ids": [1, 2],
                "generation_token_ids": [3],
                "generation_log_probs": [-0.25],
            },
            {
                "type": "message",
                "content": "c",
                "prompt_token_ids": [1, 2, 3, 9],
                "generation_token_ids": [6, 7],
                "generation_log_probs": [-0.25, -0.5],
            },
        ]


def test_a_trace_without_a_span_is_a_response_too() -> None:
    result = build_result(
        frozen(calls("a:[1,2]->[3] f:[1,2,3]->[]")), builder="per_request", delivery=ALL_TRACES
    )
    response = trace_response(result, result.traces[1])
    assert response["usage"] == {"input_tokens": 3, "output_tokens": 0}
    assert response["output"][0]["generation_token_ids"] == []


def test_spans_say_which_weights_sampled_them() -> None:
    a, b, _ = calls(FORK)
    entries = [a.model_copy(update={"policy_version": 7}), b.model_copy(update={"policy_version": "v8"})]
    (trace,) = build_result(frozen(entries)).traces
    assert [span.policy_version for span in trace.spans] == [7, "v8"]


ITEMS: list[tuple[list[dict[str, Any]], int | None, int]] = [
    ([{"type": "reasoning", "summary": []}, {"type": "message", "status": None}], 0, 0),
    ([{"type": "reasoning", "summary": []}, {"type": "message", "status": None}], None, 1),
    ([{"type": "message", "generation_token_ids": None, "other_token_ids": [5]}, {"type": "x"}], 1, 1),
    ([], None, 0),
]


@pytest.mark.parametrize(("items", "index", "carrier"), ITEMS)
def test_items_come_back_verbatim(items: list[dict[str, Any]], index: int | None, carrier: int) -> None:
    entries = calls("a:[1,2]->[3]", output_items=items, token_item_index=index)
    for result in both_ways(build_result(frozen(entries))):
        output = response_form(result)["rebuilt_response"]["output"]
        tokens = {
            name: output[carrier].pop(name) for name in list(output[carrier]) if name.startswith("generation")
        }
        assert tokens == {"generation_token_ids": [3], "generation_log_probs": [-0.25]}
        assert output[carrier].pop("prompt_token_ids") == [1, 2]
        assert output == (items or [{"type": "message"}])


def test_projecting_does_not_change_the_result() -> None:
    result = build_result(frozen(calls(FORK)))
    before = encode_result(result)
    assert response_form(result) == response_form(result)
    assert encode_result(result) == before


def test_log_probabilities_are_the_same_floats() -> None:
    values = np.array([-0.1, -1e-300, 1e-7, -123.456789012345])
    (call,) = calls("a:[1]->[2,3,4,5]")
    result = build_result(frozen([call.model_copy(update={"generation_log_probs": values})]))
    for read in both_ways(result):
        (item,) = response_form(read)["rebuilt_response"]["output"]
        assert item["generation_log_probs"] == values.tolist()


CHAIN = "a:[1,2]->[3] b:[1,2,3,4]->[5]"


def _rows(*first: int) -> list[list[list[int]]]:
    """[rows, 2 layers, top 1]"""
    return [[[value], [value + 1]] for value in first]


def _only_trace(entries: list[TokenEntry]) -> tuple[Result, Trace]:
    result = build_result(frozen(entries))
    (trace,) = result.traces
    return result, trace


def test_aligned_routes_stand_once() -> None:
    routes = [_rows(1, 2, 3), _rows(1, 2, 3, 4, 5)]
    result, trace = _only_trace(with_routes(CHAIN, routes))
    assert trace.routed_experts is not None
    assert trace.routed_experts.shape == (5, 2, 1)
    assert trace.routed_experts.dtype == np.uint8
    patches = [item.routed_patch for item in trace.items]
    assert [(patch.rows, patch.index) for patch in patches if patch] == [(3, None), (5, None)]
    assert all(item.routed_experts is None for item in trace.items)
    for read in both_ways(result):
        assert routes_in_response(response_form(read)["rebuilt_response"]) == routes


def test_rows_that_differ_are_kept_as_a_patch() -> None:
    routes = [_rows(1, 300, 3), _rows(1, 2, 3, 4, 5)]
    result, trace = _only_trace(with_routes(CHAIN, routes))
    patch = trace.items[0].routed_patch
    assert patch is not None
    assert patch.index is not None
    assert patch.index.tolist() == [1]
    assert trace.routed_experts is not None
    assert trace.routed_experts.tolist() == routes[1]
    for read in both_ways(result):
        assert routes_in_response(response_form(read)["rebuilt_response"]) == routes


def test_three_hundred_experts_stay_three_hundred() -> None:
    routes = [_rows(1, 2, 299), _rows(1, 2, 299, 300, 299)]
    result, trace = _only_trace(with_routes(CHAIN, routes))
    assert trace.routed_experts is not None
    assert trace.routed_experts.dtype == np.uint16
    for read in both_ways(result):
        assert routes_in_response(response_form(read)["rebuilt_response"]) == routes


@pytest.mark.parametrize(
    ("routes", "mismatches"),
    [
        ([_rows(1, 2), _rows(1, 2, 3, 4)], 2),
        ([_rows(1, 2, 3), _rows(1, 2, 3, 4)], 1),
        ([_rows(1, 2, 3), [[[1]], [[2]], [[3]], [[4]], [[5]]]], 0),
        ([_rows(1, 2, 3), [[[1], [2]], [[3]], [], [[4]], [[5]]]], 0),
        ([_rows(1, 2, 3), [[[0.5]], [[1.5]], [[1]], [[1]], [[1]]]], 0),
        ([[[[True]], [[False]], [[True]]], _rows(1, 2, 3, 4, 5)], 0),
        ([[], []], 0),
        ([[[[None]]], ["x"]], 0),
        ([[1, 2, 3], [1, 2, 3, 4, 5]], 0),
    ],
)
def test_routes_that_do_not_align_stay_raw(routes: list[Any], mismatches: int) -> None:
    result, trace = _only_trace(with_routes(CHAIN, routes))
    assert not result.mask_sample
    assert trace.routed_experts is None
    assert all(item.routed_patch is None for item in trace.items)
    assert result.diagnostics.get("routes_mismatch", 0) == mismatches
    for read in both_ways(result):
        assert routes_in_response(response_form(read)["rebuilt_response"]) == routes


def test_a_padded_last_row_gives_way_to_the_one_that_routed_it() -> None:
    """A server cannot know where its last token is routed before the next call processes it."""
    routes = [_rows(1, 2, 0), _rows(1, 2, 33, 4, 0)]
    result, trace = _only_trace(with_routes(CHAIN, routes))
    assert trace.routed_experts is not None
    assert trace.routed_experts.tolist() == routes[1]
    for read in both_ways(result):
        assert routes_in_response(response_form(read)["rebuilt_response"]) == routes


@pytest.mark.parametrize(
    ("notation", "delivery", "masked"),
    [(CHAIN, "single_response", True), (FORK, "single_response", False), (FORK, ALL_TRACES, True)],
)
def test_routes_that_fit_no_tokens_mask_only_where_that_is_wanted(
    notation: str, delivery: str, masked: bool
) -> None:
    *others, last = calls(notation)
    entries = [*others, last.model_copy(update={"routed_experts": _rows(1)})]
    assert Reason.ROUTES_MISMATCH not in build_result(frozen(entries), delivery=delivery).reasons
    strict = build_result(frozen(entries), delivery=delivery, leniency=Leniency(mask_routes_mismatch=True))
    assert (Reason.ROUTES_MISMATCH in strict.reasons) == masked
    assert all(trace.routed_experts is None for trace in strict.traces)


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ([3, 4], {"min": 3, "max": 4, "distinct": 2}),
        ([7, 7], {"min": 7, "max": 7, "distinct": 1}),
        (["v2", 10], {"names": ["10", "v2"], "distinct": 2}),
        ([None, 5], {"min": 5, "max": 5, "distinct": 1}),
        ([None, None], None),
    ],
)
def test_a_refit_in_the_middle_is_told_and_rejects_nothing(versions: list[Any], said: Any) -> None:
    entries = [
        call.model_copy(update={"policy_version": version})
        for call, version in zip(calls(CHAIN), versions, strict=True)
    ]
    result, trace = _only_trace(entries)
    assert not result.mask_sample
    assert result.diagnostics.get("policy_versions") == said
    assert [span.policy_version for span in trace.spans] == versions


def test_images_and_reasoning_come_through_byte_for_byte() -> None:
    items = [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "encrypted_content": "gAAA\u2028\u0000é",
            "status": None,
        },
        {
            "type": "message",
            "content": [{"type": "input_image", "image": "data:image/png;base64,iVBORw0KGgo="}],
        },
        {"type": "function_call", "arguments": '{"a":1.0,"b":[null,{}]}', "n": 1e-9, "big": 2**53 + 1},
    ]
    placeholder = 151_655
    call = entry("r", "a", [1, *[placeholder] * 64], [2], output_items=items, token_item_index=2)
    for result in both_ways(build_result(frozen([call]))):
        assert result.traces[0].items[0].output_items == items
        assert orjson.dumps(result.traces[0].items[0].output_items) == orjson.dumps(items)
        assert result.traces[0].token_ids.tolist().count(placeholder) == 64


def test_routes_of_only_the_last_call_align() -> None:
    routes = [None, _rows(1, 2, 3, 4, 5)]
    result, trace = _only_trace(with_routes(CHAIN, routes))
    assert trace.routed_experts is not None
    for read in both_ways(result):
        output = response_form(read)["rebuilt_response"]["output"]
        assert [item.get("routed_experts") for item in output] == routes


def test_routes_that_do_not_reach_the_end_stay_raw() -> None:
    routes = [_rows(1, 2, 3), None]
    result, trace = _only_trace(with_routes(CHAIN, routes))
    assert trace.routed_experts is None
    for read in both_ways(result):
        output = response_form(read)["rebuilt_response"]["output"]
        assert [item.get("routed_experts") for item in output] == routes


def test_a_branch_finds_the_routes_of_its_stem() -> None:
    routes = [_rows(1, 2, 3), _rows(1, 2, 9, 4, 5), _rows(1, 2, 3, 4, 5, 6)]
    result = build_result(frozen(with_routes(FORK, routes)))
    for read in both_ways(result):
        assert routes_in_response(trace_response(read, read.traces[1])) == [routes[0], routes[2]]


@pytest.mark.parametrize("packed", [False, True])
def test_the_encoding_of_routes_does_not_matter(packed: bool) -> None:
    entries = with_routes(CHAIN, [_rows(1, 300, 3), _rows(1, 2, 3, 4, 5)])
    wide = [
        call.model_copy(update={"routed_experts": np.array(call.routed_experts, dtype=np.int64)})
        for call in entries
    ]
    first = encode_result(build_result(frozen(entries)))
    assert encode_result(build_result(frozen([recoded(call, packed=packed) for call in entries]))) == first
    assert encode_result(build_result(frozen([recoded(call, packed=packed) for call in wide]))) == first
