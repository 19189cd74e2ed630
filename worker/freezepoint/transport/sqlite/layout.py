"""The file's layout. A change of it raises ``LAYOUT_VERSION``; older programs then refuse the file. A column that they can
do without changes nothing for them: it is added where it is missing (``ADDED``)."""

from __future__ import annotations

APPLICATION_ID = int.from_bytes(b"frzp", "big")
"""Marks the file as ours (``PRAGMA application_id``, which ``file`` shows too)."""

LAYOUT_VERSION = 1

OFFSET_BITS = 40
"""A record's position is its stream's number above this many bits of offset: one table, clustered by partition."""

OFFSET_MASK = (1 << OFFSET_BITS) - 1

TABLES = (
    """
    CREATE TABLE topic (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        partitions INTEGER NOT NULL,
        config TEXT NOT NULL                -- JSON object, as on Kafka
    )
    """,
    """
    CREATE TABLE stream (                   -- one partition of one topic
        id INTEGER PRIMARY KEY,
        topic INTEGER NOT NULL REFERENCES topic,
        partition INTEGER NOT NULL,
        log_start INTEGER NOT NULL DEFAULT 0,
        next_offset INTEGER NOT NULL DEFAULT 0,
        timestamp_ms INTEGER NOT NULL DEFAULT 0,    -- of the last record: append time never steps back
        epoch INTEGER NOT NULL DEFAULT 0,           -- counts the owners of a tokens partition; the last one may publish
        UNIQUE (topic, partition)
    )
    """,
    """
    CREATE TABLE record (
        position INTEGER PRIMARY KEY,       -- stream.id << 40 | offset
        timestamp_ms INTEGER NOT NULL,
        key BLOB,
        value BLOB,
        headers TEXT                        -- JSON [[name, value in hex], ...], NULL without
    )
    """,
    """
    CREATE TABLE latest (                   -- compacted topics: where each key's one kept record is
        stream INTEGER NOT NULL,
        key BLOB NOT NULL,
        position INTEGER NOT NULL,
        PRIMARY KEY (stream, key)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE consumer_group (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        topic INTEGER NOT NULL REFERENCES topic,
        generation INTEGER NOT NULL DEFAULT 0,
        UNIQUE (name, topic)
    )
    """,
    """
    CREATE TABLE member (
        joined INTEGER PRIMARY KEY AUTOINCREMENT,
        consumer_group INTEGER NOT NULL REFERENCES consumer_group,
        id TEXT NOT NULL UNIQUE,
        beat INTEGER NOT NULL DEFAULT 0     -- counted up by the member; the others watch whether it moves
    )
    """,
    """
    CREATE TABLE assignment (               -- of the group's current generation
        consumer_group INTEGER NOT NULL,
        partition INTEGER NOT NULL,
        member TEXT NOT NULL,
        PRIMARY KEY (consumer_group, partition)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE committed (
        consumer_group INTEGER NOT NULL,
        partition INTEGER NOT NULL,
        offset INTEGER NOT NULL,
        recorded INTEGER,                   -- how far the ledger had come then, where an owner of the partition says so
        PRIMARY KEY (consumer_group, partition)
    ) WITHOUT ROWID
    """,
)

ADDED = (("committed", "recorded", "INTEGER"),)
"""Table, column and type of what the first files of this layout lack."""
