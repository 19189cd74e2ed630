"""The examples of docs/reader.md, on the rollouts that it shows: each prints what stands below it."""

from __future__ import annotations

from pathlib import Path

from tests.documents import Typist, blocks_of, document

DOCUMENT = "docs/reader.md"


def test_every_example_prints_what_is_said(tmp_path: Path) -> None:
    rollouts, *blocks = blocks_of(DOCUMENT)
    assert rollouts.language == "json"
    assert "As `rollouts.jsonl`" in document(DOCUMENT)
    assert [block.language for block in blocks] == ["console", *["python", "text"] * 2]
    (tmp_path / "rollouts.jsonl").write_text(rollouts.text)
    with Typist(tmp_path) as typist:
        for block in blocks:
            if block.language == "text":
                printed = sorted(typist.printed.splitlines())
                assert printed == sorted(block.text.splitlines()), "partitions come in any order"
            else:
                typist.type(block)
