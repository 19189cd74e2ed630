"""The page of figures: a run replaces what it played anew, and nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.figures import RESULTS, Report
from tests.chaos.page import BEGIN, END, write


def test_a_run_takes_the_place_of_the_last_one(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n{BEGIN}\nold figures\n{END}\nAfter\n")
    kills = Report("kills", "kill -9 | at random")
    kills.equal("kills", 1_050, 1_050)
    kills.equal(RESULTS, 2_000, 2_000)
    kills.equal("lost", 0, 0)
    memory = Report("memory-2", "Beside the table: more than fits")
    memory.at_most("peak RSS", 300.04, 264.0, "MB")
    for run in ("first", "second"):
        write(page, [kills, memory], f"{run} run", ["kills", "memory-2"])
    assert page.read_text() == (
        f"# Before\n{BEGIN}\n\nsecond run\n\n| scenario | what happens | figures |\n|---|---|---|\n"
        "| `kills` | kill -9 \\| at random | kills: **1,050** (= 1,050); "
        "results (= frozen lives): **2,000** (= 2,000) |\n"
        f"| `memory-2` **failed** | more than fits | peak RSS: **300.0 MB** (≤ 264.0 MB) |\n\n{END}\nAfter\n"
    )
    assert kills.results == 2_000


def test_scenarios_played_again_leave_the_others_as_they_were(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    everything = ["kills", "memory-2"]
    kills, memory = Report("kills", "kill -9"), Report("memory-2", "more than fits")
    for report in (kills, memory):
        report.tell("after", 1.0, "s")
    write(page, [kills, memory], "Both, 2 results checked.", everything)
    again = Report("memory-2", "more than fits")
    again.tell("after", 2.0, "s")
    write(page, [again], "One, 1 results checked.", everything)
    assert page.read_text() == (
        f"{BEGIN}\n\nBoth, 2 results checked.\\\n`memory-2` again: One, 1 results checked.\n\n"
        "| scenario | what happens | figures |\n|---|---|---|\n"
        f"| `kills` | kill -9 | after: **1.0 s** |\n| `memory-2` | more than fits | after: **2.0 s** |\n\n{END}\n"
    )
    write(page, [kills, memory], "Both once more, 2 results checked.", everything)
    assert "again" not in page.read_text()
