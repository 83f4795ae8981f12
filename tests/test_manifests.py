"""The compositions of docs/examples: their commands are ours, their parts know each other, and Kubernetes'
published schemas take them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from sgla.cli.args import parse
from sgla.cli.route import config_of
from sgla.cli.settings import load_config
from sgla.config import Config
from sgla.resolve import check
from sgla.route import routes
from sgla.route.config import RouteConfig

EXAMPLES = Path(__file__).parents[1] / "docs/examples"
KUBERNETES = ["kubernetes.yaml", "disaggregated-kubernetes.yaml", "nodes-kubernetes.yaml", "kuberay.yaml"]
COMPOSE = ["compose.yaml", "disaggregated-compose.yaml"]
PORTS = {"serve": 30000, "route": 30080}
OF_CLUSTERS = {"ray-head", "ray-worker"}  # containers that KubeRay gives a command
FROM_KUBERNETES = {"SGLA_NODE_RANK": "1"}


@cache
def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def settings(words: list[str], environment: dict[str, str]) -> Config | RouteConfig:
    """Those of one of our commands, which are checked as at a start."""
    args = parse(words)
    if words[0] == "route":
        return config_of(args)
    config = load_config(args.flags, None, environment)
    check(config)
    return config


def templates(document: Any) -> Iterator[Any]:
    """Of pods, wherever they stand."""
    if isinstance(document, dict):
        if "containers" in document.get("spec", {}):
            yield document
            return
        for value in document.values():
            yield from templates(value)
    elif isinstance(document, list):
        for value in document:
            yield from templates(value)


def environment(container: Any) -> dict[str, str]:
    found = {each["name"]: each.get("value") for each in container.get("env", ())}
    return {name: value or FROM_KUBERNETES.get(name, "secret") for name, value in found.items()}


def test_all_are_looked_at() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.yaml")) == sorted(KUBERNETES + COMPOSE)


@pytest.mark.parametrize("name", KUBERNETES)
def test_pods_run_our_commands(name: str) -> None:
    for template in (each for document in documents(name) for each in templates(document)):
        volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
        volumes |= {"models"} if name == "nodes-kubernetes.yaml" else set()
        for container in template["spec"]["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
            if container["name"] in OF_CLUSTERS:
                continue
            config = settings(container["args"], environment(container))
            port = PORTS[container["args"][0]]
            assert config.port == port
            ports = {each["containerPort"] for each in container["ports"]}
            assert port in ports
            if isinstance(config, Config) and config.role == "prefill":
                assert config.kv_transfer_port in ports
            for probe in ("readinessProbe", "livenessProbe"):
                if "httpGet" in (asked := container.get(probe, {})):
                    assert asked["httpGet"]["port"] == port
                    assert asked["httpGet"]["path"] in routes.HEALTH | routes.LIVE


@pytest.mark.parametrize("name", KUBERNETES)
def test_services_find_pods(name: str) -> None:
    pods = [each for document in documents(name) for each in templates(document)]
    for service in (each for each in documents(name) if each["kind"] == "Service"):
        selector = {k: v for k, v in service["spec"]["selector"].items() if "kubernetes.io" not in k}
        found = [pod for pod in pods if selector.items() <= pod.get("metadata", {}).get("labels", {}).items()]
        assert len(found) == 1, service["metadata"]["name"]
        if service["spec"].get("clusterIP") == "None":
            continue
        [container] = found[0]["spec"]["containers"]
        ports = {each["containerPort"] for each in container["ports"]}
        assert {each["targetPort"] for each in service["spec"]["ports"]} <= ports


def test_names_in_flags_are_those_of_services() -> None:
    words = [*_words("disaggregated-kubernetes.yaml"), *_words("nodes-kubernetes.yaml")]
    services = {
        each["metadata"]["name"]: each["spec"]
        for name in KUBERNETES
        for each in documents(name)
        if each["kind"] == "Service"
    }
    found = [word.split("://")[1].rsplit(":", 1) for word in words if "://" in word]
    found += [["sgla-nodes", "29501"]]
    assert len(found) == 3
    for host, port in found:
        assert [each["port"] for each in services[host]["ports"]] == [int(port)]
    [nodes] = [each for each in documents("nodes-kubernetes.yaml") if each["kind"] == "StatefulSet"]
    assert nodes["spec"]["serviceName"] == "sgla-nodes"
    [container] = nodes["spec"]["template"]["spec"]["containers"]
    config = settings(container["args"], environment(container))
    assert isinstance(config, Config)
    assert config.nnodes == nodes["spec"]["replicas"]
    assert config.dist_init_addr == "sgla-0.sgla-nodes:29501"
    assert config.local_ranks == container["resources"]["limits"]["nvidia.com/gpu"]


def _words(name: str) -> list[str]:
    pods = [each for document in documents(name) for each in templates(document)]
    return [word for pod in pods for container in pod["spec"]["containers"] for word in container["args"]]


@pytest.mark.parametrize("name", COMPOSE)
def test_compositions_run_our_commands(name: str) -> None:
    [composition] = documents(name)
    services = composition["services"]
    for service in services.values():
        words = shlex.split(service["command"])
        settings(words, service.get("environment", {}))
        hosts = [word.split("://")[1].split(":")[0] for word in words if "://" in word]
        assert set(hosts) <= set(services)
        mounted = {each.split(":")[0] for each in service.get("volumes", ())}
        assert mounted <= set(composition["volumes"])


def test_what_ray_starts() -> None:
    service, job, _ = documents("kuberay.yaml")
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, name = application["import_path"].split(":")
    source = Path(__file__).parents[1] / f"{module.replace('.', '/')}.py"
    assert f"def {name}(" in source.read_text()
    assert f'name="{application["deployments"][0]["name"]}"' in source.read_text()
    check(Config(**application["args"]))
    first, *words = shlex.split(job["spec"]["entrypoint"])
    config = settings(words, {})
    assert (first, isinstance(config, Config) and config.executor) == ("sgla", "ray")
    assert isinstance(config, Config)
    for template in templates(job):
        [container] = template["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == config.tp
    dockerfile = (EXAMPLES / "ray.Dockerfile").read_text()
    for spec in (service["spec"]["rayClusterConfig"], job["spec"]["rayClusterSpec"]):
        assert f"ray[default,serve]=={spec['rayVersion']}" in dockerfile


@pytest.mark.slow
@pytest.mark.parametrize("name", KUBERNETES)
def test_the_published_schemas_take_them(name: str) -> None:
    """Of Ray's own kinds, which are not Kubernetes', the pods."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in documents(name):
        if document["apiVersion"].startswith("ray.io/"):
            parts = [
                {"apiVersion": "v1", "kind": "PodTemplate", "template": each} for each in templates(document)
            ]
            assert len(parts) == 2
        else:
            parts = [document]
        for part in parts:
            kubernetes_validate.validate(part, "1.32", strict=True)
            broken = yaml.safe_load(yaml.safe_dump(part))
            broken["nonsense"] = 1
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(broken, "1.32", strict=True)
