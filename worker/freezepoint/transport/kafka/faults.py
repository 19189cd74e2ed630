"""What the client raised, in our terms: who is to blame and what to do about it, in one line."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from aiokafka import errors as kafka

from freezepoint.errors import (
    BrokerError,
    BrokerUnavailableError,
    ConfigurationError,
    FencedError,
    FreezepointError,
    MissingTopicError,
    PublishError,
)

UNREACHABLE = (
    TimeoutError,
    OSError,
    kafka.KafkaConnectionError,
    kafka.KafkaTimeoutError,
    kafka.RequestTimedOutError,
    kafka.NodeNotReadyError,
    kafka.NoBrokersAvailable,
    kafka.KafkaUnavailableError,
    kafka.StaleMetadata,
    kafka.LeaderNotAvailableError,
    kafka.NotLeaderForPartitionError,
    kafka.GroupCoordinatorNotAvailableError,
    kafka.NotCoordinatorForGroupError,
    kafka.NotEnoughReplicasError,
    kafka.NotEnoughReplicasAfterAppendError,
)
CLIENT_ERRORS = (kafka.KafkaError, kafka.IllegalOperation, TimeoutError, OSError, AssertionError)
"""What aiokafka raises for the broker's faults. It asserts its own state: a producer that died asserts, and a client that was
told of no broker does."""

FENCING = (kafka.ProducerFenced, kafka.InvalidProducerEpoch)


def missing_topic(name: str) -> MissingTopicError:
    return MissingTopicError(f"topic {name} does not exist; create it: freezepoint topics apply")


def translate(error: BaseException, doing: str) -> FreezepointError:
    """Our error for one of the client's; ``doing`` completes "while ..." and names topic, group or partition.

    A topic that the client does not know is none that is missing: it also says so when nobody answers it for long enough.
    ``Cluster.partition_counts`` asks, and tells.
    """
    if isinstance(error, FreezepointError):
        return error
    refused = _refused(error, doing)
    if refused is not None:
        return refused
    if isinstance(error, kafka.UnknownTopicOrPartitionError):
        return BrokerUnavailableError(f"the broker did not tell where the topic is while {doing}")
    if isinstance(error, AssertionError):
        return BrokerUnavailableError(
            f"the client lost the broker while {doing} ({_text(error) or 'no reason given'})"
        )
    if isinstance(error, UNREACHABLE):
        return BrokerUnavailableError(f"no answer from the broker while {doing}: {one_line(error)}")
    return BrokerError(f"the broker failed while {doing}: {one_line(error)}")


def translate_publish(error: BaseException, doing: str) -> FreezepointError:
    """As :func:`translate`, for a transaction: all but a refusal leaves its outcome unknown."""
    if isinstance(error, FENCING):
        return FencedError(f"another owner started, or the broker timed the transaction out, while {doing}")
    translated = translate(error, doing)
    if isinstance(translated, BrokerError) and not isinstance(translated, PublishError):
        return PublishError(str(translated))
    return translated


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Everything the client raises inside leaves as one of our errors."""
    try:
        yield
    except CLIENT_ERRORS as error:
        raise translate(error, doing) from error


def one_line(error: BaseException) -> str:
    """Its kind and what it says; aiokafka's errors say their kind themselves."""
    kind = type(error).__name__
    text = _text(error).removeprefix(kind).removeprefix(": ")
    return f"{kind}: {text}" if text else kind


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())


REFUSALS: tuple[tuple[type[Exception], str], ...] = (
    (
        kafka.TopicAuthorizationFailedError,
        "not authorized while {doing}: grant this user {rights} on {topics}",
    ),
    (
        kafka.GroupAuthorizationFailedError,
        "not authorized while {doing}: grant this user READ on the consumer group",
    ),
    (
        kafka.TransactionalIdAuthorizationFailed,
        "not authorized while {doing}: grant this user WRITE on the transactional ids kafka.transactional_id_prefix begins",
    ),
    (
        kafka.ClusterAuthorizationFailedError,
        "not authorized while {doing}: grant this user WRITE on the topics it sends to (before Kafka 2.8: IDEMPOTENT_WRITE on the cluster)",
    ),
    (
        kafka.SaslAuthenticationFailed,
        "the broker refused the credentials: check kafka.sasl_mechanism, kafka.sasl_username and kafka.sasl_password",
    ),
    (
        kafka.UnsupportedSaslMechanismError,
        "the broker does not offer kafka.sasl_mechanism: choose one of its sasl.enabled.mechanisms",
    ),
    (
        kafka.InvalidTransactionTimeout,
        "kafka.transaction_timeout_ms is above the broker's transaction.max.timeout.ms: lower the one or raise the other",
    ),
    (
        kafka.InvalidSessionTimeoutError,
        "kafka.session_timeout_ms is outside the broker's group.min/max.session.timeout.ms: move it inside",
    ),
    (
        kafka.InconsistentGroupProtocolError,
        "the consumer group is used by another kind of consumer, seen while {doing}: choose another worker.group",
    ),
)
"""A right that is missing, or a setting that the broker does not accept: no retry helps."""


RIGHTS = (
    ("publishing", "WRITE and DESCRIBE"),
    ("sending", "WRITE and DESCRIBE"),
    ("describing", "DESCRIBE"),
    ("creating", "CREATE"),
    ("altering", "ALTER_CONFIGS"),
    ("comparing", "DESCRIBE_CONFIGS"),
)
"""On a topic, by what we were doing; else we were reading."""


def _refused(error: BaseException, doing: str) -> ConfigurationError | None:
    for kind, message in REFUSALS:
        if isinstance(error, kind):
            return ConfigurationError(
                message.format(doing=doing, rights=_rights(doing), topics=_topics(error))
            )
    return None


def _topics(error: BaseException) -> str:
    """The client hands over a name, or a set of names, as the error's only argument."""
    named = error.args[0] if error.args else None
    if isinstance(named, str):
        return f"topic {named}"
    if isinstance(named, Collection):
        return f"topic {', '.join(sorted(str(name) for name in named))}"
    return "the topics"


def _rights(doing: str) -> str:
    return next((rights for begin, rights in RIGHTS if doing.startswith(begin)), "READ and DESCRIBE")
