"""``simulate``, and the work of ``publish``: events into a broker."""

from __future__ import annotations

import gzip
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import orjson
import typer
from pydantic import ValidationError

from freezepoint.cli.common import (
    Broker,
    TopicPrefix,
    error_line,
    load_settings,
    naming,
    note,
    require_files,
    run_async,
    to_stdout,
    wrong_option,
)
from freezepoint.cli.progress import file_progress
from freezepoint.core.records import OutputRecord
from freezepoint.errors import InputError
from freezepoint.lines import STDIN, LineError, Source, sources
from freezepoint.publishing import BatchPublisher, Published, publish_files, publish_simulated
from freezepoint.settings import Settings
from freezepoint.simulate import Profile, Truth, simulate
from freezepoint.transport.connect import connect
from freezepoint.transport.ports import Position, Producer, Transport
from freezepoint.wording import agreeing, counted
from freezepoint_schemas import codec

_DEFAULT = Profile()


class Wire(StrEnum):
    """How token arrays are written."""

    JSON = "json"
    PACKED = "packed"


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(
        "simulate", epilog="Example: freezepoint simulate --seed 7 --truth truth.jsonl --out events.jsonl"
    )(simulate_command)


def _chance(help_text: str) -> Any:
    return typer.Option(metavar="0..1", help=help_text, rich_help_panel="How likely (0 to 1)")


def _range(help_text: str) -> Any:
    return typer.Option(metavar="N or MIN-MAX", help=help_text)


def _default_range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}-{bounds[1]}"


def simulate_command(
    ctx: typer.Context,
    rollouts: Annotated[int, typer.Option(help="How many rollouts.")] = _DEFAULT.rollouts,
    turns: Annotated[str, _range("Turns of a rollout.")] = _default_range(_DEFAULT.turns),
    seed: Annotated[int, typer.Option(help="Equal seeds give equal rollouts.")] = _DEFAULT.seed,
    run: Annotated[str, typer.Option(help="Put in front of the rollout ids.")] = _DEFAULT.run,
    concurrency: Annotated[int, typer.Option(help="Rollouts open at once.")] = _DEFAULT.concurrency,
    group_size: Annotated[int, typer.Option(help="Rollouts of one task.")] = _DEFAULT.group_size,
    prompt_tokens: Annotated[str, _range("Tokens of a first prompt.")] = _default_range(
        _DEFAULT.prompt_tokens
    ),
    generation_tokens: Annotated[str, _range("Generated tokens of a call.")] = _default_range(
        _DEFAULT.generation_tokens
    ),
    tool_tokens: Annotated[str, _range("Tokens of a tool output.")] = _default_range(_DEFAULT.tool_tokens),
    large_bytes: Annotated[int, typer.Option(help="Payload of a large call.")] = _DEFAULT.large_bytes,
    rate: Annotated[float, typer.Option(min=0, help="Calls a second; 0: as fast as possible.")] = 0,
    wire: Annotated[Wire, typer.Option(help="How token arrays are written.")] = Wire.JSON,
    truth: Annotated[
        Path | None, typer.Option(help="Write what must come of each rollout (JSON lines).")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Write the events here (- for stdout, .gz), to no broker.")
    ] = None,
    retry: Annotated[float, _chance("A turn is sampled twice, one sample goes on.")] = _DEFAULT.retry,
    empty: Annotated[float, _chance("A turn is asked again after an empty generation.")] = _DEFAULT.empty,
    withdrawn: Annotated[
        float, _chance("A turn has a call that is announced and cancelled.")
    ] = _DEFAULT.withdrawn,
    large: Annotated[float, _chance("A call is too large for one record.")] = _DEFAULT.large,
    unresolved: Annotated[float, _chance("A rollout's last turn is sampled twice.")] = _DEFAULT.unresolved,
    subagent: Annotated[float, _chance("A rollout has a sub-agent with its own root.")] = _DEFAULT.subagent,
    fork: Annotated[float, _chance("A rollout goes two ways from one turn.")] = _DEFAULT.fork,
    compaction: Annotated[float, _chance("A rollout's context is summarised.")] = _DEFAULT.compaction,
    lost: Annotated[float, _chance("A rollout loses a call's record.")] = _DEFAULT.lost,
    no_records: Annotated[float, _chance("A rollout is completed without any record.")] = _DEFAULT.no_records,
    cancelled: Annotated[float, _chance("A rollout is given up half-way.")] = _DEFAULT.cancelled,
    intents: Annotated[float, _chance("A rollout's calls are announced.")] = _DEFAULT.intents,
    counted: Annotated[float, _chance("A rollout's complete event counts the calls.")] = _DEFAULT.counted,
    duplicate: Annotated[float, _chance("A record comes twice.")] = _DEFAULT.duplicate,
    broker: Broker = None,
    topic_prefix: TopicPrefix = None,
) -> None:
    """Generate seeded load: agent rollouts with retries, sub-agents, compaction, lost calls and duplicates."""
    profile = _profile(ctx.params)
    with _truth_file(truth) as on_truth:
        if out is None:
            settings = load_settings(broker, topic_prefix)
            run_async(_simulate(settings, profile, rate=rate, packed=wire is Wire.PACKED, on_truth=on_truth))
        else:
            _write(profile, out, packed=wire is Wire.PACKED, on_truth=on_truth)


