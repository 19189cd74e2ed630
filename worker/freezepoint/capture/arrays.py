"""The token arrays of one generation, wherever a server put them. Nothing is computed: what is missing is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from freezepoint.errors import CaptureError

Body: TypeAlias = Mapping[str, Any]

PROMPT, GENERATION, LOG_PROBS, ROUTES = (
    "prompt_token_ids",
    "generation_token_ids",
    "generation_log_probs",
    "routed_experts",
)
REQUIRED = (PROMPT, GENERATION, LOG_PROBS)
ITEM_FIELDS = (*REQUIRED, ROUTES)
"""What a message or output item may carry inline; nothing of it stays in an entry's output items."""

_TOKEN_ID = re.compile(r"token_id:(\d+)")
HOW_TO_ASK = (
    "ask the server for them (vLLM: return_token_ids and logprobs; SGLang: logprobs, return_meta_info and "
    "return_prompt_token_ids, or return_logprob with logprob_start_len 0 on /generate)"
)


LOG_PROB_MIN = -9999.0
"""What vLLM writes for a lower one, since JSON knows no infinity, and for one that it does not have."""
LOG_PROB_TOLERANCE = 1e-3
"""Two places write the same number with other precision."""


@dataclass(slots=True)
class Found:
    """Token arrays and where each was found. A second place, and every count, must say the same as the first."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    counts: list[tuple[str, int, str]] = field(default_factory=list)

    def add(self, name: str, value: Any, place: str) -> None:
        """:raises CaptureError: another place said otherwise."""
        if value is None:
            return
        if name not in self.values:
            self.values[name], self.places[name] = value, place
        elif not _same(name, self.values[name], value):
            raise CaptureError(
                f"{self.places[name]} and {place} carry {_difference(self.values[name], value)} {name}"
            )

    def count(self, name: str, number: Any, place: str) -> None:
        """How many of them the server says there are; what is no number says nothing."""
        if type(number) is int:
            self.counts.append((name, number, place))

    def checked(self) -> dict[str, Any]:
        """All of the arrays.

        :raises CaptureError: none, or not all of them; no prompt; or lengths that contradict one another or a count.
        """
        if self.values.get(GENERATION) == []:
            self.values.setdefault(LOG_PROBS, [])  # servers leave out the log probabilities of nothing
        missing = [name for name in REQUIRED if name not in self.values]
        if len(missing) == len(REQUIRED):
            raise CaptureError(f"the response carries no token ids; {HOW_TO_ASK}")
        if missing:
            have = ", ".join(f"{name} ({self.places[name]})" for name in REQUIRED if name in self.values)
            raise CaptureError(f"partial token metadata: {have}, but no {', '.join(missing)}; {HOW_TO_ASK}")
        for name in REQUIRED:
            if not isinstance(self.values[name], list):
                raise CaptureError(f"{name} in {self.places[name]} is no list")
        tokens, log_probs = len(self.values[GENERATION]), len(self.values[LOG_PROBS])
        if tokens != log_probs:
            raise CaptureError(
                f"{tokens} generated tokens in {self.places[GENERATION]}, but {log_probs} log probabilities in "
                f"{self.places[LOG_PROBS]}"
            )
        if LOG_PROB_MIN in self.values[LOG_PROBS]:
            raise CaptureError(
                f"{self.places[LOG_PROBS]} says {LOG_PROB_MIN} for generated token "
                f"{self.values[LOG_PROBS].index(LOG_PROB_MIN)}: a placeholder, not what it was sampled with"
            )
        if not self.values[PROMPT]:
            raise CaptureError(f"{PROMPT} in {self.places[PROMPT]} is empty")
        for name, counted, place in self.counts:
            if len(self.values[name]) != counted:
                raise CaptureError(
                    f"{len(self.values[name])} {_COUNTED[name]} tokens in {self.places[name]}, but {place} says {counted}"
                )
        return self.values


def objects(value: Any) -> list[Body]:
    """The objects of a list; where there is no list, none."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list | tuple) else []


_TOTALS = ("prompt_tokens", "input_tokens", "completion_tokens", "output_tokens")
_COUNTED = {PROMPT: "prompt", GENERATION: "generated"}


def count_usage(found: Found, usage: Any) -> None:
    """Both APIs' names; reasoning tokens and cached prompt tokens are details of the same totals.

    Where ``meta_info`` gave the engine's own count of the prompt, the usage may be told without the chat template's tail.
    """
    if not is_counted(usage):
        return
    for name in ("completion_tokens", "output_tokens"):
        found.count(GENERATION, usage.get(name), f"usage.{name}")
    if all(counted != PROMPT for counted, _, _ in found.counts):
        for name in ("prompt_tokens", "input_tokens"):
            found.count(PROMPT, usage.get(name), f"usage.{name}")


def is_counted(usage: Any) -> bool:
    """Whether a usage says anything: one of nothing but zeros is a server's that does not count, for no prompt is empty."""
    return isinstance(usage, Mapping) and any(usage.get(name) != 0 for name in _TOTALS if name in usage)


def carries(item: Any) -> bool:
    """Whether a message or output item carries token arrays of its own, all or some."""
    return isinstance(item, Mapping) and any(item.get(name) is not None for name in REQUIRED)


def from_item(found: Found, item: Body, place: str) -> None:
    """The arrays of a message or output item, as NeMo Gym's model servers return them."""
    for name in ITEM_FIELDS:
        found.add(name, item.get(name), place)


