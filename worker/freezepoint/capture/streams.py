"""Streamed responses put together again: chunks in, the response that would have come in one piece out.

What is kept grows with the generation, not with the number of chunks: deltas are appended as they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freezepoint.capture.arrays import (
    GENERATION,
    ITEM_FIELDS,
    LOG_PROBS,
    PROMPT,
    ROUTES,
    Body,
    carries,
    is_counted,
    objects,
)
from freezepoint.errors import CaptureError

_TERMINAL_EVENTS = frozenset({"response.completed", "response.incomplete"})
_FAILED_EVENTS = frozenset({"response.failed", "error"})
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
_CARRIERS = ("token_ids", "logprobs", "meta_info", GENERATION)
_APPENDED = ("token_ids", GENERATION, LOG_PROBS)


@dataclass(slots=True)
class StreamAssembler:
    """One streamed call. ``ended``: the server said so, and the response is whole."""

    ended: bool = False
    _chunks: int = 0
    _head: dict[str, Any] = field(default_factory=dict)
    _choices: dict[int, _Choice] = field(default_factory=dict)
    _native: _Native | None = None
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
        if (isinstance(kind, str) and kind in _FAILED_EVENTS) or (
            isinstance(chunk.get("error"), Mapping) and not chunk.get("choices")
        ):
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
        if self._native is not None:
            return self._native.whole()
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
        for part in objects(chunk.get("choices")):
            index = _index(part.get("index"), 0)
            self._choices.setdefault(index, _Choice(index)).add(part)
        self.ended = bool(self._choices) and all(choice.finished for choice in self._choices.values())

    # --------------------------------------------------------------------------------------------------- Responses

    def _add_event(self, kind: str, event: Body) -> None:
        item = event.get("item")
        if kind == "response.output_item.done" and isinstance(item, Mapping):
            self._done_items[_index(event.get("output_index"), 0)] = item
        if kind in _TERMINAL_EVENTS and isinstance(event.get("response"), Mapping):
            self._final, self.ended = event["response"], True

    def _with_done_items(self, final: Body) -> Body:
        """The final response; where its own items carry no arrays, those that were sent one by one may."""
        if any(carries(item) for item in objects(final.get("output"))) or not any(
            map(carries, self._done_items.values())
        ):
            return final
        return {**final, "output": [item for _, item in sorted(self._done_items.items())]}

    # ------------------------------------------------------------------------------------------------------ SGLang

    def _add_native(self, chunk: Body) -> None:
        if self._native is None:
            self._native = _Native()
        self._native.add(chunk)
        self.ended = self._native.finished


@dataclass(slots=True)
class _MetaInfo:
    """``meta_info`` of one generation: each chunk repeats the rows so far, or, incrementally, brings the new ones.

    Which of both, the chunk's ``completion_tokens`` shows: it always counts from the first token on.
    """

    rows: list[Any] = field(default_factory=list)
    repeated: bool = True
    _latest: dict[str, Any] = field(default_factory=dict)
    _with_rows: int = 0
    _uncounted: bool = False

    def add(self, meta: Body) -> None:
        """:raises CaptureError: the rows neither repeat nor continue those before."""
        rows, counted = meta.get("output_token_logprobs"), meta.get("completion_tokens")
        self._latest.update((name, value) for name, value in meta.items() if value not in (None, []))
        if not isinstance(rows, list):
            return
        self._with_rows += 1
        self._uncounted = self._uncounted or not isinstance(counted, int)
        self.repeated = not isinstance(counted, int) or len(rows) >= counted
        if not self.repeated:
            self.rows.extend(rows)
            return
        if not self._uncounted and self.rows and _id_at(rows, len(self.rows) - 1) != _id_at(self.rows, -1):
            raise CaptureError("output_token_logprobs of a chunk neither repeat nor continue those before")
        self.rows = list(rows)

    def whole(self) -> dict[str, Any]:
        """:raises CaptureError: new rows cannot be told from repeated ones."""
        if self._uncounted and self._with_rows > 1:
            raise CaptureError(
                "output_token_logprobs came in several chunks without completion_tokens, which tells whether they repeat"
            )
        return {**self._latest, "output_token_logprobs": self.rows} if self._with_rows else self._latest


def _id_at(rows: list[Any], position: int) -> Any:
    try:
        return rows[position][1]
    except (IndexError, TypeError, KeyError):
        return None


@dataclass(slots=True)
class _Native:
    """SGLang's /generate. Its text repeats or continues as its rows do."""

    finished: bool = False
    _body: dict[str, Any] = field(default_factory=dict)
    _texts: list[str] = field(default_factory=list)
    _meta: _MetaInfo = field(default_factory=_MetaInfo)
    _id: Any = None

    def add(self, chunk: Body) -> None:
        """:raises CaptureError: the chunk is of another generation."""
        meta = chunk["meta_info"]
        self._id = self._id or meta.get("id")
        if chunk.get("index") or meta.get("id") not in (None, self._id):
            raise CaptureError("the stream carries several generations; capture needs one (n=1)")
        self._meta.add(meta)
        self._body.update(chunk)
        if isinstance(chunk.get("text"), str):
            self._texts = [chunk["text"]] if self._meta.repeated else [*self._texts, chunk["text"]]
        self.finished = meta.get("finish_reason") is not None

    def whole(self) -> Body:
        body = {**self._body, "text": "".join(self._texts), "meta_info": self._meta.whole()}
        body.pop("output_ids", None)  # of the last part only, or the same again
        return body


