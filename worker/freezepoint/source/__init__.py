"""Rollouts frozen and read back over the transport, for who builds trajectories without a worker."""

from freezepoint.source.token_source import TokenSource

__all__ = ["TokenSource"]
