"""A local spool for the logs of open rollouts: a cache of a cache, worthless once its worker is gone.

Append-only segment files in a folder of this process. A reference names a stretch of a segment; a segment is deleted
when nothing of it is referred to any more. A lock on the folder says that its worker lives; folders without are swept.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from freezepoint.core.frozen import SpillRef
from freezepoint.errors import ConfigurationError
from freezepoint_schemas import codec
from freezepoint_schemas.events import TokenEntry

SEGMENT_BYTES = 64 * 1024 * 1024
WRITE_BYTES = 1024 * 1024
"""Written at a time: a log as large as the whole budget must not be encoded in one piece."""
_PREFIX = "freezepoint-spool-"
_LOCK = "lock"
_LENGTH = struct.Struct("<HQ")


@dataclass(slots=True)
class _Segment:
    file: FileIO
    size: int = 0
    used: int = 0


class Spool:
    """Entries on disk. Thread-safe: builds read from their own threads.

    :raises ConfigurationError: the folder cannot be written. Its parent has to be there: what is missing above it is most likely
        a typo.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._parent = folder or Path(tempfile.gettempdir())
        try:
            self._parent.mkdir(exist_ok=True)
            sweep(self._parent)
            self._folder, self._lock_file = _new_folder(self._parent)
        except OSError as error:
            raise ConfigurationError(
                f"cannot spool to {self._parent}: {error.strerror}; set worker.spool_folder"
            ) from None
        self._lock = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._next = 0
        self.size_bytes = 0

    def write(self, entries: Iterable[TokenEntry]) -> SpillRef:
        """Put entries away; :meth:`take` or :meth:`free` the reference once.

        :raises OSError: the disk is full, say; nothing is put away.
        """
        with self._lock:
            number, segment = self._segment()
            offset = segment.size
            try:
                for block in _blocks(entries):
                    _pwrite(segment.file.fileno(), block, segment.size)
                    segment.size += len(block)
            except OSError:
                segment.size = offset  # what is behind it is written over
                raise
            length = segment.size - offset
            segment.used += length
            self.size_bytes += length
        return SpillRef(number, offset, length)

    def read(self, refs: Iterable[SpillRef]) -> list[TokenEntry]:
        """The entries, in the order they were written."""
        entries: list[TokenEntry] = []
        for ref in refs:
            with self._lock:
                descriptor = self._segments[ref.segment].file.fileno()
            entries += _decoded(descriptor, ref)
        return entries

    def free(self, refs: Iterable[SpillRef]) -> None:
        """Forget entries; their segment goes with the last of it."""
        with self._lock:
            for ref in refs:
                segment = self._segments[ref.segment]
                segment.used -= ref.length
                self.size_bytes -= ref.length
                if not segment.used and (segment.size >= SEGMENT_BYTES or ref.segment != self._next - 1):
                    self._delete(ref.segment)

    def take(self, refs: Iterable[SpillRef]) -> list[TokenEntry]:
        """:meth:`read` and :meth:`free`."""
        held = list(refs)
        entries = self.read(held)
        self.free(held)
        return entries

    def close(self) -> None:
        """Delete everything."""
        with self._lock:
            for number in list(self._segments):
                self._delete(number)
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock_file)

    def _segment(self) -> tuple[int, _Segment]:
        number = self._next - 1
        current = self._segments.get(number)
        if current is not None and current.size < SEGMENT_BYTES:
            return number, current
        if current is not None and not current.used:
            self._delete(number)
        number = self._next
        self._next += 1
        segment = self._segments[number] = _Segment(self._new_file(number))
        return number, segment

    def _new_file(self, number: int) -> FileIO:
        """Where somebody deleted the folder, as those do who tidy up temporary files, in another one. What is in the files
        that went with it can still be read."""
        try:
            return FileIO(self._folder / f"{number:08}", "x+")
        except FileNotFoundError:
            abandoned = self._lock_file
            self._folder, self._lock_file = _new_folder(self._parent)
            os.close(abandoned)
            return FileIO(self._folder / f"{number:08}", "x+")

    def _delete(self, number: int) -> None:
        segment = self._segments.pop(number)
        segment.file.close()
        (self._folder / f"{number:08}").unlink(missing_ok=True)


def sweep(parent: Path) -> None:
    """Delete the spools of workers that are gone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            descriptor = _locked(folder / _LOCK)
        except OSError:
            continue  # its worker lives
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _new_folder(parent: Path) -> tuple[Path, int]:
    """A folder and its lock. It gets its name only when it is locked, so that nobody sweeps it before."""
    unnamed = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    lock = _locked(unnamed / _LOCK)
    return unnamed.rename(parent / unnamed.name.removeprefix(".")), lock


def _locked(path: Path) -> int:
    """The descriptor of a lock file, locked; :raises OSError: somebody holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _encoded(entry: TokenEntry) -> bytes:
    name, body = entry.rollout_id.encode("ascii"), codec.encode_event(entry, packed=True)
    return _LENGTH.pack(len(name), len(body)) + name + body


def _blocks(entries: Iterable[TokenEntry]) -> Iterator[bytes]:
    """Encoded, many small ones or one large one at a time."""
    pieces: list[bytes] = []
    size = 0
    for entry in entries:
        pieces.append(_encoded(entry))
        size += len(pieces[-1])
        if size >= WRITE_BYTES:
            yield b"".join(pieces) if len(pieces) > 1 else pieces[0]
            pieces, size = [], 0
    yield b"".join(pieces)


def _decoded(descriptor: int, ref: SpillRef) -> Iterator[TokenEntry]:
    position, end = ref.offset, ref.offset + ref.length
    while position < end:
        name_length, body_length = _LENGTH.unpack(_pread(descriptor, _LENGTH.size, position))
        position += _LENGTH.size
        name = _pread(descriptor, name_length, position).decode("ascii")
        event = codec.decode_event(name, _pread(descriptor, body_length, position + name_length))
        position += name_length + body_length
        if not isinstance(event, TokenEntry):
            raise TypeError(f"the spool holds a {event.event}")
        yield event


def _pread(descriptor: int, length: int, offset: int) -> bytes:
    pieces: list[bytes] = []
    done = 0
    while done < length:
        piece = os.pread(descriptor, length - done, offset + done)
        if not piece:
            raise OSError("the spool is shorter than what was written to it")
        pieces.append(piece)
        done += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _pwrite(descriptor: int, block: bytes, offset: int) -> None:
    done = 0
    while done < len(block):
        done += os.pwrite(descriptor, memoryview(block)[done:], offset + done)