@dataclass(slots=True)
class _Choice:
    """One choice's deltas.

    ``_gaps``: carriers that a chunk with text came without. ``_bare_tokens``: a chunk of tokens and no text came, which only
    a server sends that keeps what its parsers swallow. ``_repeats``: inline arrays of a delta began with all before them.
    """

    index: int
    finished: bool = False
    _message: dict[str, Any] = field(default_factory=dict)
    _texts: dict[str, list[str]] = field(default_factory=dict)
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    _arrays: dict[str, Any] = field(default_factory=dict)
    _inline: dict[str, Any] = field(default_factory=dict)
    _logprobs: dict[str, list[Any]] = field(default_factory=dict)
    _meta: _MetaInfo | None = None
    _gaps: set[str] = field(default_factory=set)
    _has_inline: bool = False
    _bare_tokens: bool = False
    _repeats: bool = False

    def add(self, part: Body) -> None:
        """:raises CaptureError: tokens follow the finish reason."""
        if self.finished and part.get("token_ids"):
            raise CaptureError(f"choice {self.index} has tokens after its finish reason")
        delta = part.get("delta")
        if isinstance(delta, Mapping):
            self._add_delta(delta)
        if isinstance(part.get("text"), str):
            self._texts.setdefault("text", []).append(part["text"])
        for name in (PROMPT, ROUTES):
            if part.get(name) is not None:
                self._arrays[name] = part[name]
        if isinstance(part.get("meta_info"), Mapping):
            self._meta = self._meta or _MetaInfo()
            self._meta.add(part["meta_info"])
        _append(self._arrays, part, ("token_ids",))
        logprobs = part.get("logprobs")
        if isinstance(logprobs, Mapping):
            _append(self._logprobs, logprobs, ("content", "token_logprobs", "tokens"))
        self._note_gaps(part)
        if part.get("finish_reason") is not None:
            self._arrays["finish_reason"], self.finished = part["finish_reason"], True

    def _note_gaps(self, part: Body) -> None:
        """Rows of ``meta_info`` are counted, and arrays that come once are whole: these make up for chunks before them."""
        delta = part.get("delta")
        carried = {**(delta if isinstance(delta, Mapping) else {}), **part}
        if carried.get("meta_info") is not None:
            self._gaps.discard("meta_info")
        if carried.get(GENERATION) is not None and not self._has_inline:
            self._gaps.discard(GENERATION)
            self._has_inline = True
        if _says_something(part):
            self._gaps.update(name for name in _CARRIERS if carried.get(name) is None)
        elif part.get("finish_reason") is None and _has_bare_tokens(part):
            self._bare_tokens = True

    def _add_delta(self, delta: Body) -> None:
        for name in _TEXTS:
            if isinstance(delta.get(name), str):
                self._texts.setdefault(name, []).append(delta[name])
        if delta.get("role"):
            self._message["role"] = delta["role"]
        for name in ITEM_FIELDS:
            if name not in _APPENDED and delta.get(name) is not None:
                self._inline[name] = delta[name]
        self._repeats = self._repeats or _begins_with(delta, self._inline)
        _append(self._inline, delta, _APPENDED)
        for call in objects(delta.get("tool_calls")):
            self._add_call(call)

    def _add_call(self, call: Body) -> None:
        index = _index(call.get("index"), len(self._calls))
        whole = self._calls.setdefault(index, {"function": {"arguments": ""}})
        if call.get("id"):
            whole["id"] = call["id"]
        function = call.get("function")
        if isinstance(function, Mapping):
            if function.get("name"):
                whole["function"]["name"] = function["name"]
            if isinstance(function.get("arguments"), str):
                whole["function"]["arguments"] += function["arguments"]

    def whole(self, usage: Any) -> dict[str, Any]:
        """:raises CaptureError: nothing shows that no tokens got lost or came twice."""
        if not is_counted(usage) or type(usage.get("completion_tokens")) is not int:
            self._check_uncounted()
        if self._meta is not None:
            self._arrays["meta_info"] = self._meta.whole()
        texts = {name: "".join(pieces) for name, pieces in self._texts.items()}
        choice: dict[str, Any] = {"index": self.index, **self._arrays, "logprobs": self._logprobs or None}
        if "text" in texts:
            return {**choice, "text": texts["text"]}
        calls = [call for _, call in sorted(self._calls.items())]
        return {**choice, "message": {**self._message, **texts, "tool_calls": calls, **self._inline}}

    def _check_uncounted(self) -> None:
        """Without a usage, only chunks that each carry what they say show that nothing is missing.

        Where a parser of tool calls or reasoning swallows a chunk, some servers drop the chunk with its ids, and the others
        still agree (vLLM issue 27482, until 0.12).
        """
        if "token_ids" in self._arrays:
            carrier = "token_ids"
        elif self._meta is not None:
            carrier = "meta_info"
        elif self._has_inline:
            carrier = GENERATION
        else:
            carrier = "logprobs" if self._logprobs else ""
        if carrier in self._gaps:
            raise CaptureError(
                f"a chunk of the stream has text but no {carrier}, and no usage shows whether tokens are missing "
                "(stream_options.include_usage)"
            )
        parsed = bool(self._calls) or not self._texts.keys().isdisjoint(("reasoning", "reasoning_content"))
        if parsed and carrier in ("token_ids", "logprobs") and not self._bare_tokens:
            raise CaptureError(
                "the stream has tool calls or reasoning, and no usage shows whether their parser swallowed tokens "
                "(stream_options.include_usage)"
            )
        if self._repeats:
            raise CaptureError(
                "deltas repeat the token arrays of earlier ones, and no usage shows how many there are"
            )


