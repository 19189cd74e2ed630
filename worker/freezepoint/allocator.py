"""The C library's memory allocator, told to give memory back.

A worker takes and frees arrays of megabytes all the time. glibc answers by raising the size from which on it asks the
system for a block of its own, and keeps what is freed below it in ever more fragmented heaps, one a thread: memory
that no budget counts. Fixed limits keep large blocks out of the heaps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 128 * 1024
_ARENAS = 2


def give_memory_back() -> bool:
    """Whether there was an allocator that understood it; others are left alone."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)) and bool(mallopt(_M_ARENA_MAX, _ARENAS))


def trim() -> None:
    """Give back the free pages between what is still held: arrays too small for blocks of their own leave a heap of holes
    behind when old ones are put away, which new ones fill only in part."""
    trimmer = _malloc_trim()
    if trimmer is not None:
        trimmer(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return found
