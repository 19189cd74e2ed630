"""What a rollout's log does not say by itself: whether it is frozen, retired or incomplete, and its version.

The file and its fields are NeMo Gym's. It is optional: while a rollout is open and nothing was lost there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from freezepoint.errors import DamagedCaptureError, FrozenRolloutError
from freezepoint.store.files import INCOMPLETE, STATE, RolloutFiles


@dataclass(slots=True)
class CaptureState:
    """``version`` counts the changes up to ``indexed_size`` bytes of the log; each call behind it adds one more.

    ``other``: fields of the file that are not ours, kept as they are.
    """

    frozen: bool = False
    retired: bool = False
    incomplete: bool = False
    snapshot_id: str = ""
    version: int = 0
    indexed_size: int = 0
    other: dict[str, Any] = field(default_factory=lambda: {"entry_digests": {}})

    @classmethod
    def read(cls, files: RolloutFiles) -> CaptureState:
        """:raises DamagedCaptureError: the file is not what this or NeMo Gym writes."""
        content = files.state()
        if content is None:
            return cls()
        try:
            fields = orjson.loads(content)
        except orjson.JSONDecodeError:
            fields = None
        if not isinstance(fields, dict):
            raise DamagedCaptureError(f"{files.path(STATE)}: not a JSON object")
        known = {name: fields.pop(name) for name in _TYPES if name in fields}
        for name, value in known.items():
            if type(value) is not _TYPES[name] or (type(value) is int and value < 0):
                raise DamagedCaptureError(f"{files.path(STATE)}: {name} is {repr(value)[:80]}")
        return cls(**known, other=fields)

    def write(self, files: RolloutFiles) -> None:
        """Durable when it returns."""
        fields = {name: getattr(self, name) for name in _TYPES}
        files.replace_state(
            orjson.dumps(fields | self.other, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)
        )

    def mark_incomplete(self) -> None:
        self.incomplete = True
        self.version += 1

    def require_open(self, rollout_id: str) -> None:
        """:raises FrozenRolloutError: nothing may be written any more."""
        self.require_kept(rollout_id)
        if self.frozen:
            raise FrozenRolloutError(
                f"rollout {rollout_id} is frozen: delete it before it is dispatched again"
            )

    def require_kept(self, rollout_id: str) -> None:
        """:raises FrozenRolloutError: the records were consumed and dropped."""
        if self.retired:
            raise FrozenRolloutError(
                f"rollout {rollout_id} is retired: delete it before it is dispatched again"
            )


_TYPES = {
    "frozen": bool,
    "retired": bool,
    "incomplete": bool,
    "snapshot_id": str,
    "version": int,
    "indexed_size": int,
}


def marked_calls(files: RolloutFiles) -> frozenset[tuple[str, str]]:
    """The calls that were marked incomplete, as (call id, "reason"). A directory without a state file has only these."""
    try:
        lines = files.path(INCOMPLETE).read_bytes().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return frozenset()
    return frozenset((line.strip(), "") for line in lines or [""])
