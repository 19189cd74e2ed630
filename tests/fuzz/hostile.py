"""Values that break things: the ends of number ranges, odd text, deep and wide JSON, torn arrays."""

from __future__ import annotations

import struct
from base64 import b64encode
from random import Random
from typing import Any

import orjson

NUMBERS = [
    b"0", b"-0", b"0.0", b"-0.0", b"1", b"1.0", b"1e0", b"-1", b"2147483647", b"2147483648", b"-2147483649",
    b"9007199254740993", b"9223372036854775807", b"9223372036854775808", b"18446744073709551615",
    b"18446744073709551616", b"-9223372036854775809", b"1e308", b"1e400", b"-1e400", b"5e-324", b"1e-400",
    b"9" * 400, b"0." + b"3" * 400, b"1" + b"0" * 40, b"NaN", b"Infinity", b"-Infinity", b"01", b"1.", b".5",
]  # fmt: skip
TEXTS = [
    b'""', b'"a"', b'"c1"', b'"\\u0000"', b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\ud83d\\ude00"', b'"\\uffff"',
    b'"\xff"', b'"\xed\xa0\x80"', b'"\xc3\xa9"', b'"\n"', b'"' + b"x" * 1_024 + b'"', b'"' + b"x" * 1_025 + b'"',
    b'"' + b"\xf0\x9f\x98\x80" * 300 + b'"', b'"token_entry"', b'"rollout_complete"', b'"AAAA"', b'"i32"',
]  # fmt: skip
OTHERS = [
    b"null",
    b"true",
    b"false",
    b"[]",
    b"{}",
    b"[[]]",
    b"[null]",
    b"[true]",
    b'{"":{}}',
    b'{"dtype":"i32"}',
]
DEPTHS = [
    1,
    2,
    8,
    60,
    66,
    120,
    200,
    230,
    236,
    237,
    238,
    239,
    240,
    241,
    252,
    253,
    254,
    255,
    256,
    500,
    1_000,
    1_023,
    1_024,
    1_025,
]
ODD_FLOATS = [
    struct.pack("<I", bits) for bits in (0x7F800001, 0x7FC00000, 0x7F800000, 0xFF800000, 0x80000000, 1)
] + [
    struct.pack("<Q", bits)
    for bits in (0x7FF0000000000001, 0x7FF8000000000000, 0x7FF0000000000000, 0xFFF0000000000000, 1 << 63, 1)
]
"""As f32, then f64: signalling and quiet NaN, the infinities, minus zero, the smallest."""
DTYPES = ["u8", "u16", "i32", "i64", "f32", "f64", "i8", "u32", "", "I32", None, 7]
TOKENS = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u", b"\\ud800", b"null", b"1e999", b"NaN", b"-", b"\x00", b"\xff",
    b"\xef\xbb\xbf", b"[" * 300, b'{"a":' * 300, b'"event":"rollout_clear",', b'"rollout_id":"a",', b"//", b"  ", b"\xf4\x90\x80\x80",
]  # fmt: skip


def nested(random: Random) -> bytes:
    """JSON of some depth: of lists, of objects, or of both; sometimes torn."""
    depth = random.choice(DEPTHS)
    open_, close = random.choice([(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]"), (b"[1,", b"]")])
    core = random.choice([b"1", b"[]", b"{}", b'"x"', b"true", b"null"])
    return open_ * depth + core + close * (depth if random.random() < 0.9 else depth - 1)


def wide(random: Random) -> bytes:
    """JSON of some width."""
    count = random.choice([1, 3, 30, 300])
    match random.randrange(5):
        case 0:
            return b"{" + b",".join(b'"%x":%d' % (number, number) for number in range(count)) + b"}"
        case 1:
            return b"{" + b",".join([b'"a":1'] * count) + b"}"
        case 2:
            return b"[" + b",".join([random.choice(NUMBERS[:12])] * count) + b"]"
        case 3:
            return b"[" + b",".join([b"{}"] * count) + b"]"
        case _:
            return b'["%s"%s]' % (b"x" * count, b',"x"' * count)


def raw(random: Random) -> bytes:
    """The bytes of one hostile JSON value, or of what is none."""
    roll = random.random()
    if roll < 0.4:
        return random.choice(NUMBERS)
    if roll < 0.6:
        return random.choice(TEXTS)
    if roll < 0.8:
        return random.choice(OTHERS)
    if roll < 0.85:
        return nested(random)
    if roll < 0.9:
        return wide(random)
    return orjson.dumps(packed(random))


def value(random: Random) -> Any:
    """A hostile value to put into an object that orjson writes."""
    return orjson.Fragment(raw(random))


def packed(random: Random) -> dict[str, Any]:
    """A packed array that is right in some points."""
    size = random.choice([0, 0, 1, 2, 4, 6, 8, 12, 24])
    raw = random.choice([random.randbytes(size), bytes(size), random.choice(ODD_FLOATS)])
    data: Any = b64encode(raw).decode()
    if random.random() < 0.1:
        data = random.choice([data[:-1], data + "=", data + "A", "\u00e9", " " + data, None, 7, "AAAA\nAAAA"])
    array: dict[str, Any] = {
        "dtype": random.choice(DTYPES[:6] if random.random() < 0.9 else DTYPES),
        "data": data,
    }
    if random.random() < 0.5:
        array["shape"] = [
            random.choice([0, 1, 1, 2, 3, size, -1, 2**31, 2**40, 2**41, 2**63, True, 1.0, None])
            for _ in range(random.choice([0, 1, 1, 2, 3, 3, 8, 9]))
        ]
    if random.random() < 0.05:
        del array[random.choice(list(array))]
    return array
