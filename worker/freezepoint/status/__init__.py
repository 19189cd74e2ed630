"""How a worker stands: as JSON, and as a page for people."""

from freezepoint.status.facts import alive, ready, status
from freezepoint.status.page import PAGE, POLICY

__all__ = ["PAGE", "POLICY", "alive", "ready", "status"]
