"""The result record: one per frozen rollout, flat and linear in its tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from freezepoint_schemas.events import SCHEMA_VERSION, LogProbs, Reward, RolloutId, RoutedExperts, TokenIds
from freezepoint_schemas.reasons import Reason


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="ignore", arbitrary_types_allowed=True, protected_namespaces=()
    )


class SnapshotInfo(_Part):
    """Which frozen log this result is of.

    ``id`` is equal for equal content. ``version`` counts the distinct facts of the log and its freeze. A repeat of
    the same result is recognised by (rollout_id, ``partition``, ``freeze_offset``).
    """

    id: str
    version: int
    partition: int
    first_offset: int
    freeze_offset: int


class Span(_Part):
    """Tokens ``start`` (inclusive) to ``end`` (exclusive) of a trace: one call's generation."""

    call_id: str
    start: int
    end: int
    policy_version: int | str | None = None


class RoutePatch(_Part):
    """A call's routed experts as what differs from its trace's: the first ``rows`` rows, with ``values`` at ``index``."""

    rows: int
    index: TokenIds | None = None
    values: RoutedExperts | None = None


class TraceItem(_Part):
    """The output items of one call whose generation this trace owns.

    ``routed_experts`` holds the call's values as they came, where they are no aligned integer array;
    ``routed_patch`` stands instead of it where the trace holds the aligned rows.
    """

    call_id: str
    output_items: list[dict[str, Any]] = Field(default_factory=list)
    token_item_index: int | None = None
    routed_experts: RoutedExperts | None = None
    routed_patch: RoutePatch | None = None


class Trace(_Part):
    """One token sequence to train on.

    ``token_ids``: int32 [n], every token once. ``spans``: the ranges that were sampled and are owned here, in order
    (the loss mask). ``log_probs``: float64 [sum of span lengths], theirs alone, in span order. ``shared``: ranges
    sampled by calls that an earlier trace of this result owns; context here. ``routed_experts``: integers
    [n, layers, top_k] where every call's rows fit its tokens.
    """

    trace_id: str
    role: Annotated[str, Field(pattern=r"^(main|branch-\d+|req-\d+)$")]
    token_ids: TokenIds
    log_probs: LogProbs
    spans: list[Span]
    shared: list[Span] = Field(default_factory=list)
    items: list[TraceItem] = Field(default_factory=list)
    routed_experts: RoutedExperts | None = None


class Result(_Part):
    """One frozen rollout: a trajectory or a masked failure.

    ``metrics`` has exactly the reference's keys, everything else stands under ``diagnostics``.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    rollout_id: RolloutId
    mask_sample: bool
    reasons: list[Reason] = Field(default_factory=list)
    error: str | None = None
    builder: str
    delivery: str
    model: str = ""
    snapshot: SnapshotInfo
    traces: list[Trace] = Field(default_factory=list)
    metrics: dict[str, Any] = Field(default_factory=dict)
    unresolved_retries: list[str] = Field(default_factory=list)
    diagnostics: dict[str, Any] = Field(default_factory=dict)
    reward: Reward | None = None
    group_id: str | None = None
    group_size: int | None = None
    metadata: Any = None
