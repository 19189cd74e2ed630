"""What a run measured, as the table of a page for people: ``docs/faults.md``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.figures import Figure, Report

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
EVERYWHERE = frozenset({
    "exit codes at the end", "masked", "lost", "duplicates", "content", "untrue", "torn", "dead letters",
    "open transactions", "lag", "rollouts left open",
})  # fmt: skip
"""Figures that every scenario has, or nobody reads one by one: the page says of all of them once what they are."""

_HEAD = ("| scenario | what happens | figures |", "|---|---|---|")
_ROW = re.compile(r"^(\| `([^`]+)`.*)$", re.MULTILINE)
_RUN = re.compile(r"^(.*results checked\.)\\?$", re.MULTILINE)


def write(path: Path, reports: Sequence[Report], run: str, scenarios: Sequence[str]) -> None:
    """Put the run's figures in the place of the last one's; where only some scenarios were played, in the place of theirs.

    :param run: what it was, in a line.
    :param scenarios: the names of all, in the page's order.
    """
    before, _, rest = path.read_text().partition(BEGIN)
    figures, _, after = rest.partition(END)
    rows = {report.scenario: _row(report) for report in reports}
    runs = [run]
    if not rows.keys() >= set(scenarios):
        rows = {name: row for row, name in _ROW.findall(figures)} | rows
        played = ", ".join(f"`{report.scenario}`" for report in reports)
        runs = [*_RUN.findall(figures), f"{played} again: {run}"]
    said = [
        BEGIN,
        "",
        "\\\n".join(runs),
        "",
        *_HEAD,
        *(rows[name] for name in scenarios if name in rows),
        "",
        END,
    ]
    path.write_text(before + "\n".join(said) + after)


def _row(report: Report) -> str:
    figures = [_said(figure) for figure in report.figures if figure.name not in EVERYWHERE]
    verdict = "" if report.ok else " **failed**"
    what = report.row.removeprefix("Beside the table: ")
    return f"| `{report.scenario}`{verdict} | {_cell(what)} | {_cell('; '.join(figures))} |"


def _said(figure: Figure) -> str:
    wanted = f" ({figure.expected})" if figure.expected else ""
    return f"{figure.name}: **{figure.value}**{wanted}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<=", "≤").replace(">=", "≥")
