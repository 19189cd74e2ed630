"""What a worker needs of the file: that it is there and ours, room on the disk, a log that is moved in. For ``freezepoint doctor``."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path
from typing import Final

from freezepoint.errors import FreezepointError
from freezepoint.settings import SqliteSettings
from freezepoint.transport.ports import Check, Examined, Verdict
from freezepoint.transport.sqlite import log
from freezepoint.transport.sqlite.database import WAL_BYTES_MAX, ReadConnection
from freezepoint.wording import counted
from freezepoint_schemas.topics import Topic, TopicNames

CONNECTION: Final = "connection"
FREE_BYTES_MIN: Final = 64 * 1024 * 1024
FREE_BYTES_WANTED: Final = 1024 * 1024 * 1024
WAL_BYTES_WARN: Final = 8 * WAL_BYTES_MAX
MIB: Final = 1024 * 1024


async def examine(
    path: Path, reads: ReadConnection, names: TopicNames, settings: SqliteSettings, group: str
) -> Examined:
    """See the ``Broker`` port. A file that is not there is not created."""
    if not path.exists():
        return Examined(_absent(path), usable=False)
    try:
        version, layout, members = await reads.run(lambda connection: _look(connection, names, group))
    except FreezepointError as error:
        mend = "name another file with --broker or FREEZEPOINT_BROKER"
        return Examined([Check(CONNECTION, "fail", str(error), mend)], usable=False)
    size = path.stat().st_size
    checks = [
        Check(CONNECTION, "ok", f"{path.resolve()}, {size / MIB:.1f} MiB"),
        Check("schema", "ok", f"layout {layout}, SQLite {version}"),
        _wal(path),
        _room(path),
        _durability(settings),
        Check(f"group {group}", "ok", counted(members, "member") if members else "no worker is a member now"),
    ]
    return Examined(checks)


def _absent(path: Path) -> list[Check]:
    folder = path.absolute().parent
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return [Check(CONNECTION, "ok", f"{path} is not there yet; its first use creates it"), _room(path)]
    mend = f"mkdir -p {folder}, as a user who may write there"
    return [Check(CONNECTION, "fail", f"{path} cannot be created: {folder} is no writable folder", mend)]


def _look(connection: sqlite3.Connection, names: TopicNames, group: str) -> tuple[str, int, int]:
    """SQLite's version, the file's layout, and how many members the group has."""
    layout = int(connection.execute("PRAGMA user_version").fetchone()[0])
    topic = log.find_topic(connection, names[Topic.TOKENS])
    counted = connection.execute(
        "SELECT count(*) FROM member JOIN consumer_group ON member.consumer_group = consumer_group.id"
        " WHERE name = ? AND topic = ?",
        (group, -1 if topic is None else topic.id),
    ).fetchone()
    return sqlite3.sqlite_version, layout, int(counted[0])


def _wal(path: Path) -> Check:
    """It is moved in after a commit, unless somebody reads an old state or was stopped in between."""
    wal = path.with_name(path.name + "-wal")
    size = wal.stat().st_size if wal.exists() else 0
    if size <= WAL_BYTES_WARN:
        return Check("write-ahead log", "ok", f"{size / MIB:.1f} MiB")
    message = (
        f"{size / MIB:.0f} MiB: a process that reads or was stopped keeps it from being moved into the file"
    )
    return Check(
        "write-ahead log", "warn", message, f"lsof {path} (find that process; kill -CONT PID, or end it)"
    )


def _room(path: Path) -> Check:
    folder = path.absolute().parent
    free = shutil.disk_usage(folder).free
    text = f"{free / MIB:,.0f} MiB free in {folder}"
    if free >= FREE_BYTES_WANTED:
        return Check("disk", "ok", text)
    verdict: Verdict = "fail" if free < FREE_BYTES_MIN else "warn"
    return Check("disk", verdict, text, f"df -h {folder} (make room, or move the file)")


def _durability(settings: SqliteSettings) -> Check:
    if settings.synchronous == "FULL":
        return Check("durability", "ok", "every commit is synced")
    message = f"sqlite.synchronous is {settings.synchronous}: a power failure may lose what was acknowledged"
    return Check("durability", "warn", message, "export FREEZEPOINT_SQLITE__SYNCHRONOUS=FULL")
