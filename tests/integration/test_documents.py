"""Every document: its code blocks are run by a test, its links lead somewhere, and the file map has every file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents import NEVER_RUN, ROOT, blocks_of, document, markdown_files, rows_under, spans_of

pytestmark = pytest.mark.skipif(
    not (ROOT / "docs").exists(), reason="the documents are not part of this copy"
)

RUN_BY = {
    "README.md": "test_readme.py",
    "docs/diagnosis.md": "test_diagnosis_docs.py",
    "docs/faults.md": "test_chaos.py",
    "docs/local.md": "test_local_docs.py",
    "docs/operations.md": "test_operations_docs.py",
    "docs/reader.md": "test_reader_docs.py",
    "docs/replay.md": "test_replay.py",
    "docs/runbooks.md": "test_operations_docs.py",
    "docs/schemas.md": "test_schema_export.py",
    "docs/sink.md": "test_sink_docs.py",
    "docs/tutorial.md": "test_tutorial.py",
}
"""Documents with code in them, and the test here that runs all of it."""
GENERATED = {"docs/benchmarks.md"}
"""What ``make bench`` writes."""
PACKAGES = ("worker/freezepoint", "schemas/freezepoint_schemas")


@pytest.mark.parametrize("name", markdown_files())
def test_every_block_is_run_by_a_test(name: str) -> None:
    run = [block for block in blocks_of(name) if block.language not in NEVER_RUN]
    for block in run:
        assert block.language in {"console", "python"}, f"{name}: what is a block in {block.language!r}?"
    assert (name in RUN_BY) >= bool(run), f"no test runs the blocks of {name}"


@pytest.mark.parametrize("name", RUN_BY)
def test_the_test_of_a_document_speaks_of_it(name: str) -> None:
    assert document(name)
    assert Path(name).name in (Path(__file__).parent / RUN_BY[name]).read_text()


@pytest.mark.parametrize("name", markdown_files())
def test_every_link_leads_somewhere(name: str) -> None:
    folder = (ROOT / name).parent
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document(name)):
        if not link.startswith(("https://", "http://")):
            found = (folder / link).resolve()
            assert found.exists() or found.relative_to(ROOT).as_posix() in GENERATED, link


# ---------------------------------------------------------------------------------------------------------- file map


def mapped_paths() -> list[Path]:
    """What DESIGN.md's file map names. ``…/`` stands for the package of the last full path; a bare name lies where the path
    before it does, a bare folder beside it."""
    package, folder, found = ROOT, ROOT, []
    for row in rows_under("docs/DESIGN.md", "File map"):
        for span in spans_of(row[0]):
            parts = Path(span).parts
            if parts[0] == "…":
                path = package.joinpath(*parts[1:])
            elif span.startswith(PACKAGES):
                path = ROOT / span
                package = ROOT.joinpath(*parts[:2])
            else:
                path = folder / span
            found.append(path)
            folder = path.parent
    return found


def test_every_path_of_the_file_map_exists() -> None:
    for path in mapped_paths():
        assert path.exists(), path.relative_to(ROOT)


def test_every_module_is_in_the_file_map() -> None:
    """By itself, or with the folder that it lies in."""
    mapped = set(mapped_paths())
    missing = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.name.startswith("__") and not mapped.intersection([path, *path.parents])
    ]
    assert not missing


def test_no_path_of_the_file_map_is_named_twice() -> None:
    mapped = mapped_paths()
    assert sorted({path for path in mapped if mapped.count(path) > 1}) == []
