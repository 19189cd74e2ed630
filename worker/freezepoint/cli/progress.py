"""A progress bar on stderr, for people at a terminal; nothing for anybody else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

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
    with _progress(bar=True) as progress:
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


def _progress(*, bar: bool = False) -> Progress:
    """What is written to ``sys.stderr`` meanwhile appears above it; stdout is data and not its business."""
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        *((progress.BarColumn(), progress.TaskProgressColumn()) if bar else ()),
        progress.TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
    )
