"""What a scenario measured: figures with what was expected of them, and the table of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

NAME_WIDTH = 54
VALUE_WIDTH = 16
RESULTS = "results (= frozen lives)"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. ``expected`` says in words what it had to be; empty where it is only told."""

    name: str
    value: str
    expected: str
    ok: bool


@dataclass(slots=True)
class Report:
    """One run of a scenario."""

    scenario: str
    row: str
    figures: list[Figure] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None and not self.differences and all(figure.ok for figure in self.figures)

    @property
    def results(self) -> int:
        """How many the checker compared."""
        found = [figure.value for figure in self.figures if figure.name == RESULTS]
        return sum(int(value.replace(",", "")) for value in found)

    def tell(self, name: str, value: object, unit: str = "") -> None:
        """A figure that may be anything."""
        self.figures.append(Figure(name, _text(value, unit), "", True))

    def equal(self, name: str, value: object, expected: object) -> None:
        """A figure that has to be exactly so."""
        self.figures.append(Figure(name, _text(value), f"= {_text(expected)}", value == expected))

    def at_most(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """A figure that may not be above a limit."""
        self.figures.append(Figure(name, _text(value, unit), f"<= {_text(limit, unit)}", value <= limit))

    def at_least(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """A figure that may not be below a limit."""
        self.figures.append(Figure(name, _text(value, unit), f">= {_text(limit, unit)}", value >= limit))

    def holds(self, name: str, value: object, expected: str, *, ok: bool) -> None:
        """A figure judged by the scenario."""
        self.figures.append(Figure(name, _text(value), expected, ok))

    def lines(self) -> Iterable[str]:
        """The report as a table."""
        yield f"{'ok  ' if self.ok else 'FAIL'} {self.scenario}  ({self.row})  {self.seconds:.0f} s"
        for figure in self.figures:
            mark = " " if figure.ok else "!"
            yield f"   {mark} {figure.name:<{NAME_WIDTH}}{figure.value:>{VALUE_WIDTH}}  {figure.expected}".rstrip()
        for difference in self.differences:
            yield f"   ! {difference}"
        if self.error is not None:
            yield f"   ! {self.error}"


def _text(value: object, unit: str = "") -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        text = str(value)
    else:
        text = f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
    return f"{text} {unit}" if unit else text


def summary(reports: Iterable[Report]) -> list[str]:
    """One line a scenario."""
    lines = []
    for report in reports:
        failed = [figure.name for figure in report.figures if not figure.ok]
        why = ", ".join(
            [*failed, *(["differences"] if report.differences else []), *(["error"] if report.error else [])]
        )
        lines.append(
            f"{'ok  ' if report.ok else 'FAIL'} {report.scenario:<26}{report.seconds:>6.0f} s  {why}".rstrip()
        )
    return lines
