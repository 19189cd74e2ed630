"""What a release left in its topics, kept to be read by the next: ``python -m tests.chaos.golden`` writes it anew.

Done once a release, before its version is raised; the files bear the release's name. Its JSON Schemas are kept as well
(``--schemas`` writes only these).
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import orjson

from freezepoint_schemas.generate import schema_files
from freezepoint_schemas.topics import Topic
from tests.chaos.broker import ChaosBroker
from tests.chaos.figures import Report
from tests.chaos.load import Garbage, Load, Sent, reused, rollouts
from tests.chaos.stage import Stage, stage
from tests.chaos.tails import Line
from tests.events import entry, incomplete, intent

FOLDER = Path(__file__).parent.parent / "golden"
RELEASE = "0.1"
OPEN = [f"open-{number}" for number in range(12)]
SEED = 20_260
GROUP = "golden-group"


def path_of(release: str) -> Path:
    return FOLDER / f"topics-{release}.jsonl.gz"


def schema_path(name: str, release: str = RELEASE) -> Path:
    return FOLDER / f"{name}-{release}.json"


def freeze_schemas(release: str = RELEASE) -> None:
    for name, content in schema_files():
        schema_path(name.removesuffix(".json"), release).write_bytes(content)


def read(release: str = RELEASE) -> dict[Topic, list[Line]]:
    """The records of the topics, in the order of their offsets."""
    found: dict[Topic, list[Line]] = {topic: [] for topic in Topic}
    for raw in gzip.decompress(path_of(release).read_bytes()).splitlines():
        body = orjson.loads(raw)
        headers = tuple((name, base64.b64decode(value)) for name, value in body["headers"])
        key, value = (
            None if body[name] is None else base64.b64decode(body[name]) for name in ("key", "value")
        )
        found[Topic(body["topic"])].append(
            Line(body["partition"], body["offset"], body["timestamp_ms"], key, value, headers)
        )
    return found


def _write(release: str, topics: dict[Topic, list[Line]]) -> None:
    lines = [
        orjson.dumps(_plain(topic, line))
        for topic, held in topics.items()
        for line in sorted(held, key=lambda line: (line.partition, line.offset))
    ]
    FOLDER.mkdir(exist_ok=True)
    path_of(release).write_bytes(gzip.compress(b"\n".join(lines), mtime=0))


def _plain(topic: Topic, line: Line) -> dict[str, Any]:
    def text(raw: bytes | None) -> str | None:
        return None if raw is None else base64.b64encode(raw).decode()

    return {
        "topic": topic.value,
        "partition": line.partition,
        "offset": line.offset,
        "timestamp_ms": line.timestamp_ms,
        "key": text(line.key),
        "value": text(line.value),
        "headers": [(name, text(value)) for name, value in line.headers],
    }


async def _make(made: Stage) -> None:
    """Lives of all kinds, reused ids, garbage, and some rollouts that stay open."""
    made.fleet.start("worker", supervised=False)
    await made.fleet.until_acquired(made.partitions)
    await made.publish(60, rollouts(made.profile()))
    garbage = Garbage(20, SEED, made.partitions)
    author = reused(made.profile(run="golden"), 8, Random(SEED), abandoned=0.0)
    load = Load(made.publisher, author, made.tally, SEED, rate=0, concurrency=4, spoil=garbage, limit=24)
    await load.run(asyncio.Event())
    for name in OPEN:
        events = (intent(name, "c1"), entry(name, "c1", [1, 2], [3]), incomplete(name, "c0"))
        await made.send(*(Sent.of(event) for event in events))
    await made.settle(letters=garbage.injected.total())
    made.fleet.kill("worker")
    _write(RELEASE, {topic: await made.tails[topic].pull() for topic in Topic})


async def _main() -> int:
    freeze_schemas()
    if "--schemas" in sys.argv:
        return 0
    report = Report("golden", "golden topics")
    async with ChaosBroker() as broker:
        folder = Path(tempfile.mkdtemp(prefix="golden-"))
        async with stage(
            broker, report, folder, seed=SEED, seconds=1, environment={"FREEZEPOINT_WORKER__GROUP": GROUP}
        ) as made:
            await _make(made)
    print(f"{path_of(RELEASE)}: {path_of(RELEASE).stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
