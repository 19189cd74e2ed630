"""Rollouts of one machine as files, without any broker: the local form of the tokens topic."""

from freezepoint.store.token_store import TokenStore

__all__ = ["TokenStore"]
