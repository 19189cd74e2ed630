"""Longest-cumulative-prefix index: a radix tree over token sequences, linear in the tokens it is given.

Tokens are never copied: an edge is a stretch of one of the arrays that were interned, and arrays are
compared in bulk, exactly, without hashing. Equal sequences end at the same node, so "same prompt" is node
identity and "is a prefix of" is "is an ancestor of". Splitting an edge keeps the lower node's identity:
what once ended at a node ends there forever.

Each node remembers one interned array (a *run*) that passes through it. Following a run compares everything
ahead at once instead of edge by edge, and the node it leads to is found through jump pointers (Myers, "An
applicative random-access stack", 1983), so a conversation that is sent whole with every turn costs a few
bulk compares per call.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import numpy as np
import xxhash

from freezepoint_schemas.arrays import TokenArray

_COMPARE_FIRST = 1 << 10
_COMPARE_MOST = 1 << 16
_HASHED_AT_ONCE = 1 << 16
_LITTLE_ENDIAN = np.dtype("<i4")
_NO_TOKENS: TokenArray = np.empty(0, dtype=np.int32)


class Run:
    """An interned array: ``tokens[i]`` is the token at depth ``origin + i`` on the path to ``end``."""

    __slots__ = ("end", "origin", "tokens")
    end: Node

    def __init__(self, tokens: TokenArray, origin: int) -> None:
        self.tokens = tokens
        self.origin = origin


class Node:
    """A position in the tree: the sequence of ``depth`` tokens that leads from the root to it.

    ``run`` passes through this node and covers its whole edge (the tokens after ``parent``). ``jump`` is a
    proper ancestor further up, ``rank`` the number of nodes above when this one was made; both only save
    steps.
    """

    __slots__ = ("children", "depth", "hasher", "jump", "parent", "rank", "run")

    def __init__(self, parent: Node | None, depth: int, run: Run) -> None:
        self.parent = parent
        self.depth = depth
        self.run = run
        self.children: dict[int, Node] = {}
        self.hasher: xxhash.xxh3_128 | None = None
        self.rank: int = 0 if parent is None else parent.rank + 1
        self.jump: Node = self if parent is None else _jump_from(parent)


def _jump_from(parent: Node) -> Node:
    far = parent.jump
    return far.jump if parent.rank - far.rank == far.rank - far.jump.rank else parent


class PrefixTree:
    """All sequences of one rollout."""

    def __init__(self) -> None:
        self.root = Node(None, 0, Run(_NO_TOKENS, 0))

    def intern(self, start: Node, tokens: TokenArray) -> Node:
        """The node of ``start``'s sequence followed by ``tokens`` (int32 [n], kept, never copied)."""
        run = Run(tokens, start.depth)
        node = start
        while node.depth - run.origin < tokens.size:
            done = node.depth - run.origin
            first = tokens.item(done)
            child = node.children.get(first)
            if child is None:
                leaf = Node(node, run.origin + tokens.size, run)
                node.children[first] = leaf
                node = leaf
                break
            known = child.run
            matched = common_prefix(tokens[done:], known.tokens[node.depth - known.origin :])
            reached = self.at(known.end, node.depth + matched)
            node.children[first].run = run
            node = reached
        run.end = node
        return node

    def at(self, below: Node, depth: int) -> Node:
        """The node of the first ``depth`` tokens of ``below``'s sequence; splits an edge to make it."""
        node = below
        while node.parent is not None and node.parent.depth >= depth:
            node = node.jump if node.jump.depth >= depth else node.parent
        return node if node.depth == depth else _split(node, depth)

    def tokens(self, node: Node) -> TokenArray:
        """The whole sequence of a node: int32 [``depth``], copied only where it lies in several arrays."""
        pieces: list[TokenArray] = []
        while node.parent is not None:
            pieces.append(node.run.tokens[: node.depth - node.run.origin])
            node = self.at(node, node.run.origin)
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces[::-1]) if pieces else _NO_TOKENS

    def digest(self, node: Node) -> bytes:
        """xxh3-128 of the sequence as little-endian int32, continued from the nearest ancestor's."""
        return self._hasher(node).digest()

    def take_apart(self) -> None:
        """It is needed no more. Its nodes refer to each other in circles, which hold the arrays until a collection finds
        them, and in a worker that may be hours (see ``collector``)."""
        nodes = [self.root]
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            node.children.clear()
            node.parent = None
            del node.jump, node.run

    def _hasher(self, node: Node) -> xxhash.xxh3_128:
        """The node's hasher. All nodes on the way get theirs, and long edges are split to hold more of them:
        so no stretch of tokens is hashed over and over for positions behind it."""
        unhashed: list[Node] = []
        while node.hasher is None and node.parent is not None:
            unhashed.append(node)
            node = node.parent
        hasher = node.hasher or xxhash.xxh3_128()
        for below in reversed(unhashed):
            for depth in range(node.depth + _HASHED_AT_ONCE, below.depth, _HASHED_AT_ONCE):
                hasher = _hash_edge(hasher, self.at(below, depth))
            hasher = _hash_edge(hasher, below)
            node = below
        return hasher


def _hash_edge(above: xxhash.xxh3_128, node: Node) -> xxhash.xxh3_128:
    """Give a node its hasher: its parent's, and the tokens between them."""
    run, start = node.run, node.parent.depth if node.parent is not None else 0
    hasher = above.copy()
    hasher.update(
        run.tokens[start - run.origin : node.depth - run.origin].astype(_LITTLE_ENDIAN, copy=False).data
    )
    node.hasher = hasher
    return hasher


def _split(lower: Node, depth: int) -> Node:
    """Put a node into the edge above ``lower``, which stays what it is."""
    parent, run = lower.parent, lower.run
    if parent is None or not parent.depth < depth < lower.depth:
        raise ValueError(f"no edge to split at depth {depth}")
    upper = Node(parent, depth, run)
    upper.children[run.tokens.item(depth - run.origin)] = lower
    parent.children[run.tokens.item(parent.depth - run.origin)] = upper
    lower.parent = upper
    return upper


def common_prefix(left: TokenArray, right: TokenArray) -> int:
    """How many leading tokens two arrays share. Blocks grow, so an early difference is found cheaply and a
    long match needs no array as long as itself."""
    limit = min(left.size, right.size)
    if limit and left.ctypes.data == right.ctypes.data:
        return limit  # views of one buffer
    start, block = 0, _COMPARE_FIRST
    while start < limit:
        stop = min(start + block, limit)
        differs = left[start:stop] != right[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, block = stop, min(block * 4, _COMPARE_MOST)
    return limit


def is_prefix(upper: Node, lower: Node) -> bool:
    """Whether ``upper``'s sequence is a prefix of ``lower``'s, or equal."""
    node = lower
    while node.parent is not None and node.depth > upper.depth:
        node = node.jump if node.jump.depth >= upper.depth else node.parent
    return node is upper


def nearest_ends(prompts: Iterable[Node], ends: AbstractSet[Node]) -> list[Node | None]:
    """For each node the nearest of ``ends`` at or above it, or None. Every edge is walked at most once."""
    known: dict[Node, Node | None] = {}
    return [_nearest(node, ends, known) for node in prompts]


def _nearest(prompt: Node, ends: AbstractSet[Node], known: dict[Node, Node | None]) -> Node | None:
    walked: list[Node] = []
    node: Node | None = prompt
    found: Node | None = None
    while node is not None:
        if node in known:
            found = known[node]
            break
        walked.append(node)
        if node in ends:
            found = node
            break
        node = node.parent
    known.update(dict.fromkeys(walked, found))
    return found
