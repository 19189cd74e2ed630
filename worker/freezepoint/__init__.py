"""freezepoint: token events in, exactly one result per rollout out."""

__version__ = "0.1.0"
