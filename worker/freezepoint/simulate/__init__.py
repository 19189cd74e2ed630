"""A seeded generator of agent rollouts as their model servers would record them, and the truth about each.

A rollout is written as a tree of calls of which the generator knows who continued whom. Masks, reasons and token
counts follow from that knowledge alone; nothing here looks for prefixes or asks the builder, so that the one can be
checked against the other. What a rollout contains depends on the seed and its number, not on what else runs.
"""

from __future__ import annotations

from freezepoint.simulate.profile import Profile
from freezepoint.simulate.stream import Simulated, SimulatedRollout, simulate
from freezepoint.simulate.truth import Truth, differences

__all__ = ["Profile", "Simulated", "SimulatedRollout", "Truth", "differences", "simulate"]
