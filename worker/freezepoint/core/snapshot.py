"""A frozen log made sense of: references resolved, duplicates told from conflicts, content identified.

Prompts and generations are interned in one prefix tree. So a reference costs the tokens written after it,
two prompts are equal when they end at the same node, and the digest of a prefix continues from the call it
refers to. Nothing here depends on the order of arrival, except which of two conflicting payloads is the one
that was kept.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from freezepoint.core.digests import (
    body_digest,
    body_digest_of,
    canonical_routes,
    joined_digest,
    payload_digest,
    prompt_form,
)
from freezepoint.core.frozen import FrozenLog
from freezepoint.core.prefixes import Node, PrefixTree
from freezepoint.core.terminal import Attribution, Terminal, terminal_of
from freezepoint_schemas.arrays import AnyArray
from freezepoint_schemas.events import PromptPrefix, RolloutComplete, TokenEntry
from freezepoint_schemas.reasons import NotDelivered, Reason, ordered

__all__ = ["ResolvedCall", "Snapshot", "body_digest", "payload_digest", "prompt_form", "take_snapshot"]

_FORMS_MAX = 16
"""A call written in more ways than this counts as a conflict, without a look at the rest: every reference to
it may have to be tried against each."""
_LOST_PROMPT = {
    NotDelivered.PREFIX_UNRESOLVED: Reason.PREFIX_UNRESOLVED,
    NotDelivered.PREFIX_MISMATCH: Reason.PREFIX_MISMATCH,
}


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedCall:
    """One recorded call whose whole prompt is known.

    ``prompt_node`` and ``end_node`` are where its prompt and its cumulative sequence end in the snapshot's
    tree. ``routes``: its routed experts in canonical form.
    """

    entry: TokenEntry
    prompt_node: Node
    end_node: Node
    routes: AnyArray | list[Any] | None = None

    @property
    def call_id(self) -> str:
        return self.entry.model_call_id

    @property
    def prompt_length(self) -> int:
        return self.prompt_node.depth

    @property
    def cumulative_length(self) -> int:
        return self.end_node.depth

    @property
    def generated(self) -> int:
        """The number of generated tokens."""
        return self.end_node.depth - self.prompt_node.depth


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What a frozen log holds.

    ``calls``: the recorded calls by (prompt length, call id). ``set_aside``: recorded calls, by id, whose
    prompt cannot be told, with the reason why. ``faults``: what masks the rollout whatever is built of it.
    ``id``: equal for equal content. ``version``: the number of distinct facts in the log and its freeze.
    ``dangling``: announced calls that never came. ``terminal``: the call that the complete event names as the last.
    """

    rollout_id: str
    id: str
    version: int
    tree: PrefixTree
    calls: tuple[ResolvedCall, ...]
    set_aside: tuple[tuple[TokenEntry, NotDelivered], ...]
    faults: frozenset[Reason]
    dangling: tuple[str, ...]
    terminal: Terminal | None = None

    @property
    def recorded(self) -> int:
        """The number of distinct calls recorded."""
        return len(self.calls) + len(self.set_aside)


def take_snapshot(log: FrozenLog) -> Snapshot:
    """Resolve, compare and identify everything in a frozen log. Linear in the tokens it holds; never raises
    for what a producer wrote, that becomes a fault."""
    forms = _forms(log)
    kept = {call_id: own[0] for call_id, own in forms.items()}
    tree = PrefixTree()
    _resolve(tree, [form for own in forms.values() for form in own[:_FORMS_MAX]])
    calls = [_resolved_call(form) for form in kept.values() if form.failure is None]
    set_aside = [(form.entry, form.failure) for form in kept.values() if form.failure is not None]
    dangling = sorted(log.intents - kept.keys() - log.cancelled)
    terminal = terminal_of(log.closing, [form.entry for form in kept.values()])
    content = (
        log.faults | _entry_faults(forms.values()) | ({Reason.CAPTURE_INCOMPLETE} if log.marks else set())
    )
    return Snapshot(
        rollout_id=log.rollout_id,
        id=_content_id(log, content, dangling, _payloads(log, tree, calls, set_aside)),
        version=len(kept) + len(log.intents) + len(log.cancelled) + len(log.marks) + len(log.faults) + 1,
        tree=tree,
        calls=tuple(sorted(calls, key=lambda call: (call.prompt_length, call.call_id))),
        set_aside=tuple(sorted(set_aside, key=lambda pair: pair[0].model_call_id)),
        faults=content
        | _closing_faults(log, len(kept), content, dangling)
        | _lost_terminal(terminal, len(kept)),
        dangling=tuple(dangling),
        terminal=terminal,
    )


@dataclass(slots=True, eq=False)
class _Form:
    """One way a call was written. Resolved once ``prompt_node`` is set; ``failure`` says why it cannot be."""

    entry: TokenEntry
    prompt_node: Node | None = None
    end_node: Node | None = None
    failure: NotDelivered | None = None


def _forms(log: FrozenLog) -> dict[str, list[_Form]]:
    """The forms of each call, the kept one first, no two alike."""
    forms: dict[str, list[_Form]] = {}
    repeated: defaultdict[str, list[TokenEntry]] = defaultdict(list)
    for entry in (*log.entries, *log.alternatives):
        if entry.model_call_id in forms:
            repeated[entry.model_call_id].append(entry)
        else:
            forms[entry.model_call_id] = [_Form(entry)]
    for call_id, entries in repeated.items():
        kept = forms[call_id][0].entry
        others = {_writing(entry): entry for entry in entries}
        others.pop(_writing(kept), None)
        forms[call_id] += [_Form(others[writing]) for writing in sorted(others)]
    return forms


