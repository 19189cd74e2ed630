"""``complete``, ``cancel`` and ``clear``: the events that end or begin a rollout's life."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
import typer

from freezepoint.cli.common import Broker, TopicPrefix, load_settings, note, run_async
from freezepoint.errors import InputError
from freezepoint.publishing import events_for, publish_events
from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from freezepoint.wording import counted
from freezepoint_schemas.events import InputEvent

Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Rollout ids.")]
GroupId = Annotated[str | None, typer.Option(help="The prompt group the rollout belongs to.")]
GroupSize = Annotated[int | None, typer.Option(help="How many rollouts the group has.")]
Metadata = Annotated[str | None, typer.Option(metavar="JSON", help="Handed on with the result, unread.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(epilog="Example: freezepoint complete run1.0-0 run1.0-1 --reward 0.5")(complete)
    app.command(epilog="Example: freezepoint cancel run1.0-0 --reason 'environment crashed'")(cancel)
    app.command(epilog="Example: freezepoint clear run1.0-0")(clear)


def complete(
    ids: Ids,
    n_calls: Annotated[int | None, typer.Option(help="Calls made; another number recorded masks.")] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="NUMBER|JSON", help="A number or a JSON object.")
    ] = None,
    group_id: GroupId = None,
    group_size: GroupSize = None,
    builder: Annotated[str | None, typer.Option(help="Build this rollout with another builder.")] = None,
    delivery: Annotated[
        str | None, typer.Option(help="Deliver this rollout as single_response, all_traces or per_request.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name in the result.")] = None,
    terminal_call_id: Annotated[
        str | None, typer.Option(help="The call that the rollout ended with.")
    ] = None,
    terminal_response_id: Annotated[str | None, typer.Option(help="That call's response id.")] = None,
    metadata: Metadata = None,
    broker: Broker = None,
    topic_prefix: TopicPrefix = None,
) -> None:
    """End rollouts: freeze what was recorded and build the result."""
    fields = {
        "n_calls": n_calls,
        "reward": _json("--reward", reward),
        "group_id": group_id,
        "group_size": group_size,
        "builder": builder,
        "delivery": delivery,
        "model": model,
        "terminal_call_id": terminal_call_id,
        "terminal_response_id": terminal_response_id,
        "metadata": _json("--metadata", metadata),
    }
    _send(ids, "rollout_complete", fields, load_settings(broker, topic_prefix))


def cancel(
    ids: Ids,
    reason: Annotated[str | None, typer.Option(help="Why it was given up.")] = None,
    group_id: GroupId = None,
    group_size: GroupSize = None,
    broker: Broker = None,
    topic_prefix: TopicPrefix = None,
) -> None:
    """Give rollouts up: freeze them and publish them masked, so that nobody waits for them."""
    fields = {"reason": reason, "group_id": group_id, "group_size": group_size}
    _send(ids, "rollout_cancelled", fields, load_settings(broker, topic_prefix))


def clear(
    ids: Ids,
    group_id: GroupId = None,
    group_size: GroupSize = None,
    metadata: Metadata = None,
    broker: Broker = None,
    topic_prefix: TopicPrefix = None,
) -> None:
    """Forget everything recorded under these ids: they are about to be dispatched (again)."""
    fields = {"group_id": group_id, "group_size": group_size, "metadata": _json("--metadata", metadata)}
    _send(ids, "rollout_clear", fields, load_settings(broker, topic_prefix))


def _json(option: str, text: str | None) -> Any:
    if text is None:
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InputError(f"{option}: {text[:80]!r} is no JSON: {error.msg}") from None


def _send(ids: list[str], name: str, fields: dict[str, Any], settings: Settings) -> None:
    sent = run_async(_publish(settings, events_for(ids, name, fields)))
    note(f"published {counted(sent, f'{name} event')}")


async def _publish(settings: Settings, events: list[InputEvent]) -> int:
    async with connect(settings) as transport:
        producer = await transport.producer()
        try:
            return await publish_events(producer, events)
        finally:
            await producer.close()
