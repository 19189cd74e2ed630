"""Explains one rollout from its frozen log: calls, chains, what was set aside and why, and what would un-mask it."""

from freezepoint.inspection.explain import Explanation, explain
from freezepoint.inspection.finding import Found, find_in_broker, find_in_files
from freezepoint.inspection.following import Beginning, Life, LifeState
from freezepoint.inspection.page import as_page
from freezepoint.inspection.text import as_text

__all__ = [
    "Beginning",
    "Explanation",
    "Found",
    "Life",
    "LifeState",
    "as_page",
    "as_text",
    "explain",
    "find_in_broker",
    "find_in_files",
]
