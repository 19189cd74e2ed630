"""Which brokers do."""

from __future__ import annotations

import pytest

from freezepoint.transport.kafka.versions import OPERATING, WORKING, Need, missing, refusal, release

KAFKA_4 = dict.fromkeys(range(90), (0, 20)) | {0: (3, 12)}
KAFKA_2_4 = dict.fromkeys(range(48), (0, 11))
KAFKA_1_0 = dict.fromkeys(range(38), (0, 6)) | {19: (0, 2), 3: (0, 5)}
KAFKA_0_10 = dict.fromkeys(range(19), (0, 2))


@pytest.mark.parametrize("versions", [KAFKA_4, KAFKA_2_4, KAFKA_1_0])
def test_a_broker_with_transactions_is_worked_with(versions: dict[int, tuple[int, int]]) -> None:
    assert refusal(versions) is None


def test_an_older_one_is_refused_with_what_it_lacks() -> None:
    why = refusal(KAFKA_0_10)
    assert why is not None
    assert "older than Kafka 0.11" in why
    assert "transactions" in why
    assert "Update it to" in why


@pytest.mark.parametrize("need", WORKING, ids=lambda need: need.what)
def test_each_need_counts_by_itself(need: Need) -> None:
    first, _ = KAFKA_4[need.api_key]
    assert need.what in (refusal({key: value for key, value in KAFKA_4.items() if key != need.api_key}) or "")
    if need.version:
        older = KAFKA_4 | {need.api_key: (first, need.version - 1)}
        assert need.what in (refusal(older) or "")


def test_what_operators_miss_is_listed_and_not_refused() -> None:
    assert [need.release for need in missing(KAFKA_1_0, OPERATING)] == ["2.4", "2.3", "2.3"]
    assert missing(KAFKA_4, OPERATING) == []


def test_the_release_is_told_by_what_it_brought() -> None:
    assert release(KAFKA_4) == "Kafka 4.0 or newer"
    assert release(KAFKA_2_4) == "Kafka 2.4 or newer"
    assert release(KAFKA_1_0) == "Kafka 0.11 or newer"
