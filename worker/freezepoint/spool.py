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

    :raises ConfigurationError: the folder cannot be written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        parent = folder or Path(tempfile.gettempdir())
        try:
            parent.mkdir(parents=True, exist_ok=True)
            sweep(parent)
            self._folder, self._lock_file = _new_folder(parent)
        except OSError as error:
            raise ConfigurationError(
                f"cannot spool to {parent}: {error.strerror}; set worker.spool_folder"
            ) from None
        self._lock = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._next = 0
        self.size_bytes = 0

    def write(self, entries: Iterable[TokenEntry]) -> SpillRef:
        """Put entries away; :meth:`take` or :meth:`free` the reference once."""
        blob = b"".join(_encoded(entry) for entry in entries)
        with self._lock:
            number, segment = self._segment()
            offset = segment.size
            segment.file.write(blob)
            segment.size += len(blob)
            segment.used += len(blob)
            self.size_bytes += len(blob)
        return SpillRef(number, offset, len(blob))

    def read(self, refs: Iterable[SpillRef]) -> list[TokenEntry]:
        """The entries, in the order they were written."""
        entries: list[TokenEntry] = []
        for ref in refs:
            with self._lock:
                descriptor = self._segments[ref.segment].file.fileno()
            entries += _decoded(_pread(descriptor, ref))
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
        segment = self._segments[number] = _Segment(FileIO(self._folder / f"{number:08}", "x+"))
        return number, segment

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


def _decoded(blob: bytes) -> Iterator[TokenEntry]:
    position = 0
    while position < len(blob):
        name_length, body_length = _LENGTH.unpack_from(blob, position)
        start = position + _LENGTH.size + name_length
        name = blob[position + _LENGTH.size : start].decode("ascii")
        position = start + body_length
        event = codec.decode_event(name, blob[start:position])
        if not isinstance(event, TokenEntry):
            raise TypeError(f"the spool holds a {event.event}")
        yield event


def _pread(descriptor: int, ref: SpillRef) -> bytes:
    pieces: list[bytes] = []
    done = 0
    while done < ref.length:
        piece = os.pread(descriptor, ref.length - done, ref.offset + done)
        if not piece:
            raise OSError("the spool is shorter than what was written to it")
        pieces.append(piece)
        done += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
