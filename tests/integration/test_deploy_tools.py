"""deploy/ under the tools that judge such files: Kustomize, Kubernetes' own schemas, promtool, hadolint. Who lacks one skips."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from freezepoint.settings import Settings
from tests.deployment import DEPLOY, KUBERNETES, OVERLAY, Manifest, kustomized, matches, only, pod_of

pytestmark = pytest.mark.skipif(not DEPLOY.exists(), reason="deploy/ is not part of this copy")

BASE = KUBERNETES / "base"
RELEASES = ("1.30", "1.33", kubernetes_validate.latest_version())
OTHERS = {"ScaledObject", "TriggerAuthentication"}
"""KEDA's: Kubernetes has no schema of them."""
UNITS = {"Mi": 2**20, "Gi": 2**30}


def tool(name: str) -> str:
    """The program's path, from where Python's packages put theirs, or from the PATH; skips where it is not there."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def size(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


# ---------------------------------------------------------------------------------------------------- linters


def test_hadolint_has_nothing_to_say() -> None:
    assert not run(tool("hadolint"), DEPLOY / "docker" / "Dockerfile")


def test_promtool_takes_the_rules_and_their_tests_pass() -> None:
    promtool = tool("promtool")
    folder = DEPLOY / "prometheus"
    run(promtool, "check", "rules", folder / "alerts.yaml")
    assert "SUCCESS" in run(promtool, "test", "rules", folder / "alerts_test.yaml")


def test_promtool_takes_compose_s_configuration(tmp_path: Path) -> None:
    promtool = tool("promtool")
    for path in (DEPLOY / "compose" / "prometheus.yaml", DEPLOY / "prometheus" / "alerts.yaml"):
        shutil.copy(path, tmp_path)
    run(promtool, "check", "config", tmp_path / "prometheus.yaml")


# ------------------------------------------------------------------------------------------------- kubernetes


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("folder", [BASE, OVERLAY], ids=lambda folder: folder.name)
def test_kubernetes_schemas_take_the_manifests(folder: Path, release: str) -> None:
    kinds = set()
    for manifest in kustomized(folder):
        if manifest["kind"] not in OTHERS:
            kubernetes_validate.validate(manifest, release, strict=True)
            kinds.add(manifest["kind"])
    assert {"Deployment", "PodDisruptionBudget", "NetworkPolicy", "Service", "ServiceAccount"} <= kinds


def test_the_schemas_would_notice_a_misspelt_field() -> None:
    deployment = only(kustomized(BASE), "Deployment")
    pod_of(deployment)["spec"]["containers"][0]["securityContext"]["readOnlyRoot"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, RELEASES[0], strict=True)


def test_kubeconform_takes_the_manifests(tmp_path: Path) -> None:
    kubeconform = tool("kubeconform")
    manifests = kustomized(OVERLAY)
    for manifest in manifests:
        if manifest["kind"] not in OTHERS:
            standalone_schema(manifest, tmp_path)
    path = tmp_path / "overlay.yaml"
    path.write_text(yaml.safe_dump_all(manifests))
    location = f"{tmp_path}/{{{{ .ResourceKind }}}}{{{{ .KindSuffix }}}}.json"
    printed = run(kubeconform, "-summary", "-skip", ",".join(OTHERS), "-schema-location", location, path)
    assert f"Valid: {len(manifests) - len(OTHERS)}, Invalid: 0, Errors: 0" in printed


def standalone_schema(manifest: Manifest, folder: Path) -> None:
    """Write a kind's schema with all that it refers to inside, since kubeconform would else look for that on the network."""
    package = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / "v1.33.0-local-strict"
    group, _, version = manifest["apiVersion"].rpartition("/")
    name = "-".join(filter(None, [manifest["kind"].lower(), group.split(".")[0], version]))
    within: Any = json.loads((package / "_definitions.json").read_text())["$defs"]
    schema = json.loads((package / f"{name}.json").read_text().replace("/api/_definitions.json#", "#"))
    (folder / f"{name}.json").write_text(json.dumps({**schema, "$defs": within}))


