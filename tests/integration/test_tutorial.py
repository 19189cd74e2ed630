"""docs/tutorial.md, typed off as it stands: on the embedded transport, and on Kafka after its one change."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kafka_local import _free_port
from tests.documents import TIMEOUT_S, Block, Typist, blocks_of
from tests.polling import poll_until

DOCUMENT = "docs/tutorial.md"
PORT, BROKER = "8765", "127.0.0.1:9092"
INSTALL = "$ python -m pip install uvicorn starlette openai\n"
"""What the tests' environment has already."""


def chapters() -> tuple[list[Block], list[Block]]:
    """The blocks after the installation: everything else, and the change for Kafka."""
    install, *blocks = blocks_of(DOCUMENT)
    assert install.text == INSTALL
    change = [block for block in blocks if block.heading == "On Kafka"]
    return [block for block in blocks if block not in change], change


def type_all(typist: Typist, blocks: list[Block]) -> None:
    for block in blocks:
        typist.type(block)
        if typist.background:
            poll_until(lambda: listens(typist), TIMEOUT_S, "the server listens")


def listens(typist: Typist) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(typist.replace[PORT])), timeout=1).close()
    except OSError:
        assert typist.background[0].poll() is None, "the server ended"
        return False
    return True


def test_the_embedded_transport(tmp_path: Path) -> None:
    blocks, _ = chapters()
    assert [len(block.commands) for block in blocks if block.language == "console"] == [1] * 6
    with Typist(tmp_path, replace={PORT: str(_free_port())}) as typist:
        type_all(typist, blocks)
    assert (tmp_path / "freezepoint.db").exists()


def test_kafka(tmp_path: Path, kafka_bootstrap: str, unique_prefix: str) -> None:
    """Only what keeps this test apart from others on the same broker is added."""
    blocks, change = chapters()
    apart = {"FREEZEPOINT_TOPIC_PREFIX": f"{unique_prefix}.", "FREEZEPOINT_WORKER__GROUP": unique_prefix}
    with Typist(tmp_path, apart, {PORT: str(_free_port()), BROKER: kafka_bootstrap}) as typist:
        type_all(typist, [*change, *blocks])
    assert not (tmp_path / "freezepoint.db").exists()


@pytest.mark.parametrize("name", ["server.py", "agent.py", "trainer.py"])
def test_no_program_names_a_broker(name: str) -> None:
    (text,) = [block.text for block in blocks_of(DOCUMENT) if block.text.startswith(f"# {name}\n")]
    assert "kafka:" not in text
    assert "sqlite:" not in text
