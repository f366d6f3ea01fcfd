"""Providers: real commands, and a Kubernetes API of one Deployment over real HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from p2pcast.ground.errors import LocalError, UsageError
from tests.support.process_ends import wait_for_end, written_pid
from trainer_node.scheduling.command_provider import CommandProvider
from trainer_node.scheduling.provider import StaticProvider, provider_of

# -- commands


def shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


async def test_commands_get_the_name_of_the_worker(tmp_path: Path):
    folder = tmp_path / "running"
    folder.mkdir()
    provider = CommandProvider(
        shell(f'touch "{folder}/$P2PCAST_WORKER"'), shell(f'rm "{folder}/$P2PCAST_WORKER"'), ["ls", str(folder)]
    )
    await provider.start("gpu 0")
    await provider.start("gpu-1")
    assert await provider.running() == ["gpu 0", "gpu-1"]
    await provider.stop("gpu 0")
    assert await provider.running() == ["gpu-1"]


async def test_without_a_list_command_the_provider_knows_its_own_workers():
    provider = CommandProvider(["true"], ["true"])
    await provider.start("a")
    await provider.start("b")
    await provider.stop("a")
    assert await provider.running() == ["b"]


async def test_a_failing_command_is_one_error_with_its_last_words():
    provider = CommandProvider(shell("echo no such zone; exit 3"), ["true"])
    with pytest.raises(LocalError, match=r"for worker gpu-0: exit status 3; its output ends with:\nno such zone"):
        await provider.start("gpu-0")
    assert await provider.running() == []
    with pytest.raises(LocalError, match="cannot run /no/such/program"):
        await CommandProvider(["/no/such/program"], ["true"]).start("gpu-0")


async def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path):
    pid_file = tmp_path / "pid"
    script = f"trap '' TERM; sleep 1000 & echo $! > {pid_file}; wait; wait; sleep 1000"
    limits_s = iter((2.0, 16.0, 128.0))
    while (child := written_pid(pid_file)) is None:  # a busy machine needs more time to start the child
        limit_s = next(limits_s)
        provider = CommandProvider(shell(script), ["true"], limit_s=limit_s, grace_s=0.1)
        with pytest.raises(LocalError, match=f"no end after {limit_s:g} s, so it was killed"):
            await provider.start("gpu-0")
    await asyncio.to_thread(wait_for_end, child)


async def test_a_cancelled_command_is_killed(tmp_path: Path):
    pid_file = tmp_path / "pid"
    provider = CommandProvider(shell(f"echo $$ > {pid_file}; exec sleep 1000"), ["true"], grace_s=0.1)
    starting = asyncio.create_task(provider.start("gpu-0"))
    child = await asyncio.to_thread(_written, pid_file)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await asyncio.to_thread(wait_for_end, child)


async def test_a_background_process_does_not_delay_its_start_command(tmp_path: Path):
    pid_file = tmp_path / "pid"
    provider = CommandProvider(shell(f"sleep 1000 & echo $! > {pid_file}"), ["true"], limit_s=60.0)
    await provider.start("gpu-0")
    os.kill(int(pid_file.read_text()), 9)


def _written(file: Path) -> int:
    while (pid := written_pid(file)) is None:
        time.sleep(0.01)
    return pid


# -- texts


async def test_a_text_names_a_provider():
    assert isinstance(provider_of("static:a,b"), StaticProvider)
    provider = provider_of("exec:sh -c 'exit 0' -- true -- echo gpu-7")
    await provider.start("gpu-7")
    assert await provider.running() == ["gpu-7"]


@pytest.mark.parametrize(
    "text",
    ["", "cloud:x", "static:", "static:a,a", "exec:start", "exec:start --", "exec:-- stop", "exec:a -- b -- c -- d",
     "exec:'a -- b", "kubernetes:rollouts", "kubernetes:/x"],
)  # fmt: skip
def test_other_texts_are_refused(text: str):
    with pytest.raises(UsageError, match="provider"):
        provider_of(text)


async def test_static_workers_are_neither_started_nor_stopped():
    provider = StaticProvider(["a"])
    assert await provider.running() == ("a",)
    for change in (provider.start, provider.stop):
        with pytest.raises(LocalError, match="by hand"):
            await change("a")


# -- Kubernetes


RELEASE = "1.37.0"
"""Release of Kubernetes whose published OpenAPI schema holds for every body."""


def valid(document: dict[str, Any]) -> dict[str, Any]:
    """The document, after a comparison with the published schema of its kind, which allows no other keys."""
    import kubernetes_validate

    assert kubernetes_validate.validate(document, RELEASE, strict=True) == "1.37"
    return document


class Cluster:
    """The API of one Deployment and its pods. Requests and answers are compared with the published OpenAPI schema, and
    requests are read by the client's own models.
    """

    SCALE = "/apis/apps/v1/namespaces/rl/deployments/work/scale"
    PODS = "/api/v1/namespaces/rl/pods"

    def __init__(self) -> None:
        self.replicas, self.resource_version = 2, 5
        self.pods = {f"work-{n}": {"phase": "Running"} for n in "ab"}
        self.annotations: dict[str, dict[str, str]] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.conflicts = 0
        self.fails = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get(self.SCALE, self.read)
        app.router.add_put(self.SCALE, self.replace)
        app.router.add_get(self.PODS, self.list)
        app.router.add_patch(self.PODS + "/{name}", self.patch)
        return app

    def scale(self) -> dict[str, object]:
        return {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": "work", "namespace": "rl", "resourceVersion": str(self.resource_version)},
            "spec": {"replicas": self.replicas},
            "status": {"replicas": self.replicas, "selector": "app=work"},
        }

    async def read(self, request: web.Request) -> web.Response:
        if self.fails:
            return web.json_response({"kind": "Status", "reason": "Forbidden"}, status=self.fails)
        return web.json_response(valid(self.scale()))

    async def replace(self, request: web.Request) -> web.Response:
        from kubernetes.client import V1Scale

        body = V1Scale.from_dict(valid(await request.json()))
        assert body is not None
        assert body.spec is not None
        assert body.metadata is not None
        self.asked.append(("PUT", request.content_type, body.metadata.resource_version))
        if self.conflicts or body.metadata.resource_version != str(self.resource_version):
            self.conflicts -= 1
            self.resource_version += 1
            return web.json_response({"kind": "Status", "reason": "Conflict"}, status=409)
        self.replicas, self.resource_version = body.spec.replicas, self.resource_version + 1
        return web.json_response(self.scale())

    async def list(self, request: web.Request) -> web.Response:
        assert request.query["labelSelector"] == "app=work"
        items = [
            {"metadata": {"name": name, "namespace": "rl", **extra.get("metadata", {})}, "status": extra}
            for name, extra in self.pods.items()
        ]
        for item in items:
            item["status"] = {"phase": item["status"]["phase"]}
        return web.json_response(valid({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items}))

    async def patch(self, request: web.Request) -> web.Response:
        from kubernetes import client

        body = json.loads(await request.text())
        valid({"apiVersion": "v1", "kind": "Pod"} | body)  # a merge patch leaves out what stays
        pod = client.V1Pod.from_dict(body)
        assert pod is not None
        assert pod.metadata is not None
        assert client.ApiClient().sanitize_for_serialization(pod) == body, "keys that a pod does not have"
        self.asked.append(("PATCH", request.content_type, request.match_info["name"]))
        self.annotations[request.match_info["name"]] = pod.metadata.annotations
        return web.json_response({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": request.match_info["name"]}})


@pytest.fixture
async def cluster():
    pytest.importorskip("kubernetes", reason="pip install 'p2pcast[kubernetes]'")
    pytest.importorskip("kubernetes_validate", reason="pip install 'p2pcast[dev]'")
    from kubernetes import client

    from trainer_node.scheduling.kubernetes_provider import KubernetesProvider

    made = Cluster()
    runner = web.AppRunner(made.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    configuration = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    configuration.retries = False
    with client.ApiClient(configuration) as api:
        yield made, KubernetesProvider(api, "rl", "work")
    await runner.cleanup()


@pytest.mark.parametrize(
    "change",
    [{"spec": {"replicas": "3"}}, {"spec": {"replica": 3}}, {"replicas": 3}, {"metadata": {"annotations": {"a": 1}}}],
)
def test_the_published_schema_refuses_other_bodies(change: dict[str, Any]):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install 'p2pcast[dev]'")
    with pytest.raises(kubernetes_validate.ValidationError):
        valid(Cluster().scale() | change)


async def test_a_start_raises_the_scale_by_one(cluster):
    state, provider = cluster
    assert await provider.running() == ["work-a", "work-b"]
    await provider.start("gpu-3")
    assert state.replicas == 3
    assert state.asked == [("PUT", "application/json", "5")]


async def test_the_pod_of_the_drained_worker_goes(cluster):
    state, provider = cluster
    await provider.stop("work-b")
    assert state.replicas == 1
    assert state.annotations == {"work-b": {"controller.kubernetes.io/pod-deletion-cost": "-2147483648"}}
    assert state.asked == [("PATCH", "application/merge-patch+json", "work-b"), ("PUT", "application/json", "5")]
    with pytest.raises(LocalError, match="no pod work-z"):
        await provider.stop("work-z")
    assert state.replicas == 1


async def test_a_conflict_is_tried_again_with_the_newest_state(cluster):
    state, provider = cluster
    state.conflicts = 2
    await provider.start("gpu-3")
    assert state.replicas == 3
    assert [version for _, _, version in state.asked] == ["5", "6", "7"]
    state.conflicts = 1000
    with pytest.raises(LocalError, match="the cluster answers 409 Conflict"):
        await provider.start("gpu-4")
    assert state.replicas == 3


async def test_ended_and_leaving_pods_are_no_workers(cluster):
    state, provider = cluster
    state.pods["work-c"] = {"phase": "Failed"}
    state.pods["work-d"] = {"phase": "Running", "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
    state.pods["work-e"] = {"phase": "Pending"}
    assert await provider.running() == ["work-a", "work-b", "work-e"]


async def test_a_refusing_or_unreachable_cluster_is_one_error(cluster):
    state, provider = cluster
    state.fails = 403
    with pytest.raises(LocalError, match="Kubernetes deployment rl/work: the cluster answers 403 Forbidden"):
        await provider.running()
