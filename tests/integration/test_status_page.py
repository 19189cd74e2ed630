"""The worker's page for people: what protects it, and how it looks in a real browser."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from freezepoint import health
from freezepoint.addresses import is_loopback
from freezepoint.core.records import OutputRecord
from freezepoint.errors import ConfigurationError
from freezepoint.settings import HttpSettings, WorkerSettings
from freezepoint.status import PAGE, POLICY
from freezepoint.telemetry.recent import FINISHED_MAX, SAMPLES_MAX, Finished, Recent
from freezepoint.worker import Worker
from freezepoint_schemas.topics import Topic
from tests.contract.driving import PARTITIONS, Cluster
from tests.events import complete, entry
from tests.integration.test_health import get, port_of
from tests.integration.workers import publish, publish_raw, worker
from tests.polling import poll_until, poll_until_async

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@contextmanager
def serving(environment: dict[str, str], log: Path, **more: str) -> Iterator[int]:
    """A worker and its port."""
    with worker({**environment, "FREEZEPOINT_HTTP__PORT": "0", **more}, log) as running:
        port = port_of(running)
        running.until_acquired(PARTITIONS)
        yield port


def asked(
    port: int, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


@pytest.fixture
def sqlite(tmp_path: Path) -> Cluster:
    return Cluster(f"sqlite:///{tmp_path / 'f.db'}", "")


# -------------------------------------------------------------------------------------------------------- security


async def test_every_answer_carries_the_headers_that_protect_it(sqlite: Cluster, tmp_path: Path) -> None:
    await sqlite.with_topics()
    secret = {"FREEZEPOINT_KAFKA__SASL_PASSWORD": "geheim"}
    with serving(sqlite.environment(), tmp_path / "worker.log", **secret) as port:
        for path in ("/", "/status", "/metrics", "/livez", "/nowhere", "/%3Cscript%3E"):
            _, headers, body = asked(port, path)
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert headers["Cache-Control"] == "no-store"
            assert headers["Content-Security-Policy"].startswith("default-src 'none'; ")
            assert "Access-Control-Allow-Origin" not in headers
            assert b"%3C" not in body
            assert b"geheim" not in body
        code, headers, body = asked(port, "/")
        assert (code, body) == (200, PAGE)
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert headers["Content-Security-Policy"] == POLICY
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"):
            code, headers, _ = asked(port, "/status", method)
            assert (code, headers["Allow"]) == (405, "GET"), method


async def test_on_loopback_only_names_of_the_machine_itself_are_answered(
    sqlite: Cluster, tmp_path: Path
) -> None:
    """A page elsewhere may make its own name lead to 127.0.0.1, and would then read what it asks for."""
    await sqlite.with_topics()
    with serving(sqlite.environment(), tmp_path / "worker.log") as port:
        for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "[::1]:80", "127.9.9.9"):
            assert asked(port, "/status", Host=host)[0] == 200, host
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "localhost.evil",
        ):
            assert asked(port, "/status", Host=host)[0] == 421, host
    with serving(
        sqlite.environment(), tmp_path / "open.log", FREEZEPOINT_HTTP__HOST="0.0.0.0"
    ) as port:  # an orchestrator asks by whatever name it has for it
        assert asked(port, "/status", Host="worker.example")[0] == 200


async def test_a_name_that_no_host_can_have_is_told(sqlite: Cluster) -> None:
    worker = Worker(sqlite.transport(1_000_000), WorkerSettings())
    with pytest.raises(ConfigurationError, match=r"cannot listen on a\.\.b:0: .*; set http\.host"):
        async with health.serving(worker, HttpSettings(host="a..b", port=0)):
            pass


@pytest.fixture
async def large_page(sqlite: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """The port of a server whose page no kernel takes in whole."""
    monkeypatch.setattr(health, "PAGE", b"x" * 64 * 1024 * 1024)
    async with (
        await sqlite.with_topics() as transport,
        health.serving(Worker(transport, WorkerSettings()), HttpSettings(port=0)) as port,
    ):
        assert port is not None
        yield port


async def test_who_does_not_read_its_answer_is_cut_off(
    large_page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "REQUEST_S_MAX", 0.5)
    reader, writer = await asyncio.open_connection("127.0.0.1", large_page, limit=1)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await poll_until_async(lambda: _is_gone(writer), 10, "the server cuts it off")
    with pytest.raises(ConnectionError):
        await reader.read()
    writer.close()


async def _is_gone(writer: asyncio.StreamWriter) -> bool:
    """Nothing is read here, so that only what is written tells."""
    writer.write(b"x")
    return writer.transport.is_closing()


async def test_however_many_are_slow_who_is_quick_is_answered(large_page: int) -> None:
    slow = [await asyncio.open_connection("127.0.0.1", large_page) for _ in range(health.CONNECTIONS_MAX + 5)]
    code, _, body = await asyncio.to_thread(asked, large_page, "/livez")
    assert (code, body) == (200, b"ok\n")
    assert [await reader.read() for reader, _ in slow[:5]] == [b""] * 5, "the oldest are cut off"
    for _, writer in slow:
        writer.close()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("LOCALHOST", True),
        ("0.0.0.0", False),
        ("::", False),
        ("box", False),
    ],
)
def test_what_loopback_is(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_the_policy_names_what_stands_in_the_page_and_nothing_else() -> None:
    assert POLICY.count("'sha256-") == PAGE.count(b"<style>") + PAGE.count(b"<script>") == 2
    assert "unsafe" not in POLICY
    text = PAGE.decode().replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(
        r"""https?:|\bsrc=|url\(|@import|style="|\bon\w+=|innerHTML|insertAdjacent|eval\(""", text
    )