def from_choice(found: Found, choice: Body, response: Body, place: str) -> None:
    """The arrays of a choice: vLLM's ``token_ids`` and ``logprobs``, SGLang's ``meta_info``."""
    found.add(GENERATION, choice.get("token_ids"), f"{place}.token_ids")
    found.add(ROUTES, choice.get(ROUTES), f"{place}.{ROUTES}")
    found.add(PROMPT, choice.get(PROMPT), f"{place}.{PROMPT}")
    found.add(PROMPT, response.get(PROMPT), PROMPT)
    from_meta_info(found, choice.get("meta_info"), f"{place}.meta_info")
    _from_logprobs(found, choice.get("logprobs"), f"{place}.logprobs")
    extension = response.get("sglext")
    if isinstance(extension, Mapping):
        found.add(ROUTES, extension.get(ROUTES), f"sglext.{ROUTES}")


def from_meta_info(found: Found, meta: Any, place: str) -> None:
    """SGLang's ``meta_info``: lists of ``[logprob, token id, text]``.

    The prompt's list is whole only where logprobs were asked for from its first token on, which ``prompt_tokens`` shows.
    """
    if not isinstance(meta, Mapping):
        return
    output = meta.get("output_token_logprobs")
    if output is not None:
        where = f"{place}.output_token_logprobs"
        found.add(GENERATION, _column(output, 1, where), where)
        found.add(LOG_PROBS, _measured(_column(output, 0, where), where), where)
    found.add(ROUTES, meta.get(ROUTES), f"{place}.{ROUTES}")
    found.add(PROMPT, meta.get(PROMPT), f"{place}.{PROMPT}")
    found.add(PROMPT, meta.get("input_token_ids"), f"{place}.input_token_ids")
    if meta.get("input_token_logprobs"):
        _from_input(found, meta, f"{place}.input_token_logprobs")
    found.count(PROMPT, meta.get("prompt_tokens"), f"{place}.prompt_tokens")
    found.count(GENERATION, meta.get("completion_tokens"), f"{place}.completion_tokens")


def _from_input(found: Found, meta: Body, where: str) -> None:
    """The prompt, where the list is whole; where it is not, the end of a prompt that another place gave."""
    ids, counted = _column(meta["input_token_logprobs"], 1, where), meta.get("prompt_tokens")
    if counted is not None and len(ids) == counted:
        found.add(PROMPT, ids, where)
    elif PROMPT not in found.values:
        of = "an unknown number of (no prompt_tokens)" if counted is None else counted
        raise CaptureError(f"{where} holds {len(ids)} of {of} prompt tokens; ask with logprob_start_len 0")
    elif isinstance(found.values[PROMPT], list) and found.values[PROMPT][-len(ids) :] != ids:
        raise CaptureError(f"{found.places[PROMPT]} and {where} carry different {PROMPT}")


def _from_logprobs(found: Found, logprobs: Any, place: str) -> None:
    if not isinstance(logprobs, Mapping):
        return
    content = logprobs.get("content")
    names: Any
    if isinstance(content, list):
        values = [token.get("logprob") if isinstance(token, Mapping) else None for token in content]
        names = [token.get("token") if isinstance(token, Mapping) else None for token in content]
    elif isinstance(logprobs.get("token_logprobs"), list):
        values, names = logprobs["token_logprobs"], logprobs.get("tokens")
    else:
        return
    found.add(LOG_PROBS, _measured(values, place), place)
    found.add(GENERATION, _named_ids(names), place)


def _named_ids(names: Any) -> list[int] | None:
    """Ids that vLLM writes in the place of token texts (``return_tokens_as_token_ids``), None where these are texts."""
    if not isinstance(names, list):
        return None
    matches = [_TOKEN_ID.fullmatch(name) if isinstance(name, str) else None for name in names]
    ids = [int(match[1]) for match in matches if match is not None]
    return ids if ids and len(ids) == len(matches) else None


def _column(rows: Any, index: int, place: str) -> list[Any]:
    try:
        return [row[index] for row in rows]
    except (TypeError, IndexError, KeyError):
        raise CaptureError(f"{place} is not made of [logprob, token id, text]") from None


def _measured(values: list[Any], place: str) -> list[Any]:
    for position, value in enumerate(values):
        if value is None:
            raise CaptureError(f"{place} has no log probability for generated token {position}")
    return values


def _difference(first: Any, second: Any) -> str:
    if isinstance(first, list) and isinstance(second, list) and len(first) != len(second):
        return f"{len(first)} and {len(second)}"
    return "different"


def _same(name: str, first: Any, second: Any) -> bool:
    if name == ROUTES and (type(first) is not type(second) or not isinstance(first, list | str)):
        return True  # other encodings of what may be the same
    if name != LOG_PROBS or not isinstance(first, list) or not isinstance(second, list):
        return bool(first == second)
    return len(first) == len(second) and _all_close(first, second)


def _all_close(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Clamped and rounded alike: servers do so in one of the places only."""
    try:
        return all(
            math.isclose(
                max(a, LOG_PROB_MIN),
                max(b, LOG_PROB_MIN),
                rel_tol=LOG_PROB_TOLERANCE,
                abs_tol=LOG_PROB_TOLERANCE,
            )
            for a, b in zip(first, second, strict=True)
        )
    except TypeError:
        return first == second
