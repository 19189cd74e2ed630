import pytest
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
from freezepoint.transport.kafka.faults import translate, translate_publish


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
        (kafka.UnknownTopicOrPartitionError(), MissingTopicError, "freezepoint topics apply"),
        (kafka.KafkaConnectionError("no\nway"), BrokerUnavailableError, "no way"),
        (TimeoutError(), BrokerUnavailableError, "no answer from the broker while sending to t"),
        (ConnectionResetError(), BrokerUnavailableError, "no answer"),
        (kafka.KafkaError("odd"), BrokerError, "odd"),
        (AssertionError("state"), BrokerError, "state"),
    ],
)
def test_the_clients_errors_become_ours_in_one_line(
    error: Exception, kind: type[FreezepointError], words: str
) -> None:
    ours = translate(error, "sending to t")
    assert type(ours) is kind
    assert words in str(ours)
    assert "\n" not in str(ours)


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
        (kafka.UnknownTopicOrPartitionError(), MissingTopicError),
    ],
)
def test_a_transaction_that_failed_is_fenced_refused_or_unknown(
    error: Exception, kind: type[FreezepointError]
) -> None:
    assert type(translate_publish(error, "publishing")) is kind
