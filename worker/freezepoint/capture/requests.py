"""How many generations a request asks for: its response can be an entry only if that is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson


class RequestRecording:
    """A request body as the app reads it. A larger one than ``bytes_max`` is not looked at: it tells nothing."""

    def __init__(self, bytes_max: int) -> None:
        self._pieces: list[bytes] | None = []
        self._left = bytes_max

    def feed(self, piece: bytes) -> None:
        self._left -= len(piece)
        if self._left < 0:
            self._pieces = None
        if self._pieces is not None:
            self._pieces.append(piece)

    @property
    def size(self) -> int:
        return sum(map(len, self._pieces or ()))

    def refusal(self) -> str | None:
        """Why no response to this request can be captured, if that is so. What was read is given up."""
        pieces, self._pieces = self._pieces, None
        try:
            body = orjson.loads(b"".join(pieces or ()))
        except orjson.JSONDecodeError:
            return None  # for the server to judge
        asked = _generations(body) if isinstance(body, Mapping) else 1
        return f"the request asks for {asked} generations; capture needs one (n=1)" if asked > 1 else None


def _generations(body: Mapping[str, Any]) -> int:
    """Prompts times the samples of each; SGLang has the latter among its sampling parameters."""
    sampling = body.get("sampling_params")
    samples = [body.get("n"), sampling.get("n") if isinstance(sampling, Mapping) else None]
    prompts = max(_prompts(body.get(name)) for name in ("prompt", "text", "input_ids"))
    return prompts * max(number if type(number) is int else 1 for number in samples)


def _prompts(value: Any) -> int:
    """A list is one prompt's ids, or several prompts."""
    return len(value) if isinstance(value, list) and value and not isinstance(value[0], int) else 1
