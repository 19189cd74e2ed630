"""``inspect`` and ``report`` as commands, and the page in a real browser."""

from __future__ import annotations

import asyncio
import html
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import orjson
import pytest

from freezepoint_schemas import codec
from freezepoint_schemas.events import InputEvent, TokenEntry
from freezepoint_schemas.topics import Topic
from tests.events import clear, complete, entry
from tests.integration.kafka_kit import recreate, transport
from tests.integration.shell import Shell
from tests.integration.workers import publish, worker
from tests.polling import poll_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
FORK = [
    entry("fork", "m", [1, 2], [3]),
    entry("fork", "x", [1, 2, 3, 4], [5]),
    entry("fork", "y", [1, 2, 3, 9], [6]),
]
CHAIN = [entry("chain", "a", [1], [2]), entry("chain", "b", [1, 2, 3], [4])]


def written(shell: Shell, *events: InputEvent) -> str:
    (shell.folder / "log.jsonl").write_bytes(b"".join(codec.encode_event(event) + b"\n" for event in events))
    return "log.jsonl"


@pytest.fixture
def worked(shell: Shell) -> Shell:
    """A broker in which one rollout is masked, one is delivered, and one is open."""
    log = written(shell, *FORK, complete("fork"), *CHAIN, complete("chain"), entry("open", "a", [1], [2]))
    shell.ok("publish", log)
    shell.ok("run", "--until-idle")
    return shell


def test_a_rollout_is_explained_from_the_broker(worked: Shell) -> None:
    text = worked.ok("inspect", "fork").out.decode()
    assert "rollout fork: MASKED" in text
    assert "multiple_chains" in text
    assert "reading it as all_traces" in text
    assert re.search(r"the topic keeps it until 20\d\d-", text)
    assert "published  masked: multiple_chains, frozen at offset" in text
    assert "NOT THE PUBLISHED" not in text
    still_open = worked.ok("inspect", "open").out.decode()
    assert "still open" in still_open
    assert "published  not yet; workers have come to offset" in still_open


async def test_a_topic_that_was_created_again_is_said_plainly(
    kafka_bootstrap: str, unique_prefix: str, shell: Shell
) -> None:
    """Its ledger speaks of another log: of what is in this one it knows nothing, whatever offsets say."""
    where = ("--broker", f"kafka://{kafka_bootstrap}", "--topic-prefix", f"{unique_prefix}-")
    group = {"FREEZEPOINT_WORKER__GROUP": f"{unique_prefix}-group"}
    async with transport(kafka_bootstrap, unique_prefix) as made:
        await publish(made, [*FORK, complete("fork")])
        await asyncio.to_thread(shell.ok, "run", "--until-idle", *where, environment=group)
        before = await asyncio.to_thread(shell.ok, "inspect", "fork", *where)
        assert b"recreated" not in before.out
        await recreate(made, Topic.TOKENS)

        outcome = await asyncio.to_thread(shell, "inspect", "fork", *where)
        assert outcome.code == 2
        said = rf"{unique_prefix}-rollout-tokens\[0\] is not the log the ledger speaks of \(topic id \S+, not \S+\): the topic was recreated"
        assert re.search(said, outcome.err)

        await publish(made, [entry("fork", "m", [1, 2], [3]), complete("fork", reward=1.0)])
        text = (await asyncio.to_thread(shell.ok, "inspect", "fork", *where)).out.decode()
        assert re.search(f"NO WORKER WORKS ON THIS LOG: {said}", " ".join(text.split()))
        assert "rollout fork: trainable" in text, "by its own log"
        assert "published " not in text
        checked = await asyncio.to_thread(shell, "doctor", *where, environment=group)
        assert checked.code == 1
        assert re.search(said, checked.out.decode())


