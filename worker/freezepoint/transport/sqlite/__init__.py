"""The embedded default: one SQLite file, shared by the processes of a machine, with no server to install."""

from freezepoint.transport.sqlite.transport import SqliteTransport

__all__ = ["SqliteTransport"]
