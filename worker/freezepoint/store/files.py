"""The files of one rollout, how they are locked and how what is written to them gets durable.

The names are NeMo Gym's, and so is the lock: its processes and ours may share a directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from freezepoint.errors import InvalidRolloutIdError
from freezepoint_schemas.topics import is_rollout_id

ENTRIES = ".tokens.jsonl"
STATE = ".tokens.state.json"
INTENTS = ".tokens.intents"
INCOMPLETE = ".tokens.incomplete"
LOCK = ".tokens.lock"
_NEW_STATE = ".tokens.state.new"
_NAME_BYTES_MAX = 255
ROLLOUT_ID_LENGTH_MAX = _NAME_BYTES_MAX - len(STATE)

_FILE_MODE = 0o666
_LIFE_BYTES = 16


def storable_id(rollout_id: object) -> str:
    """:raises InvalidRolloutIdError: nothing that may become a file's name."""
    if not isinstance(rollout_id, str) or not is_rollout_id(rollout_id):
        raise InvalidRolloutIdError(f"{repr(rollout_id)[:80]} is no valid rollout id")
    if len(rollout_id) > ROLLOUT_ID_LENGTH_MAX:
        raise InvalidRolloutIdError(
            f"a rollout id of {len(rollout_id)} characters is too long for a file's name: at most "
            f"{ROLLOUT_ID_LENGTH_MAX} in a local store"
        )
    return rollout_id


@dataclass(frozen=True, slots=True)
class RolloutFiles:
    """Where one rollout lies."""

    directory: Path
    rollout_id: str

    @classmethod
    def of(cls, directory: Path, rollout_id: object) -> RolloutFiles:
        """:raises InvalidRolloutIdError: nothing that may become a file's name."""
        return cls(directory, storable_id(rollout_id))

    def path(self, suffix: str) -> Path:
        return self.directory / f"{self.rollout_id}{suffix}"

    def name(self, suffix: str) -> str:
        """:meth:`path` for system calls, without the cost of a ``Path``."""
        return f"{self.directory}/{self.rollout_id}{suffix}"

    @contextmanager
    def locked(self) -> Iterator[bytes]:
        """Hold the rollout against every other thread and process. Yields the id of its life: a clear changes it."""
        lock = self._acquire()
        try:
            yield os.pread(lock, _LIFE_BYTES, 0) or _write_life(lock)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing alone would not: a forked child may hold a copy
            os.close(lock)

    def _acquire(self) -> int:
        """The locked lock file; anew where it was removed while we waited for it."""
        name = self.name(LOCK)
        while True:
            lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if _is_at(name, lock):
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    @property
    def exists(self) -> bool:
        """Whether anything is known of the rollout."""
        return any(
            os.path.lexists(self.name(suffix)) for suffix in (LOCK, STATE, ENTRIES, INTENTS, INCOMPLETE)
        )

    def open_entries(self) -> int:
        """The log for reading and appending; it appears where there was none."""
        return os.open(self.name(ENTRIES), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)

    def sync_entries(self) -> None:
        """What others wrote before they died need not be on disk yet."""
        try:
            descriptor = os.open(self.name(ENTRIES), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def append_line(self, suffix: str, line: bytes) -> None:
        """Durably add a line to a small file; one without its line break, from a crash, is ended first."""
        descriptor = os.open(
            self.name(suffix), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE
        )
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            write_durably(descriptor, [b"\n" if torn else b"", line, b"\n"])
        finally:
            os.close(descriptor)
        if size == 0:
            self.sync_directory()

    def state(self) -> bytes | None:
        """None where there is none."""
        try:
            with open(self.name(STATE), "rb") as file:  # noqa: PTH123 - names, see above
                return file.read()
        except FileNotFoundError:
            return None  # and nothing but that says so: a disk that fails must not hide what was marked

    def replace_state(self, content: bytes) -> None:
        """Durably put another state in place of the last one, or leave that one whole."""
        name = self.name(_NEW_STATE)
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _FILE_MODE)
        try:
            write_durably(descriptor, [content])
        finally:
            os.close(descriptor)
        os.replace(name, self.name(STATE))  # noqa: PTH105 - names, see above
        self.sync_directory()

    def remove(self, *suffixes: str) -> None:
        """Remove these files, in this order; durable once the directory is synced."""
        for suffix in suffixes:
            with suppress(FileNotFoundError):
                os.unlink(self.name(suffix))  # noqa: PTH108 - names, see above

    def remove_payload(self) -> None:
        self.remove(ENTRIES, INCOMPLETE, INTENTS, _NEW_STATE)

    def begin_life(self) -> None:
        """Let nobody take what comes for what was. The rollout must be locked."""
        lock = os.open(self.name(LOCK), os.O_RDWR | os.O_CLOEXEC)
        try:
            _write_life(lock)
        finally:
            os.close(lock)

    def sync_directory(self) -> None:
        sync_directory(self.directory)


def _is_at(name: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(name), os.fstat(descriptor))  # noqa: PTH116 - names, see above
    except FileNotFoundError:
        return False


def _write_life(lock: int) -> bytes:
    """Not synced: whoever compares it holds his other half in memory."""
    life = secrets.token_bytes(_LIFE_BYTES)
    os.pwrite(lock, life, 0)
    return life


def write_durably(descriptor: int, pieces: Sequence[bytes]) -> int:
    """Append and sync, or leave the file as long as it was. How many bytes that were.

    A write whose sync failed must not stay: the next sync would succeed without having written it.
    """
    size = os.fstat(descriptor).st_size
    length = sum(map(len, pieces))
    try:
        written = os.writev(descriptor, pieces)
        if written < length:
            _write_all(descriptor, memoryview(b"".join(pieces))[written:])
        os.fsync(descriptor)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise
    return length


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(directory: Path) -> None:
    """Make the names in it durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no directories
            raise
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """The directory and its parents, durably where they are new."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_directory(path.parent)
