"""What deploy/ says, for tests: its files, the metrics in its queries, the settings in its environments, its manifests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from freezepoint.telemetry.metrics import COUNTERS, FREEZE_TO_PUBLISH, GAUGES, LABELLED

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCS = ROOT / "docs"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAY = KUBERNETES / "overlays" / "example"
FOREIGN_METRICS = {"up", "ALERTS"}
"""What Prometheus makes itself."""

Manifest = dict[str, Any]


def loaded(path: Path) -> Any:
    """A YAML file of one document."""
    return yaml.safe_load(path.read_text())


def metric_names() -> dict[str, set[str]]:
    """Every series that a worker exposes, with the labels it has beside those of the scrape."""
    series: dict[str, set[str]] = {f"{name}_total": set() for name in COUNTERS}
    series |= {f"{name}_total": {label} for name, (_, label, _) in LABELLED.items()}
    series |= {name: set() for name in GAUGES}
    histogram = FREEZE_TO_PUBLISH[0]
    return series | {f"{histogram}_bucket": {"le"}, f"{histogram}_sum": set(), f"{histogram}_count": set()}


def selectors(query: str) -> dict[str, set[str]]:
    """The series a query reads, with the labels it asks for. :raises ValueError: it is no PromQL."""
    read: dict[str, set[str]] = {}

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            labels = {matcher.name for matcher in node.matchers.matchers}
            read.setdefault(node.name or "", set()).update(labels)
        for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
            child = getattr(node, name, None)
            if child is not None:
                visit(child)
        for argument in getattr(node, "args", None) or ():
            visit(argument)

    visit(promql_parser.parse(query))
    return read


def alerts() -> list[Manifest]:
    """The rules of alerts.yaml."""
    (group,) = loaded(DEPLOY / "prometheus" / "alerts.yaml")["groups"]
    rules: list[Manifest] = group["rules"]
    return rules


def dashboard() -> Manifest:
    """Grafana's dashboard."""
    found: Manifest = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    return found


def dashboard_queries() -> list[str]:
    """Its queries, with an interval where Grafana puts one."""
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [annotation["expr"] for annotation in dashboard()["annotations"]["list"]]
    return [re.sub(r"\$__(rate_)?interval", "5m", query) for query in queries]


def kustomized(folder: Path) -> list[Manifest]:
    """What Kustomize makes of a folder; skips where it is not there."""
    command = _kustomize()
    if command is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def _kustomize() -> list[str] | None:
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    return ["kubectl", "kustomize"] if shutil.which("kubectl") else None


def only(manifests: list[Manifest], kind: str) -> Manifest:
    """The one manifest of that kind."""
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def pod_of(workload: Manifest) -> Manifest:
    """The pod that a deployment or job makes."""
    pod: Manifest = workload["spec"]["template"]
    return pod


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a selector of ``matchLabels`` takes a pod with these labels. An empty one takes every pod there is."""
    wanted: dict[str, str] = selector["matchLabels"]
    return wanted.items() <= labels.items()


def env_file(path: Path) -> dict[str, str]:
    """``NAME=value`` lines."""
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if line)


def environments() -> Iterator[tuple[str, dict[str, str]]]:
    """Every environment that deploy/ gives to freezepoint, with where it stands."""
    yield "worker.env", env_file(KUBERNETES / "base" / "worker.env")
    (generator,) = loaded(OVERLAY / "kustomization.yaml")["configMapGenerator"]
    yield "overlay", dict(literal.split("=", 1) for literal in generator["literals"])
    services = loaded(DEPLOY / "compose" / "compose.yaml")["services"]
    for name in ("topics", "worker"):
        yield f"compose {name}", services[name]["environment"]
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    yield "Dockerfile", dict(re.findall(r"(FREEZEPOINT_\w+)=(\S+)", dockerfile))
    for path in (KUBERNETES / "base" / "deployment.yaml", KUBERNETES / "components" / "topics" / "job.yaml"):
        (container,) = pod_of(loaded(path))["spec"]["containers"]
        yield path.name, {variable["name"]: "" for variable in container["env"]}
