"""The manifests of deploy/kubernetes are valid by Kubernetes's schemas and match the server that they start.

So does the container in deploy/docker.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from faser_backend.cli.main import app
from faser_backend.openai.app import Callers, make_app
from faser_backend.openai.server import DRAIN_S
from faser_backend.serving.parameters import ServeOptions
from faser_backend.triton import server
from faser_backend.triton.metrics import FAMILIES

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
SCHEMA_VERSION = "1.33"
NO_SCHEMA = {"kustomize.config.k8s.io", "inference.networking.k8s.io", "inference.networking.x-k8s.io"}
SERIES = re.compile(r"(nv_trt_llm_\w+)\{([^}]*)\}")


def manifests() -> dict[str, dict[str, Any]]:
    """Returns the declared objects by file, none for Helm values."""
    found = {str(path.relative_to(FOLDER)): yaml.safe_load(path.read_text()) for path in FOLDER.rglob("*.yaml")}
    return {name: content for name, content in found.items() if "kind" in content}


def deployment() -> dict[str, Any]:
    return manifests()["deployment.yaml"]["spec"]["template"]["spec"]


def container() -> dict[str, Any]:
    [only] = deployment()["containers"]
    return only


def unknown_series(text: str) -> list[str]:
    """Returns the selectors of gauges or labels that the server lacks."""
    unknown = []
    for family, selector in SERIES.findall(text):
        known = FAMILIES.get(family)
        asked = [] if known is None else re.findall(rf'{known.label}="?(\w+)"?', selector)
        if known is None or not asked or not set(asked) <= set(known.values):
            unknown.append(f"{family}{{{selector}}}")
    return unknown


def with_schema() -> list[str]:
    return [name for name, content in manifests().items() if content["apiVersion"].split("/")[0] not in NO_SCHEMA]


@pytest.mark.parametrize("name", with_schema())
def test_a_manifest_is_valid(name: str):
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    content = manifests()[name]
    validator.validate(content, SCHEMA_VERSION, strict=True)
    misspelt = {**content, "spec": {**content["spec"], "selektor": {}}}  # control
    with pytest.raises(validator.ValidationError):
        validator.validate(misspelt, SCHEMA_VERSION, strict=True)


def test_kustomize_names_every_resource():
    listed = manifests()["kustomization.yaml"]["resources"]
    assert sorted(listed) == sorted(with_schema())


def test_every_metric_is_one_of_the_server():
    texts = [path.read_text() for path in FOLDER.rglob("*.yaml")]
    assert sum(len(SERIES.findall(text)) for text in texts) >= 7
    assert [name for text in texts for name in unknown_series(text)] == []
    assert unknown_series('nv_trt_llm_request_metrics{request_type="waitng"}')  # controls
    assert unknown_series('nv_trt_llm_requests{request_type="waiting"}')
    made = set(re.findall(r"as: (\w+)", (FOLDER / "prometheus-adapter.yaml").read_text()))
    asked = {metric["pods"]["metric"]["name"] for metric in manifests()["hpa.yaml"]["spec"]["metrics"]}
    assert asked == made


def test_every_option_is_one_of_faser_serve():
    command = get_command(app).commands["serve"]  # pyright: ignore[reportAttributeAccessIssue]
    known = {name for option in command.params for name in option.opts}
    assert container()["command"] == ["faser", "serve"]
    assert {argument.partition("=")[0] for argument in container()["args"]} <= known
    [words] = re.findall("ENTRYPOINT (.+)", (FOLDER.parent / "docker" / "Dockerfile").read_text())
    entry = json.loads(words)
    assert entry[:2] == ["faser", "serve"] and {word for word in entry if word.startswith("--")} <= known


def test_probes_ask_ports_that_exist():
    arguments = dict(argument.partition("=")[::2] for argument in container()["args"])
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports["openai"] == int(arguments["--openai-port"])
    defaults = ServeOptions()
    assert (ports["triton-http"], ports["metrics"]) == (defaults.http_port, defaults.metrics_port)
    probes = [container()[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert [probe["port"] for probe in probes] == ["openai", "openai", "triton-http"]
    routes = {route.path for route in make_app(Path(), Callers()).routes}  # pyright: ignore
    assert {probe["path"] for probe in probes if probe["port"] == "openai"} <= routes
    metadata = manifests()["deployment.yaml"]["spec"]["template"]["metadata"]
    assert metadata["annotations"]["prometheus.io/port"] == str(ports["metrics"])
    pool = manifests()["gateway/inference-pool.yaml"]["spec"]
    assert pool["targetPorts"] == [{"number": ports["openai"]}]
    assert pool["selector"]["matchLabels"].items() <= metadata["labels"].items()


def test_a_pod_has_the_time_that_draining_takes():
    sleep = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = max(DRAIN_S, server.DRAIN_S) + server.UNLOAD_CALL_S + server.UNLOAD_S
    assert deployment()["terminationGracePeriodSeconds"] >= sleep + needed
    service = yaml.safe_load((FOLDER.parent / "docker" / "compose.yaml").read_text())["services"]["faser"]
    assert int(service["stop_grace_period"].removesuffix("s")) >= needed


def test_a_pod_may_write_where_the_server_must_and_nowhere_else():
    assert container()["securityContext"]["readOnlyRootFilesystem"] and deployment()["securityContext"]["runAsNonRoot"]
    writable = {mount["mountPath"] for mount in container()["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/tmp", "/cache", "/dev/shm"}
    caches = [entry["value"] for entry in container()["env"] if entry["name"].endswith("CACHE_DIR")]
    assert len(caches) == 2 and all(value.startswith("/cache/") for value in caches)
