"""What a run measured, as the table of a page for people: ``docs/faults.md``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.chaos.figures import Figure, Report

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
EVERYWHERE = frozenset({
    "exit codes at the end", "masked", "lost", "duplicates", "content", "untrue", "torn", "dead letters",
    "open transactions", "lag", "rollouts left open",
})  # fmt: skip
"""Figures that every scenario has, or nobody reads one by one: the page says of all of them once what they are."""


def write(path: Path, reports: Sequence[Report], run: str) -> None:
    """Put the run's figures in the place of the last one's. ``run``: what it was, in a line."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join([BEGIN, "", run, "", *_table(reports), "", END])
    path.write_text(f"{before}{table}{after}")


def _table(reports: Iterable[Report]) -> Iterable[str]:
    yield "| scenario | what happens | figures |"
    yield "|---|---|---|"
    for report in reports:
        figures = [_said(figure) for figure in report.figures if figure.name not in EVERYWHERE]
        verdict = "" if report.ok else " **failed**"
        what = report.row.removeprefix("Beside the table: ")
        yield f"| `{report.scenario}`{verdict} | {_cell(what)} | {_cell('; '.join(figures))} |"


def _said(figure: Figure) -> str:
    wanted = f" ({figure.expected})" if figure.expected else ""
    return f"{figure.name}: **{figure.value}**{wanted}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<=", "≤").replace(">=", "≥")