def test_every_selector_takes_the_workers_pods_and_no_other() -> None:
    manifests = kustomized(OVERLAY)
    worker = pod_of(only(manifests, "Deployment"))["metadata"]["labels"]
    job = pod_of(only(manifests, "Job"))["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget"):
        selector = only(manifests, kind)["spec"]["selector"]
        assert matches(selector, worker)
        assert not matches(selector, job)
    policy = only(manifests, "NetworkPolicy")["spec"]["podSelector"]
    assert matches(policy, worker)
    assert matches(policy, job)
    service = only(manifests, "Service")["spec"]["selector"]
    assert matches({"matchLabels": service}, worker)
    assert not matches({"matchLabels": service}, job)


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_a_pod_has_no_privilege_and_no_secret_of_its_own(kind: str) -> None:
    spec = pod_of(only(kustomized(OVERLAY), kind))["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 10001
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+", container["image"])
    for variable in container["env"]:
        assert "secretKeyRef" in variable["valueFrom"]
    data = only(kustomized(OVERLAY), "ConfigMap")["data"]
    assert not [name for name in data if "PASSWORD" in name]


def test_the_component_oauth_gives_pods_a_token_in_place_of_a_secret(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path, dirs_exist_ok=True)
    overlay = tmp_path / "overlays" / "example"
    (overlay / "kustomization.yaml").write_text(
        "resources: [../../base]\ncomponents: [../../components/topics, ../../components/oauth]\n"
    )
    manifests = kustomized(overlay)
    data = only(manifests, "ConfigMap")["data"]
    assert data["FREEZEPOINT_KAFKA__SASL_MECHANISM"] == "OAUTHBEARER"
    token = Path(data["FREEZEPOINT_KAFKA__SASL_OAUTH_TOKEN_FILE"])
    accounts = {m["metadata"]["name"] for m in manifests if m["kind"] == "ServiceAccount"}
    for kind, account in (("Deployment", "freezepoint"), ("Job", "freezepoint-admin")):
        workload = only(manifests, kind)
        kubernetes_validate.validate(workload, RELEASES[0], strict=True)
        spec = pod_of(workload)["spec"]
        assert spec["serviceAccountName"] == account
        assert account in accounts
        (container,) = spec["containers"]
        assert not container.get("env"), "a password beside the token would be refused"
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        (volume,) = [volume for volume in spec["volumes"] if volume["name"] == mounts[str(token.parent)]]
        (source,) = volume["projected"]["sources"]
        assert source["serviceAccountToken"]["path"] == token.name
        assert str(Path(data["FREEZEPOINT_KAFKA__SSL_CA_FILE"]).parent) in mounts, "the others stay"


def test_a_worker_s_limits_hold_what_its_settings_ask_for() -> None:
    manifests = kustomized(OVERLAY)
    spec = pod_of(only(manifests, "Deployment"))["spec"]
    data = only(manifests, "ConfigMap")["data"]
    defaults = Settings().worker
    (container,) = spec["containers"]
    memory = int(data["FREEZEPOINT_WORKER__MEMORY_BYTES_MAX"]) + defaults.pending_bytes_max
    assert size(container["resources"]["limits"]["memory"]) > 2 * memory
    spool = next(volume for volume in spec["volumes"] if volume["name"] == "spool")["emptyDir"]["sizeLimit"]
    assert size(spool) >= 1.5 * int(data["FREEZEPOINT_WORKER__SPOOL_BYTES_MAX"])
    assert spec["terminationGracePeriodSeconds"] > defaults.shutdown_timeout_s + 10
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    (folder,) = re.findall(r"FREEZEPOINT_WORKER__SPOOL_FOLDER=(\S+)", dockerfile)
    assert folder in mounts
    assert str(Path(data["FREEZEPOINT_KAFKA__SSL_CA_FILE"]).parent) in mounts


def test_probes_ask_the_endpoints_of_the_image_s_port() -> None:
    (container,) = pod_of(only(kustomized(OVERLAY), "Deployment"))["spec"]["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/livez",
        "liveness": "/livez",
        "readiness": "/readyz",
    }
    (port,) = container["ports"]
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert f"FREEZEPOINT_HTTP__PORT={port['containerPort']}" in (DEPLOY / "docker" / "Dockerfile").read_text()


def test_the_scaler_keeps_to_the_partitions_and_never_takes_the_last_worker() -> None:
    manifests = kustomized(OVERLAY)
    scaled = only(manifests, "ScaledObject")["spec"]
    deployment = only(manifests, "Deployment")
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"], "it would fight the scaler at every apply"
    assert scaled["minReplicaCount"] >= 1
    assert scaled.get("idleReplicaCount") is None
    (job,) = pod_of(only(manifests, "Job"))["spec"]["containers"]
    assert scaled["maxReplicaCount"] == int(job["args"][-1])
    (trigger,) = scaled["triggers"]
    data = only(manifests, "ConfigMap")["data"]
    assert trigger["metadata"]["consumerGroup"] == data["FREEZEPOINT_WORKER__GROUP"]
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    authentication = only(manifests, "TriggerAuthentication")
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]


KEDA_FIELDS = {
    "": {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "advanced", "triggers"},
    "trigger": {"type", "metadata", "authenticationRef"},
    "metadata": {
        "bootstrapServers", "consumerGroup", "topic", "lagThreshold", "activationLagThreshold", "offsetResetPolicy",
        "allowIdleConsumers", "excludePersistentLag",
    },
    "parameters": {"sasl", "username", "password", "tls", "ca"},
}  # fmt: skip
"""Those of KEDA's Kafka scaler that are used here. A field that is misspelt would be ignored in silence."""


def test_the_scaler_s_fields_are_keda_s() -> None:
    manifests = kustomized(OVERLAY)
    spec = only(manifests, "ScaledObject")["spec"]
    assert spec.keys() <= KEDA_FIELDS[""]
    (trigger,) = spec["triggers"]
    assert trigger.keys() <= KEDA_FIELDS["trigger"]
    assert trigger["metadata"].keys() <= KEDA_FIELDS["metadata"]
    references = only(manifests, "TriggerAuthentication")["spec"]["secretTargetRef"]
    assert {reference["parameter"] for reference in references} == KEDA_FIELDS["parameters"]
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "x"},
        "spec": {
            "maxReplicas": spec["maxReplicaCount"],
            "scaleTargetRef": {"kind": "Deployment", "name": "x"},
            "behavior": behavior,
        },
    }
    kubernetes_validate.validate(autoscaler, RELEASES[0], strict=True)
