"""A result as one line of JSON, in the form that whoever reads it asked for."""

from __future__ import annotations

from enum import StrEnum

import orjson

from freezepoint.core.projection import response_form
from freezepoint_schemas import codec
from freezepoint_schemas.results import Result


class Projection(StrEnum):
    """``trace``: the result record, linear in its tokens. ``response``: the reference's dictionary, quadratic."""

    TRACE = "trace"
    RESPONSE = "response"


def line_of(result: Result, projection: Projection, *, packed: bool = False) -> bytes:
    """The result as JSON without a line break.

    :param packed: of a trace, base64 arrays instead of lists of numbers.
    """
    if projection is Projection.RESPONSE:
        return orjson.dumps(response_form(result))
    return codec.encode_result(result, packed=packed)
