"""Records above a topic's limit: split on writing, put together on reading.

A part carries the header ``freezepoint-part: <id>:<index>:<count>``; the id is the whole value's xxh3-128, so a
retried put repeats parts harmlessly and the whole is verified by its own name.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

from freezepoint_schemas.errors import InputError

PARTS_MAX = 1_000_000
_PART_OVERHEAD_BYTES = 128
_VALUE_OVERHEAD_BYTES = 512
_HEADER = re.compile(rb"([0-9a-f]{32}):(0|[1-9][0-9]{0,6}):([1-9][0-9]{0,6})")


class PartError(InputError, ValueError):
    """A part header is malformed or contradicts the parts before it, or the whole does not have its digest."""


@dataclass(frozen=True, slots=True)
class PartHeader:
    """Which part of which value a record is."""

    value_id: str
    index: int
    count: int

    @classmethod
    def parse(cls, raw: bytes) -> PartHeader:
        """:raises PartError: not ``<32 hex digits>:<index>:<count>`` with index < count."""
        match = _HEADER.fullmatch(raw)
        if match is None:
            raise PartError("part header is not <id>:<index>:<count>")
        parsed = cls(match[1].decode("ascii"), int(match[2]), int(match[3]))
        if parsed.index >= parsed.count or parsed.count > PARTS_MAX:
            raise PartError(f"part {parsed.index} of {parsed.count}")
        return parsed

    def encode(self) -> bytes:
        return f"{self.value_id}:{self.index}:{self.count}".encode("ascii")


def split(value: bytes, part_bytes_max: int) -> Iterator[tuple[PartHeader, bytes]]:
    """The value's parts, each of at most that many bytes."""
    if part_bytes_max < 1:
        raise ValueError("a part must hold at least one byte")
    value_id = xxhash.xxh3_128_hexdigest(value)
    count = -(-len(value) // part_bytes_max)
    for index in range(count):
        yield (
            PartHeader(value_id, index, count),
            value[index * part_bytes_max : (index + 1) * part_bytes_max],
        )


@dataclass(slots=True)
class _Pending:
    count: int
    first_offset: int
    parts: dict[int, bytes] = field(default_factory=dict)
    size: int = 0

    @property
    def held_bytes(self) -> int:
        return self.size + _VALUE_OVERHEAD_BYTES + _PART_OVERHEAD_BYTES * len(self.parts)


@dataclass(slots=True)
class PartAssembler:
    """Puts the parts of one key together; parts of several values may interleave and repeat.

    It remembers which values were whole once, so that a late repeat of some parts is no incomplete value.
    ``held_bytes`` is about what all of this holds in memory; whoever limits it calls :meth:`drop_oldest`.
    """

    value_bytes_max: int
    held_bytes: int = 0
    _pending: dict[str, _Pending] = field(default_factory=dict)
    _whole: set[str] = field(default_factory=set)

    @property
    def incomplete(self) -> bool:
        """Whether a value lacks parts."""
        return bool(self._pending)

    @property
    def pending_bytes(self) -> int:
        return sum(pending.size for pending in self._pending.values())

    def add(self, header: PartHeader, part: bytes, offset: int) -> bytes | None:
        """The whole value, once its last part is here; None before and for repeats.

        :raises PartError: another count or content than before, or a whole that is not what its id says.
        :raises PartsTooLarge: the parts exceed ``value_bytes_max``; the value is forgotten and its further parts ignored.
        """
        if header.value_id in self._whole:
            return None
        pending = self._pending.get(header.value_id)
        if pending is None:
            pending = self._pending[header.value_id] = _Pending(header.count, offset)
            self.held_bytes += pending.held_bytes
        if pending.count != header.count:
            raise PartError(f"value of {pending.count} parts has a part that counts {header.count}")
        known = pending.parts.get(header.index)
        if known is not None:
            if known != part:
                raise PartError(f"part {header.index} came twice with different content")
            return None
        pending.parts[header.index] = part
        pending.size += len(part)
        self.held_bytes += len(part) + _PART_OVERHEAD_BYTES
        if pending.size > self.value_bytes_max:
            self._finish(header.value_id)
            raise PartsTooLarge(f"the parts of one value exceed {self.value_bytes_max} bytes")
        return self._join(header.value_id, pending) if len(pending.parts) == pending.count else None

    def dump(self) -> dict[str, Any]:
        """Everything that is held, as plain JSON values; :meth:`load` makes it an assembler again."""
        pending = {
            value_id: {
                "count": value.count,
                "first_offset": value.first_offset,
                "parts": {str(index): b64encode(part).decode("ascii") for index, part in value.parts.items()},
            }
            for value_id, value in self._pending.items()
        }
        return {"whole": sorted(self._whole), "pending": pending}

    @classmethod
    def load(cls, dumped: dict[str, Any], value_bytes_max: int) -> PartAssembler:
        """What :meth:`dump` gave."""
        assembler = cls(value_bytes_max)
        for value_id, value in dumped["pending"].items():
            for index, part in value["parts"].items():
                header = PartHeader(value_id, int(index), value["count"])
                assembler.add(header, b64decode(part), value["first_offset"])
        assembler._whole.update(dumped["whole"])
        assembler.held_bytes += _VALUE_OVERHEAD_BYTES * len(dumped["whole"])
        return assembler

    def drop_oldest(self, bytes_max: int) -> None:
        """Hold no more than that, and at least the newest value: what is known of whole values goes first, then the oldest
        incomplete ones."""
        if self.held_bytes > bytes_max:
            self.held_bytes -= _VALUE_OVERHEAD_BYTES * len(self._whole)
            self._whole.clear()
        while self.held_bytes > bytes_max and len(self._pending) > 1:
            self._drop(next(iter(self._pending)))

    def _join(self, value_id: str, pending: _Pending) -> bytes:
        whole = b"".join(pending.parts[index] for index in range(pending.count))
        self._finish(value_id)
        if xxhash.xxh3_128_hexdigest(whole) != value_id:
            raise PartError("the parts together do not have the digest that names them")
        return whole

    def _finish(self, value_id: str) -> None:
        self._drop(value_id)
        self._whole.add(value_id)
        self.held_bytes += _VALUE_OVERHEAD_BYTES

    def _drop(self, value_id: str) -> None:
        self.held_bytes -= self._pending.pop(value_id).held_bytes


class PartsTooLarge(PartError):
    """The parts of one value exceed the reader's limit."""
