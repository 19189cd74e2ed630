"""Streamed responses put together again: chunks in, the response that would have come in one piece out.

What is kept grows with the generation, not with the number of chunks: deltas are appended as they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freezepoint.capture.arrays import GENERATION, ITEM_FIELDS, LOG_PROBS, PROMPT, ROUTES, Body, carries
from freezepoint.errors import CaptureError

_TERMINAL_EVENTS = frozenset({"response.completed", "response.incomplete"})
_FAILED_EVENTS = frozenset({"response.failed", "error"})
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
_APPENDED = ("token_ids", GENERATION, LOG_PROBS)


@dataclass(slots=True)
class StreamAssembler:
    """One streamed call. ``ended``: the server said so, and the response is whole."""

    ended: bool = False
    _chunks: int = 0
    _head: dict[str, Any] = field(default_factory=dict)
    _choices: dict[int, _Choice] = field(default_factory=dict)
    _native: list[Body] = field(default_factory=list)
    _native_ids: list[Any] = field(default_factory=list)
    _final: Body | None = None
    _done_items: dict[int, Body] = field(default_factory=dict)

    @property
    def final(self) -> bool:
        """Whether an event that carries the whole response has come; of chunks, one with the usage may follow the last."""
        return self._final is not None

    def add(self, chunk: Body) -> None:
        """Take the next chunk.

        :raises CaptureError: it reports a failure.
        """
        self._chunks += 1
        kind = chunk.get("type")
        if kind in _FAILED_EVENTS or (isinstance(chunk.get("error"), Mapping) and not chunk.get("choices")):
            raise CaptureError(f"the stream reports a failure: {_failure(chunk)}")
        if isinstance(kind, str) and kind.startswith("response."):
            self._add_event(kind, chunk)
        elif isinstance(chunk.get("meta_info"), Mapping):
            self._add_native(chunk)
        else:
            self._add_chunk(chunk)

    def response(self) -> Body:
        """The whole response.

        :raises CaptureError: the stream did not come to its end, or lost tokens on its way.
        """
        if not self.ended:
            raise CaptureError(f"the stream broke off after {self._chunks} chunks")
        if self._final is not None:
            return self._with_done_items(self._final)
        if self._native:
            return self._native_response()
        return {
            **self._head,
            "choices": [choice.whole(self._head.get("usage")) for _, choice in sorted(self._choices.items())],
        }

    # ------------------------------------------------------------------------------- Chat Completions and Completions

    def _add_chunk(self, chunk: Body) -> None:
        for name in ("id", "model", "created", "usage", "sglext"):
            if chunk.get(name) is not None:
                self._head[name] = chunk[name]
        if chunk.get(PROMPT) is not None:
            self._head.setdefault(PROMPT, chunk[PROMPT])
        for part in chunk.get("choices") or []:
            if isinstance(part, Mapping):
                index = part.get("index") or 0
                self._choices.setdefault(index, _Choice(index)).add(part)
        self.ended = bool(self._choices) and all(choice.finished for choice in self._choices.values())

    # --------------------------------------------------------------------------------------------------- Responses

    def _add_event(self, kind: str, event: Body) -> None:
        item = event.get("item")
        if kind == "response.output_item.done" and isinstance(item, Mapping):
            self._done_items[event.get("output_index") or 0] = item
        if kind in _TERMINAL_EVENTS and isinstance(event.get("response"), Mapping):
            self._final, self.ended = event["response"], True

    def _with_done_items(self, final: Body) -> Body:
        """The final response; where its own items carry no arrays, those that were sent one by one may."""
        if any(carries(item) for item in final.get("output") or []) or not any(
            map(carries, self._done_items.values())
        ):
            return final
        return {**final, "output": [item for _, item in sorted(self._done_items.items())]}

    # ------------------------------------------------------------------------------------------------------ SGLang

    def _add_native(self, chunk: Body) -> None:
        """Each chunk of /generate repeats everything so far, or, with incremental output, brings the new part."""
        meta = chunk["meta_info"]
        latest = meta.get("output_token_logprobs") or []
        counted = meta.get("completion_tokens")
        self._native_ids = (
            list(latest) if counted is None or len(latest) >= counted else [*self._native_ids, *latest]
        )
        first = self._native[0] if self._native else chunk
        self._native = [first, chunk]
        self.ended = meta.get("finish_reason") is not None

    def _native_response(self) -> Body:
        first, last = self._native
        meta = {**first["meta_info"], **last["meta_info"], "output_token_logprobs": self._native_ids}
        counted = meta.get("completion_tokens")
        if counted is not None and counted != len(self._native_ids):
            raise CaptureError(f"{len(self._native_ids)} of {counted} generated tokens came with the stream")
        body = {**first, **last, "meta_info": meta}
        body.pop("output_ids", None)  # of the last part only, or the same again
        return body


@dataclass(slots=True)
class _Choice:
    """One choice's deltas."""

    index: int
    finished: bool = False
    _message: dict[str, Any] = field(default_factory=dict)
    _texts: dict[str, list[str]] = field(default_factory=dict)
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    _arrays: dict[str, Any] = field(default_factory=dict)
    _inline: dict[str, Any] = field(default_factory=dict)
    _logprobs: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, part: Body) -> None:
        delta = part.get("delta")
        if isinstance(delta, Mapping):
            self._add_delta(delta)
        if isinstance(part.get("text"), str):
            self._texts.setdefault("text", []).append(part["text"])
        for name in (PROMPT, ROUTES, "meta_info"):
            if part.get(name) is not None:
                self._arrays[name] = part[name]
        _append(self._arrays, part, ("token_ids",))
        logprobs = part.get("logprobs")
        if isinstance(logprobs, Mapping):
            _append(self._logprobs, logprobs, ("content", "token_logprobs", "tokens"))
        if part.get("finish_reason") is not None:
            self._arrays["finish_reason"], self.finished = part["finish_reason"], True

    def _add_delta(self, delta: Body) -> None:
        for name in _TEXTS:
            if isinstance(delta.get(name), str):
                self._texts.setdefault(name, []).append(delta[name])
        if delta.get("role"):
            self._message["role"] = delta["role"]
        for name in ITEM_FIELDS:
            if name not in _APPENDED and delta.get(name) is not None:
                self._inline[name] = delta[name]
        _append(self._inline, delta, _APPENDED)
        for call in delta.get("tool_calls") or []:
            if isinstance(call, Mapping):
                self._add_call(call)

    def _add_call(self, call: Body) -> None:
        index = call.get("index")
        whole = self._calls.setdefault(
            len(self._calls) if index is None else index, {"function": {"arguments": ""}}
        )
        if call.get("id"):
            whole["id"] = call["id"]
        function = call.get("function")
        if isinstance(function, Mapping):
            if function.get("name"):
                whole["function"]["name"] = function["name"]
            whole["function"]["arguments"] += function.get("arguments") or ""

    def whole(self, usage: Any) -> dict[str, Any]:
        self._check_count(usage)
        texts = {name: "".join(pieces) for name, pieces in self._texts.items()}
        choice: dict[str, Any] = {"index": self.index, **self._arrays, "logprobs": self._logprobs or None}
        if "text" in texts:
            return {**choice, "text": texts["text"]}
        calls = [call for _, call in sorted(self._calls.items())]
        return {**choice, "message": {**self._message, **texts, "tool_calls": calls, **self._inline}}

    def _check_count(self, usage: Any) -> None:
        """Some servers drop the ids of chunks that their tool-call parser swallows (vLLM issue 27482)."""
        counted = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
        ids = self._arrays.get("token_ids")
        if ids is not None and isinstance(counted, int) and len(ids) < counted:
            raise CaptureError(f"{len(ids)} of {counted} generated tokens came with the stream")


def _append(into: dict[str, Any], part: Body, names: tuple[str, ...]) -> None:
    for name in names:
        if isinstance(part.get(name), list):
            into.setdefault(name, []).extend(part[name])


def _failure(chunk: Body) -> str:
    error = chunk.get("error") or (chunk.get("response") or {}).get("error") or chunk
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message)[:200]
