"""Using a topic again: results rebuilt from the tokens topic, and dead letters put back onto it."""

from freezepoint.replay.letters import Fate, Filters, put_back
from freezepoint.replay.rebuild import Rebuilt, Selection, rebuild
from freezepoint.replay.target import results_elsewhere

__all__ = ["Fate", "Filters", "Rebuilt", "Selection", "put_back", "rebuild", "results_elsewhere"]
