"""Records of a tokens topic: conversations as an engine would record them, and everything that can be wrong with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import orjson
import xxhash

from freezepoint.core.records import InputRecord
from freezepoint_schemas import arrays, parts
from freezepoint_schemas.headers import PART, Headers
from tests.fuzz import hostile

EXAMPLES = [
    path.read_bytes().replace(b"run7.12-0", b"a")
    for path in sorted((Path(__file__).parents[2] / "schemas/examples/v1").glob("*/*.json"))
]
ROLLOUTS = ("a", "b")
KEYS = [None, b"", b"a/b", b"../x", b"!progress", b"\xff", b"a" * 255, b"a" * 256, b"-a", b"a\n", b"A.b_c-d"]
FIELDS = [
    "event", "rollout_id", "schema_version", "model_call_id", "model", "prompt_token_ids", "generation_token_ids",
    "generation_log_probs", "routed_experts", "output_items", "token_item_index", "created_at", "parent_call_id",
    "policy_version", "finish_reason", "response_id", "prompt_prefix", "reason", "n_calls", "terminal_call_id",
    "terminal_response_id", "builder", "delivery", "reward", "group_id", "group_size", "metadata", "other",
]  # fmt: skip
OFFSETS = (0, 0, 0, 7, 2**31 - 3, 2**62)
TIMESTAMPS = (-1, 0, 1_700_000_000_000, 2**63 - 1, -(2**63))


@dataclass(slots=True)
class Conversation:
    """The calls of one rollout so far, so that new ones can go on from them or refer to them."""

    random: Random
    calls: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)

    def entry(self) -> dict[str, Any]:
        """A new call or a repeat of a known one, in one of its forms."""
        random = self.random
        if self.calls and random.random() < 0.2:
            call_id = random.choice(list(self.calls))
        else:
            call_id = f"c{random.randrange(12)}"
            self.calls.setdefault(call_id, self._new())
        prompt, generation = self.calls[call_id]
        if random.random() < 0.02:
            generation = [*generation, 1]
        body = {
            "event": "token_entry",
            "model_call_id": call_id,
            "generation_token_ids": generation,
            "generation_log_probs": [-0.1 * (token + 1) for token in generation],
            "output_items": [{"type": "message", "n": None}],
            "created_at": float(int(call_id[1:])),
            **self._prompt(call_id, prompt),
            **self._extras(call_id, len(prompt) + len(generation)),
        }
        return self._encoded(body)

    def _new(self) -> tuple[list[int], list[int]]:
        random = self.random
        base: list[int] = []
        if self.calls and random.random() < 0.95:
            known = list(self.calls.values())
            prompt, generation = known[-1] if random.random() < 0.8 else random.choice(known)
            base = [*prompt, *generation] if random.random() < 0.9 else prompt
        grown = [*base, *(random.randrange(3) for _ in range(random.randrange(3)))]
        return grown[:200], [random.randrange(3) for _ in range(random.choice([0, 1, 1, 2, 5]))]

    def _prompt(self, call_id: str, prompt: list[int]) -> dict[str, Any]:
        random = self.random
        if not self.calls or random.random() < 0.6:
            return {"prompt_token_ids": prompt}
        target = random.choice(list(self.calls)) if random.random() < 0.97 else "gone"
        known = [token for half in self.calls.get(target, ([], [])) for token in half]
        length = 0
        while length < min(len(known), len(prompt)) and known[length] == prompt[length]:
            length += 1
        if random.random() < 0.3:
            length = random.randint(0, length)
        digest = xxhash.xxh3_128_hexdigest(np.array(prompt[:length], "<i4").tobytes())
        if random.random() < 0.05:
            length, digest = random.choice(
                [(length + 1, digest), (2**40, digest), (length, "0" * 32), (0, digest)]
            )
        prefix = {"call_id": target, "length": length, "digest": digest}
        return {"prompt_token_ids": prompt[length:], "prompt_prefix": prefix}

    def _extras(self, call_id: str, rows: int) -> dict[str, Any]:
        """Fields that many calls lack; they depend on the call alone, so that repeats agree."""
        number = int(call_id[1:])
        extras: dict[str, Any] = {}
        if number % 3 == 0:
            extras["routed_experts"] = [
                [[(number + row) % 300, 1]] for row in range(rows + (number % 4 == 0))
            ]
        if number % 5 == 0:
            extras |= {"policy_version": number, "response_id": f"resp-{number}", "token_item_index": 0}
        if number % 4 == 1 and number > 4:
            extras["parent_call_id"] = f"c{number - 1}"
        return extras

    def _encoded(self, body: dict[str, Any]) -> dict[str, Any]:
        """The same fields with some arrays packed or inline on the item."""
        random = self.random
        for name in ("prompt_token_ids", "generation_token_ids"):
            if random.random() < 0.3:
                dtype = random.choice(["u8", "u16", "i32", "i64"])
                body[name] = arrays.pack(np.array(body[name], arrays.DTYPES[dtype]))
        if random.random() < 0.3:
            body["generation_log_probs"] = arrays.pack(np.array(body["generation_log_probs"], "<f8"))
        if random.random() < 0.1 and "routed_experts" in body:
            dtype = random.choice(["u16", "i32", "i64"])
            body["routed_experts"] = arrays.pack(np.array(body["routed_experts"], arrays.DTYPES[dtype]))
        if random.random() < 0.1:
            item = {
                **body["output_items"][0],
                **{name: body[name] for name in body if name.startswith("generation")},
            }
            body = {**body, "output_items": [item]}
        return body


def control(random: Random, calls: list[str]) -> dict[str, Any]:
    """An event that is no entry."""
    call_id = random.choice([*calls, "c11"])
    group = {"group_id": "g", "group_size": 4} if random.random() < 0.2 else {}
    match random.randrange(9):
        case 0 | 1:
            return {"event": "call_intent", "model_call_id": call_id}
        case 2:
            return {"event": "call_cancelled", "model_call_id": call_id}
        case 3:
            return {"event": "capture_incomplete", "model_call_id": call_id, "reason": "lost"}
        case 4:
            return {"event": "rollout_cancelled", **group}
        case 5:
            return {"event": "rollout_clear", **group}
        case _:
            body: dict[str, Any] = {"event": "rollout_complete", **group}
            if random.random() < 0.2:
                body["n_calls"] = len(calls)
            if random.random() < 0.2:
                body["terminal_call_id"] = call_id
            if random.random() < 0.2:
                body |= {
                    "builder": random.choice(["prefix_merging", "per_request", "x" * 100]),
                    "delivery": random.choice(["single_response", "all_traces", "per_request", "\u0000"]),
                    "reward": random.choice([1, -0.0, 0.5, {"a": None}, {}]),
                    "metadata": random.choice([None, [], {"a": None}, "x", [[1.0, 1]]]),
                }
            return body


def broken(random: Random, body: dict[str, Any]) -> dict[str, Any]:
    """The object with one change."""
    body = dict(body)
    name = random.choice(list(body) if body and random.random() < 0.7 else FIELDS)
    match random.randrange(8):
        case 0:
            body.pop(name, None)
        case 1 | 2 | 3:
            body[name] = hostile.value(random)
        case 4:
            body[name] = hostile.packed(random)
        case 5:
            other = random.choice(FIELDS)
            body[name], body[other] = body.get(other), body.get(name)
        case 6:
            body[name] = _broken_inside(random, body.get(name))
        case _:
            body[random.choice(FIELDS)] = body.get(name)
    return body


def _broken_inside(random: Random, inside: Any) -> Any:
    if isinstance(inside, list) and inside:
        position = random.randrange(len(inside))
        changed = _broken_inside(random, inside[position]) if random.random() < 0.5 else hostile.value(random)
        return [*inside[:position], changed, *inside[position + random.randrange(2) :]]
    if isinstance(inside, dict) and inside:
        name = random.choice([*inside, "extra", "generation_token_ids"])
        return {**inside, name: hostile.value(random)}
    return [inside]


def torn(random: Random, value: bytes) -> bytes:
    """The bytes with one change."""
    if not value:
        return random.choice(hostile.TOKENS)
    start = random.randrange(len(value))
    stop = min(len(value), start + random.choice([1, 1, 2, 8, 64]))
    before, struck, after = value[:start], value[start:stop], value[stop:]
    changed = [
        lambda: before,
        lambda: before + after,
        lambda: before + random.choice(hostile.TOKENS) + struck + after,
        lambda: before + random.choice(hostile.TOKENS) + after,
        lambda: before + struck * random.choice([2, 3, 30]) + after,
        lambda: before + bytes([struck[0] ^ (1 << random.randrange(8))]) + struck[1:] + after,
        lambda: value.rstrip(b"}") + b',"%s":%s}' % (random.choice(FIELDS).encode(), hostile.raw(random)),
    ]
    return random.choice(changed)()


def event_value(random: Random, conversation: Conversation) -> bytes:
    """One value: an event, most often with something wrong in it."""
    roll = random.random()
    if roll < 0.12:
        value = random.choice(EXAMPLES)
    elif roll < 0.14:
        value = hostile.raw(random)
    else:
        body = conversation.entry() if random.random() < 0.65 else control(random, list(conversation.calls))
        for _ in range(random.choice([0, 0, 1, 1, 2, 3])):
            body = broken(random, body)
        value = orjson.dumps(body)
    for _ in range(random.choice([0, 0, 0, 0, 0, 0, 0, 1, 1, 2])):
        value = torn(random, value)
    return value


def clean_value(random: Random, conversation: Conversation) -> bytes:
    """One value with nothing wrong in it but what it says."""
    body = conversation.entry() if random.random() < 0.75 else control(random, list(conversation.calls))
    return orjson.dumps(body)


@dataclass(slots=True)
class Stream:
    """Makes a partition's log."""

    random: Random
    hostility: float
    records: list[InputRecord] = field(default_factory=list)
    _conversations: dict[str, Conversation] = field(default_factory=dict)
    _offset: int = 0

    def make(self, count: int) -> list[InputRecord]:
        self._offset = self.random.choice(OFFSETS)
        while len(self.records) < count:
            rollout_id = self.random.choice(ROLLOUTS)
            conversation = self._conversations.setdefault(rollout_id, Conversation(self.random))
            hurt = self.random.random() < self.hostility
            value = (event_value if hurt else clean_value)(self.random, conversation)
            self._put(rollout_id, value, hurt=hurt)
            if b"rollout_c" in value and self.random.random() < 0.9:
                del self._conversations[rollout_id]  # what comes next belongs to another life
                if b"clear" not in value:
                    self._put(rollout_id, orjson.dumps({"event": "rollout_clear"}), hurt=False)
        return self.records

    def _put(self, rollout_id: str, value: bytes, *, hurt: bool) -> None:
        random = self.random
        if hurt and random.random() < 0.1:
            self._append(random.choice(KEYS), value)
        elif hurt and random.random() < 0.1:
            self._append(rollout_id.encode(), value, ((PART, self._part_name(value)),))
        elif value and random.random() < 0.12:
            self._put_parts(rollout_id, value, whole=not hurt)
        elif random.random() < 0.03:
            self._append(rollout_id.encode(), None)
        else:
            self._append(rollout_id.encode(), value)

    def _put_parts(self, rollout_id: str, value: bytes, *, whole: bool) -> None:
        random = self.random
        pieces = list(parts.split(value, max(1, len(value) // random.choice([1, 2, 3, 5]))))
        order = random.sample(pieces, len(pieces)) + random.choices(pieces, k=random.choice([0, 0, 1, 3]))
        if not whole and random.random() < 0.5:
            order = order[: random.randrange(len(order))]
        for header, part in order:
            content = torn(random, part) if not whole and random.random() < 0.1 else part
            self._append(rollout_id.encode(), content, ((PART, header.encode()),))

    def _part_name(self, value: bytes) -> bytes:
        value_id = xxhash.xxh3_128_hexdigest(value).encode()
        return self.random.choice(
            [
                b"", b"x", value_id, value_id + b":0:1", value_id + b":0:2", value_id + b":1:1", value_id + b":0:0",
                value_id + b":999999:1000000", value_id + b":0:1000001", value_id + b":0:9999999", value_id + b":00:1",
                value_id.upper() + b":0:1", value_id + b":-1:1", value_id + b":0:1\n", b"0" * 32 + b":0:1",
            ]
        )  # fmt: skip

    def _append(self, key: bytes | None, value: bytes | None, headers: Headers = ()) -> None:
        random = self.random
        if random.random() < 0.02:
            headers = (("junk", random.randbytes(9)), ("", b""), *headers, ("\u00e9", b"\xff"))
        timestamp = random.choice(TIMESTAMPS) if random.random() < 0.1 else 1_000
        self.records.append(InputRecord(0, self._offset, timestamp, key, value, headers))
        self._offset += random.choice([1, 1, 1, 2, 1_000])
