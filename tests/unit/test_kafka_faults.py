from typing import Any

import pytest
from aiokafka import errors as kafka
from aiokafka.protocol.metadata import MetadataResponse_v1

from freezepoint.errors import (
    BrokerError,
    BrokerUnavailableError,
    ConfigurationError,
    FencedError,
    FreezepointError,
    PublishError,
)
from freezepoint.transport.kafka.cluster import counts_in
from freezepoint.transport.kafka.faults import one_line, translate, translate_publish


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            kafka.TopicAuthorizationFailedError("t"),
            ConfigurationError,
            "grant this user WRITE and DESCRIBE on topic t",
        ),
        (kafka.TopicAuthorizationFailedError({"b", "a"}), ConfigurationError, "on topic a, b"),
        (kafka.TopicAuthorizationFailedError(), ConfigurationError, "on the topics"),
        (kafka.GroupAuthorizationFailedError("g"), ConfigurationError, "READ on the consumer group"),
        (kafka.TransactionalIdAuthorizationFailed("x"), ConfigurationError, "kafka.transactional_id_prefix"),
        (kafka.ClusterAuthorizationFailedError(), ConfigurationError, "IDEMPOTENT_WRITE on the cluster"),
        (kafka.SaslAuthenticationFailed(None), ConfigurationError, "kafka.sasl_password"),
        (kafka.InvalidTransactionTimeout(), ConfigurationError, "transaction.max.timeout.ms"),
        (kafka.UnknownTopicOrPartitionError(), BrokerUnavailableError, "while sending to t"),
        (kafka.KafkaConnectionError("no\nway"), BrokerUnavailableError, "no way"),
        (TimeoutError(), BrokerUnavailableError, "no answer from the broker while sending to t"),
        (ConnectionResetError(), BrokerUnavailableError, "no answer"),
        (kafka.KafkaError("odd"), BrokerError, "odd"),
        (AssertionError("Did we\nnot?"), BrokerUnavailableError, "while sending to t (Did we not?)"),
        (AssertionError(), BrokerUnavailableError, "while sending to t"),
    ],
)
def test_the_clients_errors_become_ours_in_one_line(
    error: Exception, kind: type[FreezepointError], words: str
) -> None:
    ours = translate(error, "sending to t")
    assert type(ours) is kind
    assert words in str(ours)
    assert "\n" not in str(ours)
    assert "AssertionError" not in str(ours)


def test_reading_asks_for_the_right_to_read() -> None:
    assert "grant this user READ and DESCRIBE on topic t" in str(
        translate(kafka.TopicAuthorizationFailedError("t"), "reading t")
    )


def test_our_own_errors_pass() -> None:
    ours = BrokerError("as it is")
    assert translate(ours, "doing") is ours


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (kafka.ProducerFenced(), FencedError),
        (kafka.InvalidProducerEpoch(), FencedError),
        (kafka.KafkaConnectionError(), PublishError),
        (kafka.KafkaError("unexpected"), PublishError),
        (TimeoutError(), PublishError),
        (kafka.InvalidTxnState(), PublishError),
        (kafka.TopicAuthorizationFailedError("t"), ConfigurationError),
        (kafka.UnknownTopicOrPartitionError(), PublishError),
        (AssertionError("state"), PublishError),
        (kafka.IllegalOperation("not in transaction"), PublishError),
    ],
)
def test_a_transaction_that_failed_is_fenced_refused_or_unknown(
    error: Exception, kind: type[FreezepointError]
) -> None:
    assert type(translate_publish(error, "publishing")) is kind


BROKER = (1, "host", 9092, None)


def answer(brokers: list[Any], **codes: int) -> Any:
    partitions = [(0, number, 1, [1], [1]) for number in range(3)]
    topics = [(code, name, False, [] if code else partitions) for name, code in codes.items()]
    return MetadataResponse_v1(brokers, 1, topics)


def test_only_a_broker_that_knows_its_cluster_tells_what_is_missing() -> None:
    unknown, unready = kafka.UnknownTopicOrPartitionError.errno, kafka.LeaderNotAvailableError.errno
    assert counts_in(answer([BROKER], there=0, missing=unknown)) == {"there": 3}
    assert counts_in(answer([], there=0, missing=unknown)) is None
    assert counts_in(answer([BROKER], there=unready)) is None
    with pytest.raises(kafka.TopicAuthorizationFailedError):
        counts_in(answer([BROKER], hidden=kafka.TopicAuthorizationFailedError.errno))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (kafka.KafkaConnectionError("no\nway"), "KafkaConnectionError: no way"),
        (kafka.KafkaConnectionError(), "KafkaConnectionError"),
        (OSError("gone"), "OSError: gone"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_the_kind_of_an_error_is_said_once(error: Exception, line: str) -> None:
    assert one_line(error) == line
