"""Manifests for Kubernetes: schemas, the commands in them, and what must agree between them.

No test starts a cluster. Pod templates of custom resources are checked against the schema of a Pod; the schemas of the
custom resources themselves are not in this repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from p2pcast.daemon.http_access import OPEN_PATHS
from tests.deploy.deploy_files import ROOT
from tests.deploy.kubernetes_files import (
    KUBERNETES,
    OVERLAYS,
    Document,
    Pods,
    everything,
    is_ours,
    of_kind,
    overlay,
    parsed,
    pods,
    values,
    words,
)
from tests.deploy.network_rules import admitted

RELEASE = "1.37"
CUSTOM = {"PodMonitor", "LeaderWorkerSet", "RayCluster"}
GUIDE = ROOT / "docs" / "guides" / "kubernetes.md"
EVERY_POD = [
    pytest.param(found, id=f"{name}: {found.name} {number}")
    for name in ("everything", *OVERLAYS)
    for number, found in enumerate(pods(everything() if name == "everything" else overlay(name)))
]
BUILDS = ["everything", *OVERLAYS]
DIALS = {
    ("peer", "hub"): 7077,
    ("peer", "peer"): 7082,
    ("hub", "peer"): 7082,
    ("worker", "ledger"): 7080,
    ("worker", "hub"): 7077,
}


def build(name: str) -> tuple[Document, ...]:
    return everything() if name == "everything" else overlay(name)


def valid(document: Document) -> None:
    assert kubernetes_validate.validate(document, RELEASE, strict=True) == RELEASE


@pytest.mark.parametrize("name", BUILDS)
def test_documents_match_the_schema_of_kubernetes(name: str) -> None:
    for document in build(name):
        if document["kind"] not in CUSTOM:
            valid(document)
    for found in pods(build(name)):
        template = {**found.template, "metadata": {**found.template["metadata"], "name": "template"}}
        valid({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": template})


def test_schema_refuses_a_key_that_a_pod_does_not_have() -> None:
    [hub] = of_kind(overlay("run"), "StatefulSet")
    with pytest.raises(kubernetes_validate.ValidationError):
        valid({**hub, "spec": {**hub["spec"], "replica": 1}})


@pytest.mark.parametrize("found", EVERY_POD)
def test_arguments_are_read_by_the_command_itself(found: Pods) -> None:
    for container in found.containers:
        if is_ours(container):
            name, read = parsed(words(container), values(container))
            assert name in ("seed", "join", "ledger", "work", "fleet run"), container["name"]
            if name == "fleet run":
                from trainer_node.commands.offer_type import OfferType

                kinds = {OfferType().convert(text, None, None).kind for text in read["prices"]}
                assert kinds == {text.partition("=")[0] for text in read["providers"]}


def test_argument_that_the_command_does_not_know_is_refused() -> None:
    with pytest.raises(click.NoSuchOption):
        parsed(["join", "hub:7077", "--instal=vllm:http://127.0.0.1:8000"])
    with pytest.raises(AssertionError, match="NOWHERE"):
        words({"name": "a", "args": ["--task=$(NOWHERE)"]})


@pytest.mark.parametrize("found", EVERY_POD)
def test_environment_has_variables_that_are_read(found: Pods) -> None:
    for container in found.containers:
        own = {variable["name"] for variable in container.get("env", []) if variable["name"].startswith("P2PCAST_")}
        if is_ours(container):
            _, read = parsed(words(container), {})
            assert {name.removeprefix("P2PCAST_LEDGER_").lower() for name in own} <= read.keys()
        else:
            assert own <= {"P2PCAST_SOCK"}


@pytest.mark.parametrize("found", EVERY_POD)
def test_declared_ports_are_listened_on(found: Pods) -> None:
    numbers = [port["containerPort"] for container in found.containers for port in container.get("ports", [])]
    names = [port["name"] for container in found.containers for port in container.get("ports", [])]
    assert len(set(numbers)) == len(numbers)
    assert len(set(names)) == len(names)
    for container in filter(is_ours, found.containers):
        _, read = parsed(words(container), values(container))
        listened = {read[option][1] for option in ("listen", "http") if read.get(option)}
        assert listened == {port["containerPort"] for port in container.get("ports", [])}, container["name"]


@pytest.mark.parametrize("found", EVERY_POD)
def test_probes_ask_open_routes_of_the_containers_own_http(found: Pods) -> None:
    probed = set()
    for container in found.containers:
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            if kind in container:
                asked = container[kind]["httpGet"]
                assert asked["path"] in OPEN_PATHS
                assert asked["path"] == ("/readyz" if kind == "readinessProbe" else "/healthz")
                port = {p["name"]: p["containerPort"] for p in container["ports"]}[asked["port"]]
                _, read = parsed(words(container), values(container))
                assert read["http"] == ("::", port), "kubelet asks at the pod's address"
                probed.add(container["name"])
    assert probed == {c["name"] for c in filter(is_ours, found.containers)} - {"worker", "fleet"}


@pytest.mark.parametrize("found", EVERY_POD)
def test_engine_and_peer_share_user_socket_and_memory(found: Pods) -> None:
    peers = [container for container in found.containers if container["name"] == "peer"]
    for peer in peers:
        assert peer["restartPolicy"] == "Always", "a sidecar"
        assert "startupProbe" not in peer, "the engine starts before the peer is ready"
        shared = {(m["mountPath"], m["name"], m["subPath"]) for m in peer["volumeMounts"] if "subPath" in m}
        _, read = parsed(words(peer), values(peer))
        for container in found.spec["containers"]:
            if "P2PCAST_SOCK" in (known := values(container)):
                assert known["P2PCAST_SOCK"] == f"{read['state']}/install.sock"
                assert shared <= {(m["mountPath"], m["name"], m.get("subPath")) for m in container["volumeMounts"]}
                assert "runAsUser" not in container["securityContext"]
    [memory] = [volume for volume in found.spec["volumes"] if volume["name"] == "memory"]
    assert memory["emptyDir"]["medium"] == "Memory"
    assert memory["emptyDir"]["sizeLimit"]


@pytest.mark.parametrize("found", EVERY_POD)
def test_daemons_get_folders_that_other_users_cannot_change(found: Pods) -> None:
    made = set()
    for container in found.containers:
        mounts = {mount["mountPath"]: mount for mount in container.get("volumeMounts", [])}
        assert len(mounts) == len(container.get("volumeMounts", [])), container["name"]
        if container.get("command", [""])[0] == "install":
            assert container["command"][:4] == ["install", "-d", "-m", "0700"]
            for path in map(Path, container["command"][4:]):
                made.add((mounts[str(path.parent)]["name"], path.name))
        elif is_ours(container):
            _, read = parsed(words(container), values(container))
            state = mounts[str(read["state"])] if read.get("state") else None
            assert state is None or (state["name"], state["subPath"]) in made
            if "/dev/shm" in mounts:
                assert (mounts["/dev/shm"]["name"], mounts["/dev/shm"]["subPath"]) in made
        for mount in mounts.values():
            assert mount["name"] in found.volumes
    used = {mount["name"] for container in found.containers for mount in container.get("volumeMounts", [])}
    assert used == found.volumes


@pytest.mark.parametrize("found", EVERY_POD)
def test_pods_are_restricted(found: Pods) -> None:
    spec = found.spec
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False, "variables of services named p2pcast-… would be read as options"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 10001
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & spec.keys()
    for container in found.containers:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, container["name"]
        assert container["resources"]["limits"]["memory"]
    assert not any("hostPath" in volume for volume in spec["volumes"])


@pytest.mark.parametrize("found", EVERY_POD)
def test_plays_can_end_before_the_engine_does(found: Pods) -> None:
    pauses = [c["lifecycle"]["preStop"]["sleep"]["seconds"] for c in found.containers if "lifecycle" in c]
    drains = [parsed(words(c), values(c))[1]["drain_s"] for c in found.spec["containers"] if c["name"] == "worker"]
    assert all(pause > drain for pause in pauses for drain in drains)
    assert all(found.spec["terminationGracePeriodSeconds"] >= pause + 30 for pause in pauses)


@pytest.mark.parametrize("name", BUILDS)
def test_services_find_their_pods_and_ports(name: str) -> None:
    for service in of_kind(build(name), "Service"):
        [found] = [p for p in pods(build(name)) if service["spec"]["selector"].items() <= p.labels.items()]
        ports = {port["name"]: port["containerPort"] for c in found.containers for port in c.get("ports", [])}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
        assert service["spec"]["publishNotReadyAddresses"], "peers join before a version is published"


@pytest.mark.parametrize("name", BUILDS)
def test_dialled_hosts_are_services_of_the_namespace(name: str) -> None:
    services = {s["metadata"]["name"]: {p["port"] for p in s["spec"]["ports"]} for s in of_kind(build(name), "Service")}
    for found in pods(build(name)):
        for container in filter(is_ours, found.containers):
            _, read = parsed(words(container), values(container))
            for option in ("hub", "ledger"):
                if isinstance(read.get(option), tuple) and read[option][0] != "127.0.0.1":
                    host, port = read[option]
                    assert port in services[host]


@pytest.mark.parametrize("name", BUILDS)
def test_network_admits_the_daemons_dials_and_no_more(name: str) -> None:
    documents = build(name)
    labels = {c["name"]: p.labels for p in pods(documents) for c in p.containers if is_ours(c)}
    ports = {
        port["name"]: port["containerPort"]
        for p in pods(documents)
        for c in p.containers
        for port in c.get("ports", [])
    }
    for (source, target), port in DIALS.items():
        if source in labels and target in labels:
            assert admitted(documents, labels[source], labels[target], port), (source, target)
    trainer = {"p2pcast/node": "trainer"}
    assert admitted(documents, trainer, labels["hub"], 7077)
    assert not admitted(documents, {}, labels["peer"], 7082)
    assert not admitted(documents, trainer, labels["peer"], 7082)
    for http in (7078, 7079, 7081):
        assert not admitted(documents, labels["peer"], labels["hub"], http)
        assert not admitted(documents, {"a": "stranger"}, labels["hub"], http)
    prometheus = {"app.kubernetes.io/name": "prometheus"}
    for found in pods(documents):
        assert admitted(documents, prometheus, found.labels, ports["http"], "monitoring", named="http")
        assert not admitted(documents, prometheus, found.labels, 7080, "monitoring")


@pytest.mark.parametrize("name", OVERLAYS)
def test_network_admits_strangers_nowhere(name: str) -> None:
    for found in pods(overlay(name)):
        for port in (7077, 7080, 7082, 8000):
            assert not admitted(overlay(name), {"a": "stranger"}, found.labels, port, "default")


@pytest.mark.parametrize("name", BUILDS)
def test_prometheus_finds_each_http_port(name: str) -> None:
    [monitor] = of_kind(build(name), "PodMonitor")
    asked = [point["port"] for point in monitor["spec"]["podMetricsEndpoints"]]
    for found in pods(build(name)):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= found.labels.items()
        names = {port["name"] for c in found.containers for port in c.get("ports", [])}
        assert {name for name in names if name.endswith("http")} <= set(asked)
    assert {point["path"] for point in monitor["spec"]["podMetricsEndpoints"]} <= OPEN_PATHS
    assert {point["relabelings"][0]["replacement"] for point in monitor["spec"]["podMetricsEndpoints"]} == {"p2pcast"}


def test_secrets_are_documented_and_none_is_committed() -> None:
    text = GUIDE.read_text()
    needed = set(re.findall(r"secretName: ([\w-]+)|secretKeyRef: \{name: ([\w-]+)", "\n".join(
        path.read_text() for path in KUBERNETES.rglob("*.yaml")
    )))  # fmt: skip
    names = {first or second for first, second in needed}
    assert names == {"p2pcast-peer-token", "p2pcast-ledger-token", "p2pcast-worker-token", "p2pcast-database"}
    for name in names:
        assert re.search(rf"kubectl .*create secret generic {name} --from-", text), name
    assert not of_kind(everything(), "Secret")
    for path in KUBERNETES.rglob("kustomization.yaml"):
        assert "secretGenerator" not in yaml.safe_load(path.read_text())


def test_accounts_have_no_token_but_in_the_container_of_the_fleet() -> None:
    for account in of_kind(everything(), "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    holders = [
        container["name"]
        for found in pods(everything())
        for container in found.containers
        for volume in found.spec["volumes"]
        if any("serviceAccountToken" in source for source in volume.get("projected", {}).get("sources", []))
        and volume["name"] in {mount["name"] for mount in container.get("volumeMounts", [])}
    ]
    assert holders == ["fleet"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_images_are_named_by_the_overlay(name: str) -> None:
    for found in pods(overlay(name)):
        for container in found.containers:
            assert re.fullmatch(r"registry\.example/(vllm-with-)?p2pcast:[\d.]+", container["image"])


def test_overlays_choose_other_engines() -> None:
    kinds = {name: {p.owner["kind"] for p in pods(overlay(name))} for name in OVERLAYS}
    assert kinds == {
        "run": {"StatefulSet", "Deployment"},
        "several-hosts": {"StatefulSet", "LeaderWorkerSet"},
        "ray": {"StatefulSet", "RayCluster"},
    }
    for name in ("several-hosts", "ray"):
        roles: list[Any] = []
        for found in pods(overlay(name)):
            roles += [parsed(words(c), values(c))[1]["role"] for c in found.containers if c["name"] == "peer"]
        assert roles == ["lead", "member"]
