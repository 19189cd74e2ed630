"""The brokers that every transport is tested on. One test, one set of topics; nothing is shared but the server."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.driving import Cluster

SQLITE = "sqlite"
KAFKA = pytest.param("kafka", marks=pytest.mark.kafka)


@pytest.fixture(params=[SQLITE, KAFKA])
def transport_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == SQLITE:
        return f"sqlite:///{tmp_path / 'contract.db'}"
    servers: str = request.getfixturevalue("kafka_bootstrap")
    return f"kafka://{servers}"


@pytest.fixture
async def cluster(transport_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    readable = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:60]
    async with Cluster(transport_url, f"{readable}-{uuid.uuid4().hex[:8]}.") as made:
        yield made