def _index(value: Any, default: int) -> int:
    """:raises CaptureError: it is there and no number."""
    if value is None:
        return default
    if type(value) is not int:
        raise CaptureError(f"an index of the stream is {str(value)[:80]!r}, not a number")
    return value


def _says_something(part: Body) -> bool:
    delta = part.get("delta")
    said = delta if isinstance(delta, Mapping) else {}
    return bool(part.get("text") or said.get("tool_calls") or any(said.get(name) for name in _TEXTS))


def _has_bare_tokens(part: Body) -> bool:
    """Ids beside a delta of nothing: not one whose text only ended within a character."""
    delta = part.get("delta")
    said = delta if isinstance(delta, Mapping) else {"content": ""}
    return bool(part.get("token_ids")) and all(said.get(name) is None for name in _TEXTS)


def _begins_with(delta: Body, before: Body) -> bool:
    """Whether a delta's tokens begin with all tokens before, to the log probability."""
    pairs = [(delta.get(name), before.get(name)) for name in (GENERATION, LOG_PROBS)]
    return all(isinstance(new, list) and old and new[: len(old)] == old for new, old in pairs)


def _append(into: dict[str, Any], part: Body, names: tuple[str, ...]) -> None:
    for name in names:
        if isinstance(part.get(name), list):
            into.setdefault(name, []).extend(part[name])


def _failure(chunk: Body) -> str:
    error = chunk.get("error") or (chunk.get("response") or {}).get("error") or chunk
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message)[:200]
