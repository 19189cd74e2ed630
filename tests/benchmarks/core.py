"""The path of one rollout's bytes through a process, without a broker."""

from __future__ import annotations

import time
from collections.abc import Sequence

import orjson
import pybase64

from freezepoint.core.build import build_result
from freezepoint_schemas import codec
from freezepoint_schemas.results import Result
from tests.benchmarks.measuring import Figure, Row, in_turns, milliseconds, ratio
from tests.benchmarks.rollouts import STANDARD, Shape, by_reference, folded, plain, rollout

QUICK = Shape(calls=10, first_prompt=800)
ARRAYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def parse(values: Sequence[bytes]) -> None:
    for value in values:
        orjson.loads(value)


def read_only(values: Sequence[bytes]) -> None:
    """Parsed, and their arrays taken from base64, nothing checked and nothing made of it: less than any reader must do."""
    for value in values:
        body = orjson.loads(value)
        for name in ARRAYS:
            pybase64.b64decode(body[name]["data"])


def through(values: Sequence[bytes]) -> bytes:
    """Decode, build and encode."""
    return codec.encode_result(build_result(folded("standard", values)))


def core_rows(rounds: int, *, quick: bool) -> list[Row]:
    entries = list(rollout(QUICK if quick else STANDARD))
    json, packed = plain(entries), by_reference(entries)
    log = folded("standard", packed)
    built: list[Result] = []
    taken = in_turns(
        {
            "parse": lambda: parse(json),
            "build": lambda: built.append(build_result(log)),
            "plain": lambda: through(json),
            "packed": lambda: through(packed),
            "floor": lambda: read_only(packed),
        },
        rounds,
        time.process_time,
    )
    received, size = sum(map(len, json)), len(codec.encode_result(built[-1]))
    sizes = Figure.of([size / received])
    parsed = f"parse {milliseconds(taken['parse'])}"
    return [
        Row("build", "build of one rollout, decoded arrays to result", "`orjson.loads` of its JSON entries",
            ratio(taken["build"], taken["parse"]), 0.05, note=f"{milliseconds(taken['build'])}; {parsed}"),
        Row("plain", "decode + build + encode, plain JSON", "`orjson.loads` of the same bytes",
            ratio(taken["plain"], taken["parse"]), 1.6, note=f"{milliseconds(taken['plain'])}; {parsed}"),
        Row("packed", "the same rollout, packed and by reference", "the plain JSON path",
            ratio(taken["packed"], taken["plain"]), 1 / 40, note=milliseconds(taken["packed"])),
        Row("packed", "parsing its JSON and base64 alone", "the plain JSON path",
            ratio(taken["floor"], taken["plain"]), note=f"{milliseconds(taken['floor'])}: a floor of the row above"),
        Row("size", "result size", "JSON entries received", sizes, 1 / 20,
            note=f"{size:,} of {received:,} bytes"),
    ]  # fmt: skip
