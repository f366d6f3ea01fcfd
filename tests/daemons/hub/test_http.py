"""HTTP answers and commands of daemons, and manual commits."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families


async def test_status_health_and_metrics(swarm, states):
    state = states.first()
    swarm.publish(1, state)
    hub = await swarm.hub_up()
    first, second = await swarm.peers_up("a", "b")
    await swarm.live("0.1")
    swarm.publish(2, states.trained(state, 2))
    await swarm.live("0.2")
    await swarm.until(
        lambda: all(p["committed"] == "0.2" for p in hub.control.view.status()["peers"]), "the hub has heard of it"
    )

    document = await swarm.status(hub)
    assert document["run"] == hub.token.run.hex()
    assert document["version"] == "0.2"
    assert [p["name"] for p in document["peers"]] == ["a", "b"]
    for shown, peer in zip(document["peers"], (first, second), strict=True):
        assert {
            "name",
            "parent",
            "state",
            "staged",
            "committed",
            "score",
            "bytes_received",
            "bytes_duplicate",
            "engines",
        } <= shown.keys()
        assert shown["staged"] == shown["committed"] == "0.2"
        assert shown["bytes_received"] == peer.node.bytes_received > 0
        assert shown["bytes_duplicate"] == 0
        assert shown["parent"] in ("hub", "a", "b")
        assert [e["ready"] for e in shown["engines"]] == [True]
        assert shown["score_parts"].keys() == {"speed", "success", "stability", "decay"}
    assert document["digests"]["0.2"] == (await swarm.status(first))["digests"]["0.2"]

    for daemon in (hub, first, second):
        assert await swarm.get(daemon, "/healthz") == (200, "ok\n")
        assert await swarm.get(daemon, "/readyz") == (200, "ready\n")
        assert (await swarm.get(daemon, "/nowhere"))[0] == 404
        code, text = await swarm.get(daemon, "/metrics")
        assert code == 200
        found = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
        assert found["p2pcast_received_bytes_total"] == daemon.node.bytes_received
        assert found["p2pcast_duplicate_bytes_total"] == 0
        if daemon is hub:
            assert text.count("p2pcast_hub_peer_score_part{") == 2 * 4
            assert text.count("p2pcast_hub_peer_score{") == 2
    assert found["p2pcast_peer_staged_step"] == found["p2pcast_peer_committed_step"] == 2
    assert found["p2pcast_peer_hub_connected"] == 1


async def test_nothing_is_committed_before_the_command(swarm, states):
    state = states.first()
    hub = await swarm.hub_up(commit="manual")
    first, second = await swarm.peers_up("a", "b")
    for step in (1, 2):
        swarm.publish(step, state)
        await swarm.until(
            lambda s=step: all(str(r.staged) == f"0.{s}" for p in (first, second) for r in p.runners), "all have staged"
        )
        state = states.trained(state, step)
    assert first.committed is second.committed is None
    assert (await swarm.get(first, "/readyz"))[0] == 503
    assert await swarm.post(hub, "/commit", {"version": "0.2"}) == (200, '{"target": "0.2"}')
    await swarm.live("0.2")
    # Told again, nothing happens: it is in use.
    assert (await swarm.post(hub, "/commit", {"version": "0.2"}))[0] == 200
    swarm.publish(3, state)
    await swarm.until(
        lambda: all(str(r.staged) == "0.3" for p in (first, second) for r in p.runners), "the next is staged"
    )
    assert {str(p.committed) for p in (first, second)} == {"0.2"}
    assert [str(v) for v in first.runners[0].versions] == ["0.2"]
    assert all(r.error is None for p in (first, second) for r in p.runners)


async def test_a_commit_reaches_an_absent_peer_on_its_return(swarm, states):
    state = states.first()
    await swarm.hub_up(commit="manual")
    peer = await swarm.peer_up("a")
    swarm.publish(1, state)
    await swarm.until(lambda: str(peer.runners[0].staged) == "0.1", "it is staged")
    await swarm.down(swarm.hub)
    memory = swarm.folder / "hub" / "hub.json"
    memory.write_text(json.dumps(json.loads(memory.read_text()) | {"target": [0, 1]}))
    await swarm.hub_up(commit="manual")
    await swarm.live("0.1")


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ({"version": "0.9"}, 409, "not one of this run's"),
        ({"version": "1.1"}, 409, "not one of this run's"),
        ({"version": "newest"}, 400, "BRANCH.STEP"),
        ({}, 400, "BRANCH.STEP"),
        ([], 400, "object"),
        (b"\xff{", 400, "JSON"),
        (b"x" * 70_000, 413, "65536 are allowed"),
    ],
)
async def test_committing_an_unknown_version_is_refused(swarm, states, body, code, said):
    swarm.publish(1, states.first())
    hub = await swarm.hub_up(commit="manual")
    await swarm.published("0.1")
    given, answer = await swarm.post(hub, "/commit", body)
    assert given == code, answer
    assert said in json.loads(answer)["error"]
    assert hub.state.state_file["target"] is None


async def test_a_hub_in_auto_mode_takes_no_commits(swarm, states):
    swarm.publish(1, states.first())
    hub = await swarm.hub_up()
    await swarm.published("0.1")
    assert (await swarm.post(hub, "/commit", {"version": "0.1"}))[0] == 400
    peer = await swarm.peer_up("a")
    assert (await swarm.post(peer, "/commit", {"version": "0.1"}))[0] == 400


@pytest.mark.parametrize(
    ("path", "remote", "given", "code"),
    [
        ("/status", "127.0.0.1", None, 200),
        ("/status", "::1", None, 200),
        ("/status", "192.0.2.7", None, 401),
        ("/status", "192.0.2.7", "Bearer wrong", 401),
        ("/status", "192.0.2.7", "Bearer \udcff\udcfe", 401),
        ("/status", "192.0.2.7", "right", 200),
        ("/status", None, None, 401),
        ("/status", "not an address", None, 401),
        ("/commit", "192.0.2.7", None, 401),
        ("/commit", "127.0.0.1", None, 401),
        ("/commit", "127.0.0.1", "right", 200),
        ("/healthz", "192.0.2.7", None, 200),
        ("/readyz", "192.0.2.7", None, 200),
        ("/metrics", "192.0.2.7", None, 200),
    ],
)
async def test_remote_callers_need_a_bearer_token(swarm, path, remote, given, code):
    hub = await swarm.hub_up()
    headers = (
        {"Host": "localhost"}
        if given is None
        else {"Authorization": f"Bearer {hub.state.admission.bearer}" if given == "right" else given}
    )
    elsewhere = SimpleNamespace(
        path=path, method="POST" if path == "/commit" else "GET", headers=headers, remote=remote, protocol=None
    )

    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=200)

    assert (await hub.http._guard(elsewhere, handler)).status == code


async def test_unknown_keys_of_a_command_are_refused_by_name(swarm):
    """A misspelt key would count as left out: a token of a minute would last a day."""
    hub, peer = await swarm.hub_up(), await swarm.peer_up("a")
    named = ("commit", "evict", "token/create", "token/list", "token/revoke", "workers/drain", "page/link")
    for daemon, names in ((hub, named), (peer, ("commit", "verify", "lease", "release"))):
        for name in names:
            code, text = await swarm.post(daemon, f"/{name}", {"tll_s": 60})
            assert (code, "no key 'tll_s': it takes " in json.loads(text)["error"]) == (400, True), (name, text)
            code, text = await swarm.post(daemon, f"/{name}", b"[" * 3000)
            assert (code, "not JSON" in text) == (400, True), name
    code, text = await swarm.post(peer, "/lease", {"lease": "x", "hold": 60})
    assert (code, "no key 'hold': it takes lease, hold_s" in text) == (400, True)
    code, text = await swarm.post(hub, "/evict", {"peer": "a", "undo": "true"})
    assert (code, "undo: true or false" in text) == (400, True)
    assert [row["name"] for row in (await swarm.status(hub))["peers"]] == ["a"]


async def test_a_peer_that_reports_nonsense_does_not_break_the_status(swarm):
    hub = await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.until(lambda: bool(hub.state.sessions), "it has joined")
    nonsense: dict[str, Any] = {
        "state": b"\xff",
        "progress": {"x": b"\0"},
        "engines": [b"\xff"],
        "transfer": "much",
        "epoch": ["a", 1],
    }
    peer.startup.hub_session.send(replace(peer.reporter.report(), **nonsense))
    await swarm.until(lambda: hub.control.report_handler.invalid_reports > 0, "the hub has heard of it")
    document = await swarm.status(hub)
    assert [p["name"] for p in document["peers"]] == ["a"]