# --------------------------------------------------------------------------------------------------------- bounded


def test_what_happened_lately_is_bounded() -> None:
    recent = Recent()
    for number in range(3 * FINISHED_MAX):
        recent.finished.append(
            Finished(f"r{number}", 0, number, masked=False, reasons=(), seconds=0.1, at=0.0)
        )
        recent.sample(float(number), Counter(records=10 * number))
    recent.failed("x", ValueError("long " * 1_000))
    told = recent.as_json()
    assert [done["rollout_id"] for done in told["finished"]] == [
        f"r{149 - number}" for number in range(FINISHED_MAX)
    ]
    assert len(told["last_error"]["error"]) == 500
    assert len(recent._samples) == SAMPLES_MAX


# --------------------------------------------------------------------------------------------------------- browser


def chromium(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[bytes]:
    assert CHROMIUM is not None
    return subprocess.run(
        [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=5000",
            "--enable-logging=stderr",
            *options,
        ],
        capture_output=True,
        timeout=110,
        check=True,
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
async def test_the_page_shows_a_worker_in_a_browser(sqlite: Cluster, tmp_path: Path) -> None:
    transport = await sqlite.with_topics()
    await publish(
        transport,
        [
            entry("run7.12-0", "c", [1], [2]),
            complete("run7.12-0"),
            entry("fork", "m", [1, 2], [3]),
            entry("fork", "x", [1, 2, 3, 4], [5]),
            entry("fork", "y", [1, 2, 3, 9], [6]),
            complete("fork", metadata={"note": EVIL}),
            complete("empty"),
            entry("still-open", "c", [1], [2], model=EVIL),
        ],
    )
    await publish_raw(transport, [OutputRecord(Topic.TOKENS, b"bad", EVIL.encode())])
    with serving(sqlite.environment(), tmp_path / "worker.log", FREEZEPOINT_WORKER__GROUP=EVIL) as port:
        poll_until(
            lambda: json.loads(get(port, "/status")[1])["counts"].get("results") == 3, 30, "three results"
        )
        shown = chromium(tmp_path, "--dump-dom", f"http://127.0.0.1:{port}/")
    dom = shown.stdout.decode()
    main = dom.split("<main")[1].split("</main>")[0]
    assert 'data-drawn="yes"' in dom
    assert "<title>freezepoint worker</title>" in dom
    for text in ("run7.12-0", "freezepoint inspect fork", "still-open", "multiple_chains", "no_records"):
        assert text in main, text
    assert main.count("<svg") >= 2
    assert ">4 here<" in main
    assert "&lt;img src=x" in main  # the group's name, as text
    assert "<img" not in main
    assert "<script" not in main
    assert "CONSOLE" not in shown.stderr.decode()  # no script error, nothing that the policy refused