def test_what_was_published_otherwise_is_said_in_every_form(worked: Shell) -> None:
    """The worker ran with another delivery than the one that is asked about."""
    asked = ("inspect", "fork", "--delivery", "all_traces", "--html", "page.html")
    verdict = "published MASKED, built here trainable"
    remark = "NOT THE PUBLISHED RESULT: published masked: multiple_chains; built here (prefix_merging, all_traces) trainable"
    text = worked.ok(*asked).out.decode()
    [facts] = worked.ok(*asked, "--json").lines
    page = (worked.folder / "page.html").read_text()
    for found in (text, page):
        assert verdict in found
        assert remark in found
    assert (facts["verdict"], facts["remarks"][0]) == (verdict, remark)
    assert facts["published"]["is_delivery"] == "single_response"


def test_a_rollout_that_timed_out_is_explained_as_it_was_published(shell: Shell) -> None:
    shell.ok("publish", written(shell, *CHAIN))
    settings = {"FREEZEPOINT_WORKER__ROLLOUT_TIMEOUT_S": "0.3"}
    environment = shell.environment(
        {**settings, "FREEZEPOINT_BROKER": f"sqlite:///{shell.folder}/freezepoint.db"}
    )
    with worker(environment, shell.folder / "worker.log"):
        poll_until(lambda: bool(shell.ok("results").lines), 60.0, "the rollout times out")
    shell.ok("complete", "chain")
    text = shell.ok("inspect", "chain", "--html", "page.html").out.decode()
    [facts] = shell.ok("inspect", "chain", "--json").lines
    assert "rollout chain: MASKED" in text
    assert "published  masked: rollout_timeout, frozen at offset 1" in text
    assert "end        timed out" in text
    assert "offset 2: an end that came too late: the rollout was frozen at offset 1" in text
    assert (facts["mask_sample"], facts["published"]["same_log"], facts["remarks"]) == (True, True, [])
    assert "masked: rollout_timeout, frozen at offset 1" in (shell.folder / "page.html").read_text()


def test_every_life_of_an_id_can_be_asked_for(shell: Shell) -> None:
    """Two that were published, one that was cleared before its end, one that is open; in files those that ended."""
    log = written(
        shell, *FORK, complete("fork"), clear("fork"), FORK[0], complete("fork"), clear("fork", group_id="g"),
        FORK[1], clear("fork"), FORK[2]
    )  # fmt: skip
    shell.ok("publish", log)
    shell.ok("run", "--until-idle")
    told = [shell.ok("inspect", "fork", "--life", str(life)).out.decode() for life in (1, 2, 3, 4)]
    for number, (text, part) in enumerate(
        zip(
            told,
            ("multiple_chains", "published  delivered", "cleared before its end", "still open"),
            strict=True,
        ),
        1,
    ):
        assert text.startswith(f"rollout fork, life {number} of 4: ")
        assert f"; life {number} of 4\n" in text
        assert part in text
    assert shell.ok("inspect", "fork").out.decode() == told[3]
    assert shell.wrong(2, "inspect", "fork", "--life", "5") == "there is no life 5: 4 are known"
    assert "MASKED" in shell.ok("inspect", "fork", "--life", "1", "--file", log).out.decode()
    assert "there is no life 4" in shell.wrong(2, "inspect", "fork", "--life", "4", "--file", log)
    [facts] = shell.ok("inspect", "fork", "--life", "2", "--json").lines
    assert (facts["life"], facts["lives"], facts["mask_sample"]) == (2, 4, False)


def test_all_facts_as_json(worked: Shell) -> None:
    [facts] = worked.ok("inspect", "chain", "--json").lines
    assert facts["mask_sample"] is False
    assert [call["parent"] for call in facts["calls"]] == [None, "a"]


def test_what_is_not_there_is_said(worked: Shell) -> None:
    assert worked.wrong(2, "inspect", "nobody") == "nothing of rollout nobody is there"
    assert "no valid rollout id" in worked.wrong(2, "inspect", "no/id")
    assert "No such file" in worked.wrong(2, "inspect", "a", "--file", "nowhere")