def _writing(entry: TokenEntry) -> tuple[bytes, bytes]:
    return prompt_form(entry), body_digest(entry)


def _resolve(tree: PrefixTree, forms: list[_Form]) -> None:
    """Intern every form whose prompt can be told; the others get their ``failure``.

    A reference resolves against any form of the call it names: the digest proves the tokens, so it does not
    matter which. What is left waiting at the end refers to nothing, to too much, to other tokens, or in a
    circle.
    """
    whole = sorted((form for form in forms if form.entry.prompt_prefix is None), key=_written_length)
    waiting: defaultdict[str, list[tuple[_Form, PromptPrefix]]] = defaultdict(list)
    for form in forms:
        if (prefix := form.entry.prompt_prefix) is not None:
            form.failure = NotDelivered.PREFIX_UNRESOLVED
            waiting[prefix.call_id].append((form, prefix))
    for form in whole:
        _intern(tree, form, tree.root)
    ready = deque(whole)
    while ready:
        target = ready.popleft()
        still_waiting = []
        for form, prefix in waiting.pop(target.entry.model_call_id, ()):
            if _try_reference(tree, form, prefix, target):
                ready.append(form)
            else:
                still_waiting.append((form, prefix))
        if still_waiting:
            waiting[target.entry.model_call_id] = still_waiting


def _written_length(form: _Form) -> int:
    return form.entry.prompt_token_ids.size


def _intern(tree: PrefixTree, form: _Form, start: Node) -> None:
    form.prompt_node = tree.intern(start, form.entry.prompt_token_ids)
    form.end_node = tree.intern(form.prompt_node, form.entry.generation_token_ids)
    form.failure = None


def _try_reference(tree: PrefixTree, form: _Form, prefix: PromptPrefix, target: _Form) -> bool:
    if target.end_node is None or prefix.length > target.end_node.depth:
        return False
    start = tree.at(target.end_node, prefix.length)
    if tree.digest(start).hex() != prefix.digest:
        form.failure = NotDelivered.PREFIX_MISMATCH
        return False
    _intern(tree, form, start)
    return True


def _resolved_call(form: _Form) -> ResolvedCall:
    if form.prompt_node is None or form.end_node is None:
        raise ValueError(f"call {form.entry.model_call_id} is not resolved")
    return ResolvedCall(
        form.entry, form.prompt_node, form.end_node, canonical_routes(form.entry.routed_experts)
    )


def _entry_faults(calls: Iterable[list[_Form]]) -> set[Reason]:
    """References that lead nowhere, and calls whose forms do not say the same."""
    faults: set[Reason] = set()
    for forms in calls:
        faults |= {_LOST_PROMPT[form.failure] for form in forms[:_FORMS_MAX] if form.failure is not None}
        if len(forms) > 1 and _conflict(forms):
            faults.add(Reason.CONFLICTING_ENTRY)
    return faults


def _conflict(forms: list[_Form]) -> bool:
    return (
        len(forms) > _FORMS_MAX
        or any(form.prompt_node is not forms[0].prompt_node for form in forms)
        or len({body_digest(form.entry) for form in forms}) > 1
    )


def _closing_faults(
    log: FrozenLog, recorded: int, content: set[Reason] | frozenset[Reason], dangling: list[str]
) -> set[Reason]:
    faults: set[Reason] = set()
    if dangling:
        faults.add(Reason.DANGLING_INTENT)
    if isinstance(log.closing, RolloutComplete) and log.closing.n_calls not in (None, recorded):
        faults.add(Reason.CALL_COUNT_MISMATCH)
    if not recorded and not content and not dangling:
        faults.add(Reason.NO_RECORDS)
    return faults


def _lost_terminal(terminal: Terminal | None, recorded: int) -> set[Reason]:
    """A named last call that is not among those recorded was lost. Without any call there is more to say than that."""
    lost = recorded and terminal is not None and terminal.attribution is Attribution.UNRECORDED
    return {Reason.CAPTURE_INCOMPLETE} if lost else set()


def _payloads(
    log: FrozenLog,
    tree: PrefixTree,
    calls: Iterable[ResolvedCall],
    set_aside: Iterable[tuple[TokenEntry, NotDelivered]],
) -> list[tuple[str, str]]:
    """(call id, payload digest) of every recorded call, by call id; how an unresolved prompt is written
    stands in for its tokens."""
    payloads = [
        (
            call.call_id,
            joined_digest(
                log.bodies.get(call.call_id) or body_digest_of(call.entry, call.routes),
                tree.digest(call.prompt_node),
            ).hex(),
        )
        for call in calls
    ]
    payloads += [
        (entry.model_call_id, "unresolved:" + joined_digest(body_digest(entry), prompt_form(entry)).hex())
        for entry, _ in set_aside
    ]
    return sorted(payloads)


def _content_id(
    log: FrozenLog,
    content: set[Reason] | frozenset[Reason],
    dangling: list[str],
    payloads: list[tuple[str, str]],
) -> str:
    parts = [log.rollout_id, payloads, dangling, sorted(log.marks), ordered(content)]
    return xxhash.xxh3_128_hexdigest(orjson.dumps(parts))
