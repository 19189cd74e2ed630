"""The prefix tree: positions, splits, digests and runs."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from freezepoint.core.prefixes import Node, PrefixTree, common_prefix, nearest_ends
from freezepoint_schemas.arrays import TokenArray


def tokens(*values: int) -> TokenArray:
    return np.array(values, dtype=np.int32)


def chain_above(node: Node) -> list[int]:
    depths = [node.depth]
    while node.parent is not None:
        node = node.parent
        depths.append(node.depth)
    return depths


def test_equal_sequences_end_at_the_same_node() -> None:
    tree = PrefixTree()
    whole = tree.intern(tree.root, tokens(1, 2, 3, 4))
    in_two = tree.intern(tree.intern(tree.root, tokens(1, 2)), tokens(3, 4))
    assert whole is in_two
    assert tree.intern(tree.root, tokens()) is tree.root


def test_a_split_keeps_what_ended_below() -> None:
    tree = PrefixTree()
    long = tree.intern(tree.root, tokens(1, 2, 3, 4))
    short = tree.intern(tree.root, tokens(1, 2))
    fork = tree.intern(tree.root, tokens(1, 2, 3, 9))
    assert chain_above(long) == [4, 3, 2, 0]
    assert chain_above(fork) == [4, 3, 2, 0]
    assert [tree.tokens(node).tolist() for node in (long, short, fork)] == [
        [1, 2, 3, 4],
        [1, 2],
        [1, 2, 3, 9],
    ]


def test_a_position_inside_an_edge_becomes_a_node() -> None:
    tree = PrefixTree()
    end = tree.intern(tree.root, tokens(5, 6, 7))
    middle = tree.at(end, 2)
    assert tree.tokens(middle).tolist() == [5, 6]
    assert tree.at(end, 2) is middle
    assert tree.at(end, 0) is tree.root
    assert tree.at(end, 3) is end


def test_a_position_below_is_refused() -> None:
    tree = PrefixTree()
    end = tree.intern(tree.root, tokens(5, 6, 7))
    with pytest.raises(ValueError, match="depth 4"):
        tree.at(end, 4)


def test_positions_of_a_long_chain() -> None:
    tree = PrefixTree()
    nodes = [tree.root]
    for token in range(2_000):
        nodes.append(tree.intern(nodes[-1], tokens(token)))
    assert all(tree.at(nodes[-1], depth) is nodes[depth] for depth in range(0, 2_001, 37))
    assert tree.tokens(nodes[-1]).tolist() == list(range(2_000))


def test_a_digest_is_of_the_tokens_however_they_came() -> None:
    tree = PrefixTree()
    sequence = np.arange(5_000, dtype=np.int32)
    node = tree.intern(tree.root, sequence[:100])
    assert tree.digest(node) == xxhash.xxh3_128_digest(sequence[:100].tobytes())
    end = tree.intern(tree.intern(node, sequence[100:4_000]), sequence[4_000:])
    assert tree.digest(tree.at(end, 2_500)) == xxhash.xxh3_128_digest(sequence[:2_500].tobytes())
    assert tree.digest(end) == xxhash.xxh3_128_digest(sequence.tobytes())
    assert tree.digest(tree.root) == xxhash.xxh3_128_digest(b"")


@pytest.mark.parametrize("difference", [0, 1, 1023, 1024, 70_000, 99_999])
def test_the_first_difference_is_found(difference: int) -> None:
    left = np.zeros(100_000, dtype=np.int32)
    right = left.copy()
    right[difference] = 1
    assert common_prefix(left, right) == difference
    assert common_prefix(left, left[: difference + 1]) == difference + 1


def test_the_nearest_end_is_at_or_above() -> None:
    tree = PrefixTree()
    first = tree.intern(tree.root, tokens(1, 2))
    second = tree.intern(first, tokens(3))
    other = tree.intern(tree.root, tokens(9))
    deep = tree.intern(second, tokens(4, 5))
    assert nearest_ends([deep, second, first, other, tree.root], {first, second}) == [
        second,
        second,
        first,
        None,
        None,
    ]
