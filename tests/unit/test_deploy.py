"""deploy/ and the documents about it say what the code is: settings, metrics, alerts, rights, images."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from freezepoint import health
from freezepoint.settings import Settings
from freezepoint.telemetry import metrics
from freezepoint_schemas.topics import Topic, TopicNames
from tests import rights
from tests.deployment import (
    DEPLOY,
    DOCS,
    FOREIGN_METRICS,
    KUBERNETES,
    OVERLAY,
    ROOT,
    alerts,
    dashboard,
    dashboard_queries,
    env_file,
    environments,
    loaded,
    metric_names,
    selectors,
)

COMPOSE = DEPLOY / "compose" / "compose.yaml"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
SCRAPE_LABELS = {"job", "instance", "alertname", "alertstate"}
VARIABLE = re.compile(r"\bFREEZEPOINT_[A-Z0-9_]+[A-Z0-9]")
OTHER_VARIABLES = {
    "FREEZEPOINT_CONFIG",
    "FREEZEPOINT_LOG_LEVEL",
    "FREEZEPOINT_KAFKA_JARS",
    "FREEZEPOINT_REQUIRE_BROKER",
}
"""What the command line and the tests read beside the settings."""

pytestmark = pytest.mark.skipif(not DEPLOY.exists(), reason="deploy/ is not part of this copy")


# ------------------------------------------------------------------------------------------------- settings


def setting_names() -> set[str]:
    """As dotted paths, sections included."""
    names: set[str] = set()
    for name, field in Settings.model_fields.items():
        section = getattr(field.annotation, "model_fields", {})
        names |= {name, *(f"{name}.{inner}" for inner in section)}
    return names


def variable_names() -> set[str]:
    return {f"FREEZEPOINT_{name.upper().replace('.', '__')}" for name in setting_names()} | OTHER_VARIABLES


@pytest.mark.parametrize(
    ("where", "environment"),
    list(environments()),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_environment_names_real_settings_with_values_they_take(
    where: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment
    assert environment.keys() <= variable_names(), where
    for name, value in environment.items():
        if value:
            monkeypatch.setenv(name, value)
    Settings()


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda path: path.name)
def test_documents_name_variables_that_exist(path: Path) -> None:
    assert set(VARIABLE.findall(path.read_text())) <= variable_names()


@pytest.mark.parametrize("name", ["README.md", "docs/operations.md", "docs/runbooks.md"])
def test_documents_for_operators_name_settings_that_exist(name: str) -> None:
    named = set(re.findall(r"`((?:worker|kafka|sqlite|http|reader)\.[a-z_0-9]+)", (ROOT / name).read_text()))
    assert named
    known = setting_names()
    for setting in named:  # `kafka.sasl_…` stands for several
        assert setting in known or (setting.endswith("_") and any(each.startswith(setting) for each in known))


# -------------------------------------------------------------------------------------------------- metrics


def test_the_page_of_metrics_is_what_the_code_lists() -> None:
    """After a change of the metrics: ``make metrics``."""
    page = runpy.run_path(str(DEPLOY / "prometheus" / "metrics_page.py"))["page"]
    assert (DOCS / "metrics.md").read_text() == page()


def test_every_metric_is_on_the_page() -> None:
    text = (DOCS / "metrics.md").read_text()
    for name in metric_names():
        assert f"`{re.sub('_(bucket|sum|count)$', '', name)}`" in text


@pytest.mark.parametrize(
    "query",
    [*(rule["expr"] for rule in alerts()), *dashboard_queries()],
    ids=lambda query: " ".join(query.split())[:60],
)
def test_a_query_reads_series_and_labels_that_exist(query: str) -> None:
    read = selectors(query)
    assert read
    known = metric_names()
    for name, labels in read.items():
        assert name in known or name in FOREIGN_METRICS
        assert labels <= SCRAPE_LABELS | known.get(name, set())


def test_the_dashboard_shows_every_metric() -> None:
    shown = {name for query in dashboard_queries() for name in selectors(query)}
    unshown = metric_names().keys() - shown
    assert unshown == {f"{metrics.FREEZE_TO_PUBLISH[0]}_sum", f"{metrics.FREEZE_TO_PUBLISH[0]}_count"}


def test_the_dashboard_is_laid_out_without_overlaps_and_finds_its_data_source() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    (variable,) = [
        variable for variable in dashboard()["templating"]["list"] if variable["type"] == "datasource"
    ]
    (source,) = loaded(DEPLOY / "compose" / "grafana" / "datasources.yaml")["datasources"]
    assert variable["current"]["value"] == source["uid"]
    assert {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"} == {"${datasource}"}


# --------------------------------------------------------------------------------------------------- alerts


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / "runbooks.md").read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in alerts()]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_and_where_to_read_on(rule: dict[str, dict[str, str]]) -> None:
    name = str(rule["alert"])
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
    section = (DOCS / "runbooks.md").read_text().split(f"## {name}\n")[1].split("\n## ")[0]
    for part in ("**Means**", "**Look at**", "**Mends it**"):
        assert part in section


def test_every_alert_is_tested_to_be_silent_and_to_fire() -> None:
    tests = loaded(DEPLOY / "prometheus" / "alerts_test.yaml")["tests"]
    silent = {case["alertname"] for test in tests for case in test.get("alert_rule_test", ())}
    samples = [
        sample["labels"]
        for test in tests
        for case in test.get("promql_expr_test", ())
        for sample in case["exp_samples"]
    ]
    fired = {name for labels in samples for name in re.findall(r'alertname="(\w+)"', labels)}
    names = {rule["alert"] for rule in alerts()}
    assert silent == names
    assert fired == names


# --------------------------------------------------------------------------------------------------- rights


def test_the_script_grants_what_the_table_says() -> None:
    rows = [
        line.split("\t")
        for line in rights.TABLE.read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert len({tuple(row) for row in rows}) == len(rows)
    for role in {row[0] for row in rows}:
        expected = [
            (
                operation,
                resource.replace("-", "_"),
                pattern,
                name.format(prefix="p-", group="g", transactions="t"),
            )
            for named, operation, resource, pattern, name in rows
            if named == role
        ]
        granted = rights.granted(role, "User:x", PREFIX="p-", GROUP="g", TRANSACTIONS="t")
        assert [(right.operation, right.resource, right.pattern, right.name) for right in granted] == expected


def test_the_script_assumes_the_default_names() -> None:
    settings = Settings()
    groups = {
        role: [right.name for right in rights.granted(role, "User:x") if right.resource == "group"]
        for role in ("worker", "reader")
    }
    assert groups == {"worker": [settings.worker.group], "reader": [settings.reader.group]}
    (transactions,) = [
        right.name for right in rights.granted("worker", "User:x") if right.resource == "transactional_id"
    ]
    assert transactions == f"{settings.kafka.transactional_id_prefix}.{settings.topics[Topic.TOKENS]}."


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        rights.granted("nobody", "User:x")
    assert caught.value.returncode == 2
    assert "no role nobody" in caught.value.stderr


def test_the_guide_lists_every_role_with_its_rights() -> None:
    text = (DOCS / "operations.md").read_text()
    everything = set(TopicNames().all().values())
    for line in rights.TABLE.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        role, operation, resource, _, name = line.split("\t")
        (row,) = re.findall(rf"^\| {role} \| (.+) \|$", text, re.MULTILINE)
        parts = [part.strip() for part in re.split("[,;]", row)]
        subject = {"topic": name.removeprefix("{prefix}"), "group": "group"}.get(
            resource, "transactional ids"
        )
        assert any(
            operation in part.split() and (subject in part or (subject in everything and "all four" in part))
            for part in parts
        ), line


# ----------------------------------------------------------------------------------------------------- image


def test_the_image_is_pinned_and_runs_as_a_numbered_user() -> None:
    text = DOCKERFILE.read_text()
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BASE}", "${BASE}"]
    (user,) = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert user == "10001:10001"
    assert text.index("USER 10001") > text.rindex("RUN ")


def test_the_image_asks_the_liveness_endpoint_of_the_worker_it_starts() -> None:
    text = DOCKERFILE.read_text()
    assert "HEALTHCHECK" in text
    assert "/livez" in text.split("HEALTHCHECK")[1]
    assert "/livez" in (health.__doc__ or "")
    assert 'ENTRYPOINT ["freezepoint"]\nCMD ["run"]' in text


def test_the_build_context_has_what_the_image_copies_and_nothing_else() -> None:
    copied = {
        name
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE.read_text(), re.MULTILINE)
        for name in line.split()[:-1]
    }
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_installs_the_project_s_dependencies() -> None:
    program = [sys.executable, str(DEPLOY / "docker" / "dependencies.py"), str(ROOT / "pyproject.toml")]

    def lines(*arguments: str) -> list[str]:
        done = subprocess.run([*program, *arguments], capture_output=True, text=True, check=False)
        return done.stdout.splitlines() if done.returncode == 0 else []

    plain = lines("")
    assert any(line.startswith("aiokafka") for line in plain)
    assert plain == lines()
    with_audit = lines("audit")
    assert with_audit[: len(plain)] == plain
    assert any(line.startswith("pip-audit") for line in with_audit)
    assert not lines("nonsense")


# --------------------------------------------------------------------------------------------------- compose


def test_compose_pins_its_images_and_publishes_on_loopback_only() -> None:
    services = loaded(COMPOSE)["services"]
    for name, service in services.items():
        if "build" not in service:
            assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name


def test_compose_and_tests_run_the_same_kafka() -> None:
    pom = (DEPLOY / "kafka-local" / "pom.xml").read_text()
    (version,) = re.findall(r"<artifactId>kafka_2\.13</artifactId>\s*<version>([\d.]+)</version>", pom)
    assert loaded(COMPOSE)["services"]["kafka"]["image"] == f"apache/kafka:{version}"


def test_compose_reaches_what_it_names() -> None:
    compose = loaded(COMPOSE)
    services = compose["services"]
    for service in services.values():
        assert set(service.get("depends_on", ())) <= services.keys()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE.parent / source).resolve().is_file()
            elif ":" in volume:
                assert source in compose["volumes"]
    build = services["worker"]["build"]
    assert (COMPOSE.parent / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    broker = services["worker"]["environment"]["FREEZEPOINT_BROKER"].removeprefix("kafka://")
    assert f"INTERNAL://{broker}" in services["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    (scrape,) = loaded(DEPLOY / "compose" / "prometheus.yaml")["scrape_configs"]
    (discovery,) = scrape["dns_sd_configs"]
    assert set(discovery["names"]) <= services.keys()
    assert f"FREEZEPOINT_HTTP__PORT={discovery['port']}" in DOCKERFILE.read_text()
    assert services["worker"]["deploy"]["replicas"] == 2


# ------------------------------------------------------------------------------------------------ kubernetes


def test_every_manifest_is_yaml_and_named_by_its_kustomization() -> None:
    for kustomization in KUBERNETES.rglob("kustomization.yaml"):
        folder = kustomization.parent
        said = loaded(kustomization)
        patches = [patch["path"] for patch in said.get("patches", []) if "path" in patch]
        named = [*said.get("resources", []), *patches]
        files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert {name for name in named if name.endswith(".yaml")} == files
        for name in files:
            for manifest in yaml.safe_load_all((folder / name).read_text()):
                assert manifest["metadata"]["name"].startswith("freezepoint")


def test_the_overlay_s_scaler_watches_what_its_workers_read() -> None:
    environment = env_file(KUBERNETES / "base" / "worker.env")
    (generator,) = loaded(OVERLAY / "kustomization.yaml")["configMapGenerator"]
    environment |= dict(literal.split("=", 1) for literal in generator["literals"])
    (patch,) = [
        yaml.safe_load(patch["patch"])
        for patch in loaded(OVERLAY / "kustomization.yaml")["patches"]
        if patch["target"]["kind"] == "ScaledObject"
    ]
    values = {step["path"].rsplit("/", 1)[1]: step["value"] for step in patch}
    names = TopicNames(environment["FREEZEPOINT_TOPIC_PREFIX"])
    assert values["topic"] == names[Topic.TOKENS]
    assert f"kafka://{values['bootstrapServers']}" == environment["FREEZEPOINT_BROKER"]
