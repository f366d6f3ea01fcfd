"""The role of the fleet's service account admits exactly the calls of the provider, which run here over HTTP."""

from __future__ import annotations

import re

from aiohttp import web
from kubernetes import client

from tests.deploy.kubernetes_files import everything, of_kind
from trainer_node.scheduling.kubernetes_provider import KubernetesProvider

VERBS = {("GET", True): "get", ("GET", False): "list", ("PUT", True): "update", ("PATCH", True): "patch"}
PATH = re.compile(
    r"/(?:apis/(?P<group>\w+)|api)/v1/namespaces/p2pcast/(?P<kind>\w+)(?:/(?P<name>[\w-]+)(?P<sub>/\w+)?)?"
)

Call = tuple[str, str, str, str | None]


class Cluster:
    """An API that answers the provider, and keeps its calls as verb, API group, resource and name."""

    def __init__(self) -> None:
        self.calls: set[Call] = set()

    async def answer(self, request: web.Request) -> web.Response:
        found = PATH.fullmatch(request.path)
        assert found is not None, request.path
        resource = found["kind"] + (found["sub"] or "")
        verb = VERBS[request.method, found["name"] is not None]
        self.calls.add((verb, found["group"] or "", resource, found["name"]))
        pod = {"metadata": {"name": "rollout-a"}, "status": {"phase": "Running"}}
        if resource == "pods":
            return web.json_response({"metadata": {}, "items": [pod]} if verb == "list" else pod)
        scale = {
            "metadata": {"resourceVersion": "1"},
            "spec": {"replicas": 1},
            "status": {"replicas": 1, "selector": "a"},
        }
        return web.json_response(scale)


async def test_role_admits_the_calls_of_the_provider_and_no_more() -> None:
    cluster, app = Cluster(), web.Application()
    app.router.add_route("*", "/{path:.*}", cluster.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    with client.ApiClient(configuration) as api:
        provider = KubernetesProvider(api, "p2pcast", "rollout")
        assert await provider.running() == ["rollout-a"]
        await provider.start("a")
        await provider.stop("rollout-a")
    await runner.cleanup()

    [role] = of_kind(everything(), "Role")
    granted = {
        (verb, group, resource, name)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [None])
    }
    # A role can name no pods that do not exist yet.
    asked = {(verb, group, kind, None if kind == "pods" else name) for verb, group, kind, name in cluster.calls}
    assert asked == granted


def test_role_is_bound_to_the_account_of_the_fleets_pod() -> None:
    [binding] = of_kind(everything(), "RoleBinding")
    [hub] = of_kind(everything(), "StatefulSet")
    assert [s["name"] for s in binding["subjects"]] == [hub["spec"]["template"]["spec"]["serviceAccountName"]]
    assert binding["roleRef"]["name"] == of_kind(everything(), "Role")[0]["metadata"]["name"]
    [rollout] = of_kind(everything(), "Deployment")
    assert (
        rollout["spec"]["template"]["spec"]["serviceAccountName"]
        != hub["spec"]["template"]["spec"]["serviceAccountName"]
    )
    assert not [document["kind"] for document in everything() if document["kind"].startswith("Cluster")]