def test_a_report_and_its_limits(worked: Shell) -> None:
    [report] = [orjson.loads(worked.ok("report").out)]
    assert (report["results"], report["masked_fraction"]) == (2, 0.5)
    assert report["reasons"] == {"multiple_chains": {"results": 1, "fraction": 0.5}}
    worked.ok("report", "--max-mask-fraction", "0.5", "--min-samples", "2")
    failed = worked("report", "--max-mask-fraction", "0.4")
    assert failed.code == 1
    assert "1 of 2 results is masked (50.0%), more than 40.0%" in failed.err
    assert orjson.loads(failed.out) == report
    few = worked("report", "--min-samples", "3")
    assert (few.code, few.err) == (1, "error: 2 results are fewer than the 3 that were asked for\n")
    worked.ok("report", "--max-mask-fraction", "0", "--delivery", "all_traces")
    assert "unknown delivery 'best'" in worked.wrong(2, "report", "--delivery", "best")


def test_a_report_says_how_far_results_are_behind(shell: Shell) -> None:
    calls = [entry(f"r{version}", "a", [1], [2], policy_version=version) for version in (3, 7)]
    built = shell.ok("build", written(shell, *calls, entry("silent", "a", [1], [2]))).out
    (shell.folder / "results.jsonl").write_bytes(built)
    for option, lag in ((("--policy-version", "9"), (9, 4.0, 6)), ((), (7, 2.0, 4))):
        said = orjson.loads(shell.ok("report", "--file", "results.jsonl", *option).out)["policy_versions"]
        assert (said["lag_to"], said["lag_mean"], said["lag_max"]) == lag


def test_a_report_of_files(worked: Shell) -> None:
    (worked.folder / "results.jsonl").write_bytes(worked.ok("results").out + b'{"no":"result"}\n')
    outcome = worked("report", "--file", "results.jsonl")
    assert outcome.code == 2
    assert "results.jsonl:3" in outcome.err
    assert orjson.loads(outcome.out)["results"] == 2


def test_evidence_of_masked_rollouts_is_kept_by_a_worker(shell: Shell) -> None:
    shell.ok("publish", written(shell, *FORK, complete("fork", reward=0.5), *CHAIN, complete("chain")))
    shell.ok("run", "--until-idle", environment={"FREEZEPOINT_WORKER__EVIDENCE_DIR": "evidence"})
    kept = sorted(path.name for path in (shell.folder / "evidence").iterdir())
    assert kept == [".freezepoint-evidence", "fork.tokens.jsonl"]
    [again] = shell.ok("build", "evidence").lines
    [result] = shell.ok("results", "--masked").lines
    assert again["snapshot"]["id"] == result["snapshot"]["id"]
    assert again["reward"] == 0.5
    assert "MASKED" in shell.ok("inspect", "fork", "--file", "evidence").out.decode()


def test_a_worker_refuses_to_keep_evidence_among_other_files(shell: Shell) -> None:
    (shell.folder / "store").mkdir()
    (shell.folder / "store" / "live.tokens.jsonl").touch()
    failed = shell("run", "--until-idle", environment={"FREEZEPOINT_WORKER__EVIDENCE_DIR": "store"})
    assert failed.code == 2
    assert "error: worker.evidence_dir store has other files in it (live.tokens.jsonl)" in failed.err
    assert [path.name for path in (shell.folder / "store").iterdir()] == ["live.tokens.jsonl"]


def large(turns: int = 24, given: int = 3_200, sampled: int = 1_000) -> list[TokenEntry]:
    """A conversation of about 100,000 tokens that forks once, in items that would like to be markup."""
    random = np.random.default_rng(0)
    evil = (
        "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"
    )
    entries: list[TokenEntry] = []
    history = random.integers(0, 150_000, given, dtype=np.int32)
    for turn in range(turns):
        generation = random.integers(0, 150_000, sampled, dtype=np.int32)
        made = TokenEntry(
            rollout_id="large",
            model_call_id=f"c{turn}",
            prompt_token_ids=history,
            generation_token_ids=generation,
            generation_log_probs=-random.standard_exponential(sampled),
            output_items=[{"type": evil, "content": [{"text": f"turn {turn} {evil}"}]}],
            created_at=float(turn),
        )
        entries.append(made)
        if turn != turns // 2:
            history = np.concatenate([history, generation])
        history = np.concatenate([history, random.integers(0, 150_000, given, dtype=np.int32)])
    return entries


