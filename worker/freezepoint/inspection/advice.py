"""What each reason means for people, and what can be done about it."""

from __future__ import annotations

from freezepoint_schemas.reasons import NotDelivered, Reason

MEANINGS: dict[Reason, str] = {
    Reason.NO_RECORDS: "the rollout completed and no call of it was recorded: is the capture switched on, and the rollout id the same everywhere?",
    Reason.CAPTURE_INCOMPLETE: "a call could not be captured, a part of a record never came, or the call named as the last is not recorded",
    Reason.DANGLING_INTENT: "a call was announced and neither recorded nor cancelled",
    Reason.CALL_COUNT_MISMATCH: "the complete event counts another number of calls than were recorded",
    Reason.CONFLICTING_ENTRY: "two different payloads came under one call id: ids must be unique, or the rollout be cleared before it is dispatched again",
    Reason.PREFIX_UNRESOLVED: "a prompt refers to a call that is not recorded, or to more tokens than it has",
    Reason.PREFIX_MISMATCH: "a prompt refers to tokens that are others than the ones recorded",
    Reason.UNSUPPORTED_SCHEMA: "a record is of a newer schema version: update the worker first",
    Reason.UNDECODABLE_RECORD: "a record is no JSON object or of no known event; the dead letters have it",
    Reason.FOREIGN_RECORD: "a record's body names another rollout than its key; the dead letters have it",
    Reason.INVALID_ENTRY: "a record failed validation; the dead letters have it, with the reason",
    Reason.ROLLOUT_TOO_LARGE: "a record or the whole rollout is above the worker's limits",
    Reason.INPUT_EXPIRED: "the topic's retention removed records before they were read",
    Reason.UNRESOLVED_RETRY: "calls with one prompt were sampled several times, and nothing tells which one counted",
    Reason.MULTIPLE_ROOTS: "there is not exactly one first call",
    Reason.MULTIPLE_CHAINS: "there is not exactly one chain of calls",
    Reason.NO_SAFE_CHAIN: "no chain is known to be the right one: every one crosses an ambiguous call, or the last call is not safely known",
    Reason.NO_TRAINABLE_TOKENS: "nothing was generated that could be trained on",
    Reason.ROUTES_MISMATCH: "routed experts are not one row per token",
    Reason.BUILDER_NOT_DELIVERABLE: "the builder returns several trajectories and the delivery takes one",
    Reason.BUILDER_FAILED: "the build failed, or its builder or delivery is unknown to the worker",
    Reason.ROLLOUT_TIMEOUT: "no record came for longer than the worker waits",
    Reason.ROLLOUT_CANCELLED: "the collector gave the rollout up",
}

ASIDE: dict[NotDelivered, str] = {
    NotDelivered.AMBIGUOUS_PARENT: "continues several calls with the same tokens; parent_call_id would tell which",
    NotDelivered.SUPERSEDED_RETRY: "a retry that was not kept",
    NotDelivered.QUARANTINED_ANCESTOR: "descends from a call that was set aside",
    NotDelivered.AFTER_TERMINAL: "follows the call that the rollout ended with",
    NotDelivered.EMPTY_GENERATION: "generated nothing",
    NotDelivered.PREFIX_UNRESOLVED: "its prompt refers to what is not recorded",
    NotDelivered.PREFIX_MISMATCH: "its prompt refers to other tokens than the recorded ones",
}
