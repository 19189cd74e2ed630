"""What only Kafka can do to a subscription: open and aborted transactions, and retention ahead of a reader."""

from freezepoint.transport.kafka import KafkaTransport
from freezepoint.transport.ports import StartAt, Subscription
from freezepoint_schemas.topics import Topic
from tests.integration.kafka_kit import JOIN_S, open_transaction, owner, result, transport
from tests.polling import poll_until_async


async def read_to_end(subscription: Subscription) -> list[bytes]:
    """What comes until everything that is committed was read."""
    values: list[bytes] = []

    async def done() -> bool:
        feed = await subscription.poll(0.1, 100)
        values.extend(record.value or b"" for records in feed.records.values() for record in records)
        return not feed.records and await subscription.caught_up()

    await poll_until_async(done, JOIN_S, "caught up")
    return values


async def subscribe(made: KafkaTransport, name: str, start: StartAt) -> Subscription:
    return await made.subscribe(Topic.TRAJECTORIES, name, start)


async def test_open_and_aborted_transactions_are_not_read(kafka_bootstrap: str, unique_prefix: str) -> None:
    """``latest`` lies before an open transaction: what it commits later is new."""
    async with transport(kafka_bootstrap, unique_prefix) as made:
        _, lease = await owner(made, unique_prefix)
        await lease.publish([result("r", "first")])
        await open_transaction(lease, [result("r", "second")])
        early = await subscribe(made, f"{unique_prefix}-early", StartAt("earliest"))
        late = await subscribe(made, f"{unique_prefix}-late", StartAt("latest"))
        assert await read_to_end(early) == [b"first"]
        assert await read_to_end(late) == []
        producer = lease._publisher._producer
        await producer.commit_transaction()
        await open_transaction(lease, [result("r", "lost")])
        await producer.abort_transaction()
        await lease.publish([result("r", "third")])
        values: dict[str, list[bytes]] = {"early": [], "late": []}

        async def all_read() -> bool:
            values["early"] += await read_to_end(early)
            values["late"] += await read_to_end(late)
            return all(b"third" in found for found in values.values())

        await poll_until_async(all_read, JOIN_S, "the third")
        assert values == {"early": [b"second", b"third"], "late": [b"second", b"third"]}
