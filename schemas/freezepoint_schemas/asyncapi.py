"""The AsyncAPI 3 document: topics as channels, records as messages, the worker as the application.

Self-contained: it refers to nothing outside itself, so that a registry or a generator needs this one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from freezepoint_schemas import headers
from freezepoint_schemas.events import EVENTS, SCHEMA_VERSION
from freezepoint_schemas.ledger import CARRY_MARK, PROGRESS_KEY
from freezepoint_schemas.models import RECORDS
from freezepoint_schemas.reasons import DeadLetterReason, Reason
from freezepoint_schemas.topics import ROLLOUT_ID_PATTERN, Topic, TopicNames, TopicSpec, topic_specs

ASYNCAPI_VERSION: Final = "3.0.0"
KAFKA_BINDING: Final = "0.5.0"
REFERENCE: Final = "#/components/schemas/{model}"

SchemaOf = Callable[..., dict[str, Any]]
"""A model's JSON Schema; takes pydantic's ``ref_template``."""

_ROLLOUT_KEY: Final = {"type": "string", "pattern": ROLLOUT_ID_PATTERN, "description": "The rollout id."}
_TEXT: Final = {"type": "string"}
_TOMBSTONE: Final = "rollout_clear_tombstone"
_CHUNK: Final = "carried_chunk"
_DEAD_LETTER: Final = "dead_letter"

_CHANNELS: Final[dict[Topic, tuple[str, tuple[str, ...]]]] = {
    Topic.TOKENS: (
        "Token entries and the events of a rollout. All records of a rollout lie on the partition that murmur2 "
        "gives their key; a value above the topic's limit is split into parts.",
        (*EVENTS, _TOMBSTONE),
    ),
    Topic.TRAJECTORIES: (
        "One result for each frozen rollout, written in transactions: read it with isolation.level=read_committed.",
        ("result",),
    ),
    Topic.LEDGER: (
        "What is decided about each rollout, and how far each partition has come. The worker's own; for operators to read.",
        ("ledger_record", "progress_record", _CHUNK),
    ),
    Topic.DEAD_LETTERS: (
        "Records that could not be used, raw, with the reason in their headers.",
        (_DEAD_LETTER,),
    ),
}

_OPERATIONS: Final = (
    ("consume", "receive", Topic.TOKENS, "Reads what model servers and rollout collectors write."),
    ("publishResults", "send", Topic.TRAJECTORIES, "Publishes exactly one result for each frozen rollout."),
    ("restore", "receive", Topic.LEDGER, "Reads what is decided when it takes a partition over."),
    ("decide", "send", Topic.LEDGER, "Writes decisions in the same transaction as what they decide."),
    ("setAside", "send", Topic.DEAD_LETTERS, "Sets records aside that could not be used."),
)


def document(schema_of: SchemaOf) -> dict[str, Any]:
    """The document for the topics' default names."""
    return {
        "asyncapi": ASYNCAPI_VERSION,
        "info": {
            "title": "freezepoint",
            "version": f"{SCHEMA_VERSION}.0.0",
            "description": "Token events of RL rollouts in, exactly one result per rollout out. "
            "The application is the worker; a prefix setting renames all topics.",
        },
        "defaultContentType": "application/json",
        "channels": {spec.topic.value: _channel(spec) for spec in topic_specs(TopicNames(), 1)},
        "operations": {
            name: {
                "action": action,
                "channel": {"$ref": f"#/channels/{topic.value}"},
                "summary": summary,
            }
            for name, action, topic, summary in _OPERATIONS
        },
        "components": {
            "messages": {**_record_messages(), **_other_messages()},
            "schemas": _schemas(schema_of),
        },
    }


def _channel(spec: TopicSpec) -> dict[str, Any]:
    description, messages = _CHANNELS[spec.topic]
    config: dict[str, Any] = {
        "cleanup.policy": spec.config["cleanup.policy"].split(","),
        "retention.ms": int(spec.config["retention.ms"]),
    }
    return {
        "address": spec.name,
        "description": description,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
        "bindings": {"kafka": {"topicConfiguration": config, "bindingVersion": KAFKA_BINDING}},
    }


def _record_messages() -> dict[str, Any]:
    may_have: dict[str, tuple[str, ...]] = dict.fromkeys(EVENTS, (headers.PART, headers.REPLAYED))
    may_have["rollout_clear"] = (headers.REPLAYED,)
    may_have["result"] = (headers.PART,)
    keys = {"progress_record": {"const": PROGRESS_KEY.decode()}}
    return {
        name: _message(
            name,
            model.__doc__ or "",
            {"$ref": REFERENCE.format(model=model.__name__)},
            key=keys.get(name, _ROLLOUT_KEY),
            names=may_have.get(name, ()),
        )
        for name, model in RECORDS.items()
    }


def _other_messages() -> dict[str, Any]:
    mark = CARRY_MARK.decode()
    reasons = [code.value for code in (*Reason, *DeadLetterReason)]
    letter_headers = (
        headers.ERROR_TOPIC,
        headers.ERROR_PARTITION,
        headers.ERROR_OFFSET,
        headers.ERROR_CLASS,
        headers.ERROR_MESSAGE,
        headers.ORIGINAL_SIZE,
        headers.ORIGINAL_PART,
    )
    letter = _message(_DEAD_LETTER, "The raw record, key and headers included.", {}, names=letter_headers)
    letter["contentType"] = "application/octet-stream"
    letter["headers"]["required"] = list(letter_headers[:5])
    letter["headers"]["properties"][headers.ERROR_CLASS] = {"enum": reasons}
    chunk_key = {"type": "string", "description": f"<rollout_id>{mark}<generation>.<chunk>"}
    chunk = _message(_CHUNK, "A piece of an open rollout's log; opaque to others.", {}, key=chunk_key)
    chunk["contentType"] = "application/octet-stream"
    clear = "A null value is a rollout_clear."
    return {
        _TOMBSTONE: _message(_TOMBSTONE, clear, {"type": "null"}, key=_ROLLOUT_KEY),
        _CHUNK: chunk,
        _DEAD_LETTER: letter,
    }


def _message(
    name: str, summary: str, payload: Any, *, key: Any = None, names: Iterable[str] = ()
) -> dict[str, Any]:
    """``names``: headers it may have, all of them text in UTF-8."""
    said = dict.fromkeys(names, _TEXT)
    message: dict[str, Any] = {
        "name": name,
        "summary": " ".join(summary.partition("\n\n")[0].split()),
        "payload": payload,
        **({"headers": {"type": "object", "properties": said}} if said else {}),
    }
    if key is not None:
        message["bindings"] = {"kafka": {"key": key, "bindingVersion": KAFKA_BINDING}}
    return message


def _schemas(schema_of: SchemaOf) -> dict[str, Any]:
    """Each model's schema, and those it refers to, side by side."""
    schemas: dict[str, Any] = {}
    for model in RECORDS.values():
        schema = schema_of(model, ref_template=REFERENCE)
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    return schemas
