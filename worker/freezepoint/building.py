"""A frozen log to its result by a worker's settings, wherever the log came from."""

from __future__ import annotations

from freezepoint.core.build import Leniency, build_result, result_tokens_max
from freezepoint.core.frozen import FrozenLog
from freezepoint.settings import WorkerSettings
from freezepoint_schemas.results import Result


def result_of(log: FrozenLog, settings: WorkerSettings) -> Result:
    """:func:`~freezepoint.core.build.build_result`, as these settings want it."""
    return build_result(
        log,
        builder=settings.builder,
        delivery=settings.delivery,
        trace_tokens_max=settings.trace_tokens_max,
        leniency=Leniency(
            keep_attributed=settings.keep_attributed_chains,
            mask_routes_mismatch=settings.mask_routes_mismatch,
        ),
    )


def tokens_max(log: FrozenLog, settings: WorkerSettings) -> int:
    """:func:`~freezepoint.core.build.result_tokens_max`, as these settings want it built."""
    return result_tokens_max(log, builder=settings.builder, delivery=settings.delivery)
