"""Numbers in sentences for people."""

from __future__ import annotations


def counted(count: int, singular: str, plural: str | None = None) -> str:
    """``1 record``, ``2 records``; the word, or words, that go with the number. ``plural``: by default an ``s`` more."""
    return f"{count} {agreeing(count, singular, plural)}"


def agreeing(count: int, singular: str, plural: str | None = None) -> str:
    """The same without the number, for what follows later in the sentence."""
    return singular if count == 1 else plural or f"{singular}s"
