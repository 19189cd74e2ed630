"""A progress bar on stderr, for people at a terminal; nothing for anybody else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from freezepoint.lines import Source


@contextmanager
def file_progress(
    files: Sequence[Source], what: str, *, wanted: bool = True
) -> Iterator[Callable[[int, int], None] | None]:
    """Follows reading through files: the callback takes the number of the file and how many bytes of it are read."""
    if not (wanted and sys.stderr.isatty()):
        yield None
        return
    sizes = [file.size_bytes for file in files]
    before = [sum(sizes[:number]) for number in range(len(sizes))]
    with _progress(BarColumn(), TaskProgressColumn()) as progress:
        task = progress.add_task(what, total=sum(sizes) or None)
        yield lambda number, position: progress.update(task, completed=before[number] + position)


@contextmanager
def text_progress(what: str, *, wanted: bool = True) -> Iterator[Callable[[str], None] | None]:
    """Follows work of unknown length: the callback takes what to say about it."""
    if not (wanted and sys.stderr.isatty()):
        yield None
        return
    with _progress() as progress:
        task = progress.add_task(what, total=None)
        yield lambda text: progress.update(task, description=f"{what}: {text}")


def _progress(*columns: BarColumn | TaskProgressColumn) -> Progress:
    """What is written to ``sys.stderr`` meanwhile appears above it; stdout is data and not its business."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *columns,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
    )
