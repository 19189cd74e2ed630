"""Input events of the tokens topic as models.

Token arrays are read-only numpy arrays in memory and one of two encodings on the wire (``arrays``).
Unknown fields are ignored; they stay in the raw record.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializationInfo,
    WithJsonSchema,
    model_validator,
)

from freezepoint_schemas import arrays
from freezepoint_schemas.arrays import FloatArray, TokenArray
from freezepoint_schemas.topics import ROLLOUT_ID_PATTERN

SCHEMA_VERSION: Final = 1
PACKED = {"arrays": "packed"}
"""Serialization context that packs arrays; without it they become JSON arrays."""

_PACKED_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["dtype", "data"],
    "properties": {
        "dtype": {"enum": list(arrays.DTYPES)},
        "data": {"type": "string", "contentEncoding": "base64"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    },
}


def _array_schema(items: dict[str, Any], description: str) -> WithJsonSchema:
    return WithJsonSchema(
        {"description": description, "anyOf": [{"type": "array", "items": items}, _PACKED_SCHEMA]}
    )


def _packs(info: SerializationInfo) -> bool:
    return isinstance(info.context, dict) and info.context.get("arrays") == "packed"


def _tokens_to_wire(values: TokenArray, info: SerializationInfo) -> Any:
    return arrays.pack(values) if _packs(info) else values.tolist()


def _floats_to_wire(values: FloatArray, info: SerializationInfo) -> Any:
    return arrays.pack_floats(values) if _packs(info) else values.tolist()


def _routes_to_wire(values: Any, info: SerializationInfo) -> Any:
    if _packs(info):
        return arrays.pack_routes(values)
    return values.tolist() if isinstance(values, np.ndarray) else values


TokenIds: TypeAlias = Annotated[
    TokenArray,
    PlainValidator(arrays.token_ids),
    PlainSerializer(_tokens_to_wire),
    _array_schema(
        {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "Token ids, int32 and non-negative."
    ),
]
LogProbs: TypeAlias = Annotated[
    FloatArray,
    PlainValidator(arrays.log_probs),
    PlainSerializer(_floats_to_wire),
    _array_schema({"type": "number"}, "Log probabilities of the generated tokens, finite."),
]
RoutedExperts: TypeAlias = Annotated[
    Any,  # an array or nested lists; the validator decides
    PlainValidator(arrays.routed_experts),
    PlainSerializer(_routes_to_wire),
    _array_schema({}, "Experts chosen per token, usually [tokens, layers, top_k]; opaque."),
]

RolloutId: TypeAlias = Annotated[str, Field(pattern=ROLLOUT_ID_PATTERN)]
CallId: TypeAlias = Annotated[str, Field(min_length=1, max_length=1024)]
Item: TypeAlias = dict[str, Any]
Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Reward: TypeAlias = Finite | dict[str, Any]
"""A number, or named components and per-call values as the collector defines them."""


class Event(BaseModel):
    """What all input events share."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", arbitrary_types_allowed=True, protected_namespaces=()
    )

    schema_version: Literal[1] = SCHEMA_VERSION
    rollout_id: RolloutId


class PromptPrefix(BaseModel):
    """The prompt begins with the first ``length`` tokens of an earlier call's prompt plus generation."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    call_id: CallId
    length: Annotated[int, Field(ge=0, le=2**40)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """xxh3-128 in hex over those tokens as little-endian int32."""


def _item_list(value: Any) -> Any:
    return [] if value is None else value


class TokenEntry(Event):
    """One finished model call.

    With ``prompt_prefix`` set, ``prompt_token_ids`` holds only the tokens after that prefix.
    """

    event: Literal["token_entry"] = "token_entry"
    model_call_id: CallId
    model: str = ""
    prompt_token_ids: TokenIds
    prompt_prefix: PromptPrefix | None = None
    generation_token_ids: TokenIds
    generation_log_probs: LogProbs
    routed_experts: RoutedExperts | None = None
    output_items: Annotated[list[Item], FailFast(), BeforeValidator(_item_list)] = Field(default_factory=list)
    token_item_index: Annotated[int, Field(ge=0)] | None = None
    created_at: Finite = 0.0
    parent_call_id: str | None = None
    policy_version: int | str | None = None
    finish_reason: str | None = None
    response_id: str | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenEntry:
        generated, measured = self.generation_token_ids.size, self.generation_log_probs.size
        if generated != measured:
            raise ValueError(f"{generated} generated tokens but {measured} log probabilities")
        if self.token_item_index is not None and self.token_item_index >= len(self.output_items):
            raise ValueError(
                f"token_item_index {self.token_item_index} lies outside {len(self.output_items)} output items"
            )
        return self


class CallIntent(Event):
    """A call is about to be dispatched; if no entry follows, it was lost."""

    event: Literal["call_intent"] = "call_intent"
    model_call_id: CallId


class CallCancelled(Event):
    """Withdraws an intent: the call never generated."""

    event: Literal["call_cancelled"] = "call_cancelled"
    model_call_id: CallId


class CaptureIncomplete(Event):
    """A call of this rollout could not be captured."""

    event: Literal["capture_incomplete"] = "capture_incomplete"
    model_call_id: Annotated[str, Field(max_length=1024)] = ""
    reason: str = ""


class _Grouped(Event):
    """The prompt group a rollout belongs to (GRPO and its kin)."""

    group_id: str | None = None
    group_size: Annotated[int, Field(ge=1)] | None = None


class RolloutComplete(_Grouped):
    """The freeze point: the rollout is over and everything of it has been acknowledged.

    ``builder`` and ``delivery`` choose for this rollout; names unknown to the worker mask it ``builder_failed``. The delivery
    ``per_request`` is the builder of that name, delivered as ``all_traces``.
    """

    event: Literal["rollout_complete"] = "rollout_complete"
    n_calls: Annotated[int, Field(ge=0)] | None = None
    terminal_call_id: str | None = None
    terminal_response_id: str | None = None
    builder: str | None = None
    delivery: str | None = None
    model: str | None = None
    reward: Reward | None = None
    metadata: Any = None


class RolloutCancelled(_Grouped):
    """The rollout was given up: freeze it and publish it masked, so that nobody waits for it."""

    event: Literal["rollout_cancelled"] = "rollout_cancelled"
    reason: str | None = None


class RolloutClear(_Grouped):
    """Forget everything recorded under this id: it is about to be dispatched (again)."""

    event: Literal["rollout_clear"] = "rollout_clear"
    metadata: Any = None


InputEvent: TypeAlias = (
    TokenEntry
    | CallIntent
    | CallCancelled
    | CaptureIncomplete
    | RolloutComplete
    | RolloutCancelled
    | RolloutClear
)

EVENTS: dict[str, type[InputEvent]] = {
    "token_entry": TokenEntry,
    "call_intent": CallIntent,
    "call_cancelled": CallCancelled,
    "capture_incomplete": CaptureIncomplete,
    "rollout_complete": RolloutComplete,
    "rollout_cancelled": RolloutCancelled,
    "rollout_clear": RolloutClear,
}