PROBE = """<script>
const looked = {};
const wider = name => Math.max(...[...document.querySelectorAll(name)].map(found => found.scrollWidth - found.clientWidth));
setTimeout(() => {
  Object.assign(looked, { canvases: document.querySelectorAll("canvas").length, page: wider("html"), tree: wider("#tree"), strips: wider(".scroll") });
  const fold = document.querySelector(".fold");
  if (fold) { fold.open = true; fold.scrollIntoView(); }
  setTimeout(() => {
    looked.folded = document.querySelectorAll(".fold .strip").length;
    looked.painted = document.querySelectorAll(".fold canvas").length;
    document.documentElement.dataset.looked = JSON.stringify(looked);
  }, 1000);
}, 1000);
</script></body>"""
"""Looks at a page from within: what is painted, what is wider than its place, and what a fold does when it is opened."""


def drawn(page: Path, folder: Path, width: int = 1280) -> tuple[str, str, dict[str, int]]:
    """The page's document as a browser made it, what the browser complained of, and what the probe saw."""
    assert CHROMIUM is not None
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text().replace("</body>", PROBE))
    shown = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},800",
            "--virtual-time-budget=5000",
            "--enable-logging=stderr",
            "--dump-dom",
            probed.as_uri(),
        ],
        capture_output=True,
        timeout=60,
        check=True,
    )
    dom = shown.stdout.decode()
    looked = re.search(r'data-looked="([^"]*)"', dom)
    assert looked is not None, shown.stderr
    return dom, shown.stderr.decode(), orjson.loads(html.unescape(looked[1]))


@needs_chromium
@pytest.mark.parametrize("width", [700, 1280])
def test_the_page_draws_itself_in_a_browser(shell: Shell, tmp_path: Path, width: int) -> None:
    log = written(shell, *large(), complete("large", group_id="<b>g</b>"))
    shell.ok("inspect", "large", "--file", log, "--html", "page.html")
    dom, complaints, looked = drawn(shell.folder / "page.html", tmp_path, width)
    assert 'data-ready="yes"' in dom
    assert "<title>large - freezepoint inspect</title>" in dom
    assert looked["canvases"] >= 2
    assert [looked[part] for part in ("page", "tree", "strips")] == [0, 0, 0]
    assert dom.count('class="call"') >= 24
    assert "multiple_chains" in dom
    main = dom.split("<main")[1].split("</main>")[0]
    assert "<script" not in main
    assert "<img" not in main
    assert "<b>g</b>" not in main
    assert "CONSOLE" not in complaints  # no script error, nothing that the policy refused


@needs_chromium
def test_thousands_of_traces_are_drawn_as_they_are_looked_at(shell: Shell, tmp_path: Path) -> None:
    """Within the browser's time limit: once it took more than a minute."""
    forks = [entry("forks", f"f{number}", [1, 2, 3, 1_000 + number], [5, 6]) for number in range(3_000)]
    log = written(shell, entry("forks", "root", [1, 2], [3]), *forks, complete("forks"))
    shell.ok("inspect", "forks", "--file", log, "--html", "page.html")
    dom, complaints, looked = drawn(shell.folder / "page.html", tmp_path)
    assert 'data-ready="yes"' in dom
    assert looked["canvases"] <= 24
    assert looked["folded"] == 200
    assert 0 < looked["painted"] < 200
    assert [looked[part] for part in ("page", "tree", "strips")] == [0, 0, 0]
    assert "CONSOLE" not in complaints