def _profile(options: dict[str, Any]) -> Profile:
    """The options that are fields of a profile, as one."""
    fields = {name: options[name] for name in Profile.model_fields}
    for name in ("turns", "prompt_tokens", "generation_tokens", "tool_tokens"):
        fields[name] = _bounds(name, fields[name])
    try:
        return Profile(**fields)
    except ValidationError as error:
        raise wrong_option(error) from None


def _bounds(name: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise InputError(f"--{name.replace('_', '-')}: {text!r} is neither a number nor MIN-MAX")
    return int(match[1]), int(match[2] or match[1])


@contextmanager
def _truth_file(path: Path | None) -> Iterator[Callable[[Truth], None] | None]:
    if path is None:
        yield None
        return
    file = path.open("wb")

    def write(truth: Truth) -> None:
        with naming(str(path)):
            file.write(orjson.dumps(truth) + b"\n")

    try:
        yield write
    finally:
        with naming(str(path)):
            file.close()


async def _simulate(
    settings: Settings,
    profile: Profile,
    *,
    rate: float,
    packed: bool,
    on_truth: Callable[[Truth], None] | None,
) -> None:
    began = time.monotonic()
    async with connect(settings) as transport:
        producer = await transport.producer()
        try:
            async with BatchPublisher(producer) as publisher:
                await publish_simulated(
                    publisher, simulate(profile), rate=rate, packed=packed, on_truth=on_truth
                )
        finally:
            await producer.close()
    _summary(Published(publisher.records, profile.rollouts, publisher.bytes, 0), time.monotonic() - began)


def _write(profile: Profile, out: str, *, packed: bool, on_truth: Callable[[Truth], None] | None) -> None:
    with naming("stdout" if out == STDIN else out), ExitStack() as stack:
        file = _output(out, stack)
        for item in simulate(profile):
            file.write(codec.encode_event(item.event, packed=packed) + b"\n")
            if item.truth is not None and on_truth is not None:
                on_truth(item.truth)


def _output(out: str, stack: ExitStack) -> BinaryIO:
    if out == STDIN:
        return stack.enter_context(to_stdout())
    file = stack.enter_context(Path(out).open("wb"))  # noqa: SIM115 - the stack is its context
    return (
        cast("BinaryIO", stack.enter_context(gzip.GzipFile("", "wb", 6, file, 0)))
        if out.endswith(".gz")
        else file
    )


def publish_lines(settings: Settings, files: list[str], *, complete: bool, keep_going: bool) -> int:
    """See the command ``publish``. How many lines were skipped."""
    require_files(files)
    began = time.monotonic()
    with sources(files, again=complete) as opened:
        published = run_async(_publish(settings, opened, complete=complete, keep_going=keep_going))
    _summary(published, time.monotonic() - began)
    return published.skipped


async def _publish(settings: Settings, files: list[Source], *, complete: bool, keep_going: bool) -> Published:
    def on_bad(error: LineError) -> None:
        error_line(str(error))

    async with connect(settings) as transport:
        producer = _WhenNeeded(transport)
        try:
            with file_progress(files, "publishing") as on_position:
                async with BatchPublisher(producer) as publisher:
                    return await publish_files(
                        publisher,
                        files,
                        complete=complete,
                        on_bad=on_bad if keep_going else None,
                        on_position=on_position,
                    )
        finally:
            await producer.close()


class _WhenNeeded:
    """A producer that is made when there is something to send: input that is refused leaves nothing behind."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._made: Producer | None = None

    async def send(self, records: Sequence[OutputRecord]) -> Sequence[Position]:
        if self._made is None:
            self._made = await self._transport.producer()
        return await self._made.send(records)

    async def close(self) -> None:
        if self._made is not None:
            await self._made.close()


def _summary(published: Published, seconds: float) -> None:
    skipped = f", {counted(published.skipped, 'line')} skipped" if published.skipped else ""
    note(
        f"published {counted(published.records, 'record')} of {counted(published.rollouts, 'rollout')}, "
        f"{counted(published.bytes, 'byte')} in {seconds:.1f} s{skipped}"
    )
    if published.withheld:
        note(
            f"{counted(published.withheld, 'rollout')} got no complete event: a skipped line may have been one of "
            f"{agreeing(published.withheld, 'its', 'their')} calls. "
            "Once you have looked: freezepoint complete ID…"
        )
