"""Where a conversation broke: why a call is a root although others came before it.

Everything here is a guess for people, called ``likely``; nothing is decided by it. Looked at are

- each root but the first;
- each call whose named parent its prompt does not begin with;
- each call that hangs under an older one than it was meant to: its prompt holds all of some earlier call's prompt and
  differs in what that one sampled, so that it seems to fork from before it.

The earlier call that it shares the most leading tokens with is found in the prefix tree, and the first difference is looked
at from both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from freezepoint.core.builder import BuildOutput
from freezepoint.core.forest import How
from freezepoint.core.prefixes import Node, PrefixTree
from freezepoint.core.snapshot import ResolvedCall, Snapshot
from freezepoint_schemas.arrays import TokenArray

BREAKS_MAX = 8
"""How many breaks of a rollout are looked at: each may need its whole prompt in one array."""
_SHOWN = 6
_SAME = 8
"""So many equal tokens in a row are taken for the same stretch of text."""
_LOCAL = 16
"""A difference no longer than this, on both sides, is a local one."""


class Likely(StrEnum):
    """What probably happened between the earlier call and this one."""

    SAME_PROMPT = "same_prompt"
    """The earlier call's prompt once more: a retry."""
    TRUNCATION = "truncation"
    """The history was cut: the prompt ends inside what was there, or goes on after a stretch of it that was left out."""
    RETOKENIZATION = "retokenization"
    """A few ids of what the model sampled are others: text that was decoded and encoded again."""
    TEMPLATE_REWRITE = "template_rewrite"
    """Most of the history is there, rendered otherwise: reasoning dropped, tool calls or dates written anew."""
    UNRELATED = "unrelated"
    """Little or nothing is shared: a sub-agent, a compacted context, a new task."""
    UNKNOWN = "unknown"


class Sides(NamedTuple):
    """The earlier call's sequence, and this call's prompt; ``sampled_from``: where the earlier call's generation begins;
    ``shared``: how many leading tokens both have."""

    earlier: TokenArray
    prompt: TokenArray
    sampled_from: int
    shared: int


def prefix_breaks(snapshot: Snapshot, output: BuildOutput) -> list[dict[str, Any]]:
    """The first ``BREAKS_MAX`` breaks, by creation: the call, the earlier one, the position of the first differing token
    (0-based), up to ``_SHOWN`` ids of each side from there on and before it, and what likely happened."""
    if output.roots <= 1 and len(output.traces) + output.left_out <= 1:
        return []  # one conversation, as nearly all are
    return [
        _described(snapshot.tree, call, earlier, position, named=named)
        for call, earlier, position, named in islice(_broken(snapshot, output), BREAKS_MAX)
    ]


def _broken(
    snapshot: Snapshot, output: BuildOutput
) -> Iterator[tuple[ResolvedCall, ResolvedCall, int, bool]]:
    """(call, the earlier call it is compared with, shared tokens, whether its producer named that one)."""
    linked = {call.call_id: call for call in snapshot.calls if call.call_id in output.links}
    passed: dict[Node, ResolvedCall] = {}
    for call in sorted(linked.values(), key=_creation):
        link = output.links[call.call_id]
        if link.how is How.MISMATCH:
            named = linked[call.entry.parent_call_id or ""]
            yield call, named, _shared(call, named), True
        elif passed:
            node = next(node for node in _upwards(call.prompt_node) if node in passed)
            if link.call_id is None or _differs_in_sampled(call, passed[node], node):
                yield call, passed[node], node.depth, False
        for node in _upwards(call.end_node):
            if node in passed:
                break
            passed[node] = call


def _differs_in_sampled(call: ResolvedCall, earlier: ResolvedCall, node: Node) -> bool:
    """Whether the prompt leaves the earlier call's tokens in the middle of its generation, or at once behind its prompt."""
    inside = earlier.prompt_length <= node.depth < earlier.cumulative_length
    return inside and node is not call.prompt_node


def _creation(call: ResolvedCall) -> tuple[float, int, str]:
    return (call.entry.created_at, call.prompt_length, call.call_id)


def _upwards(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent


def _shared(call: ResolvedCall, other: ResolvedCall) -> int:
    path = set(_upwards(other.end_node))
    return next(node.depth for node in _upwards(call.prompt_node) if node in path)


def _described(
    tree: PrefixTree, call: ResolvedCall, earlier: ResolvedCall, position: int, *, named: bool
) -> dict[str, Any]:
    sides = Sides(
        tree.tokens(earlier.end_node), tree.tokens(call.prompt_node), earlier.prompt_length, position
    )
    start = max(0, position - _SHOWN)
    return {
        "call_id": call.call_id,
        "earlier_call_id": earlier.call_id,
        "named_parent": named,
        "position": position,
        "before": sides.prompt[start:position].tolist(),
        "earlier_ids": sides.earlier[position : position + _SHOWN].tolist(),
        "prompt_ids": sides.prompt[position : position + _SHOWN].tolist(),
        "likely": likely(sides).value,
    }


def likely(sides: Sides) -> Likely:
    """What probably made the two differ. Looked for in this order.

    1. the prompt ends at the difference: the same prompt again, or a history that was cut at its end;
    2. a stretch of the earlier sequence is missing and the rest goes on: truncation where the stretch begins in what was
       given, a rewrite where it begins in what was sampled (a template that drops reasoning);
    3. both go on alike after a few other ids: re-tokenization in what was sampled, a rewrite in what was given;
    4. only the last few sampled ids differ: re-tokenization;
    5. most of the shorter one is shared: a rewrite; little: unrelated.
    """
    earlier, prompt, sampled_from, shared = sides
    if shared == prompt.size:
        return Likely.SAME_PROMPT if shared == sampled_from else Likely.TRUNCATION
    in_sampled = shared >= sampled_from
    left_out = _resumes_at(earlier[shared:], prompt[shared : shared + _SAME])
    if left_out is not None:
        return Likely.TEMPLATE_REWRITE if in_sampled else Likely.TRUNCATION
    local = _is_local(earlier[shared:], prompt[shared:])
    tail = in_sampled and 0 < earlier.size - shared <= _LOCAL and shared > sampled_from
    if local or tail:
        return Likely.RETOKENIZATION if in_sampled else Likely.TEMPLATE_REWRITE
    if 2 * shared >= min(earlier.size, prompt.size):
        return Likely.TEMPLATE_REWRITE
    return Likely.UNRELATED if shared <= max(_LOCAL, min(earlier.size, prompt.size) // 10) else Likely.UNKNOWN


def _resumes_at(earlier: TokenArray, stretch: TokenArray) -> int | None:
    """Where in ``earlier`` those ``_SAME`` tokens stand, if anywhere behind its first token."""
    if stretch.size < _SAME or earlier.size < _SAME:
        return None
    starts = np.flatnonzero(earlier[: earlier.size - _SAME + 1] == stretch[0])
    for start in starts[:64].tolist():
        if start and np.array_equal(earlier[start : start + _SAME], stretch):
            return int(start)
    return None


def _is_local(earlier: TokenArray, prompt: TokenArray) -> bool:
    """Whether both go on alike after at most ``_LOCAL`` tokens of their own."""
    for skipped in range(_LOCAL + 1):
        stretch = prompt[skipped : skipped + _SAME]
        if stretch.size < _SAME:
            return False
        window = earlier[: _LOCAL + _SAME]
        if _resumes_at(window, stretch) is not None or (skipped and np.array_equal(window[:_SAME], stretch)):
            return True
    return False
