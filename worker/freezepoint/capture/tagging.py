"""Which rollout a request belongs to, and what the server behind the middleware gets to see of it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any
from urllib.parse import quote

from freezepoint.capture.recording import READABLE_CODINGS

Scope = MutableMapping[str, Any]
CAPTURE_SEGMENT = "training-token-capture"
_ACCEPT_ENCODING = b"accept-encoding"


def tagged(scope: Scope, prefix: str, header: bytes) -> tuple[str | None, Scope]:
    """The rollout id that the path or else the header names, None for neither; and the scope for the app inside.

    Of a tagged request the path loses its tag, and ``accept-encoding`` the codings that could not be read here.
    """
    from_path, inner = _untagged(scope, prefix)
    from_header = next(
        (value.decode("latin-1").strip() for name, value in scope["headers"] if name == header), None
    )
    rollout_id = from_path if from_path is not None else from_header
    if rollout_id is None:
        return None, inner
    return rollout_id, {**inner, "headers": [_readable(name, value) for name, value in inner["headers"]]}


def _untagged(scope: Scope, prefix: str) -> tuple[str | None, Scope]:
    """A server under a mount point has that before the tag: it stays."""
    path: str = scope["path"]
    mount = scope.get("root_path", "").rstrip("/")
    start = f"{mount}{prefix}/" if path.startswith(f"{mount}{prefix}/") else f"{prefix}/"
    if not path.startswith(start):
        return None, scope
    rollout_id, _, rest = path[len(start) :].partition("/")
    segment, slash, rest = rest.partition("/")
    if segment != CAPTURE_SEGMENT or not slash:
        return None, scope
    kept = start[: -len(prefix) - 1] + "/" + rest
    return rollout_id, {
        **scope,
        "path": kept,
        "raw_path": quote(kept, safe="/:@!$&'()*+,;=~").encode("ascii"),
    }


def _readable(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    if name != _ACCEPT_ENCODING:
        return name, value
    codings = [coding.strip() for coding in value.decode("latin-1").split(",")]
    kept = [coding for coding in codings if coding.partition(";")[0].strip().lower() in READABLE_CODINGS]
    return name, ", ".join(kept or ["identity"]).encode("latin-1")
