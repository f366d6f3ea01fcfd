"""Events of a real hub and real peers, /wait, and the list of metrics in the guide."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from p2pcast.ground.version import Version
from p2pcast.wire.messages import Commit
from tests.daemons.metrics_guide import documented, served

DEADLINE_S = 600.0


def told(daemon, *kinds: str) -> list[tuple[str, dict[str, Any]]]:
    """(kind, facts) of what a daemon has told so far."""
    return [(e.kind, dict(e.facts)) for e in daemon.events.after(0, 10_000)[1] if not kinds or e.kind in kinds]


def url(daemon, path: str) -> str:
    host, port = daemon.http.address
    return f"http://{host}:{port}{path}"


@asynccontextmanager
async def listening(daemon, query: str = "") -> AsyncIterator[AsyncIterator[tuple[str, dict[str, Any]]]]:
    """(kind, data) of what comes over the wire."""
    async with aiohttp.ClientSession() as session, session.get(url(daemon, f"/events{query}")) as answer:
        assert answer.status == 200

        async def events() -> AsyncIterator[tuple[str, dict[str, Any]]]:
            kind = ""
            async for raw in answer.content:
                name, _, value = raw.decode().rstrip("\n").partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    yield kind, json.loads(value)

        yield events()


async def first(events: AsyncIterator[tuple[str, dict[str, Any]]], kind: str) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE_S):
        async for found, data in events:
            if found == kind:
                return data
    raise AssertionError(f"no {kind} came")


async def all_of(events: AsyncIterator[tuple[str, dict[str, Any]]], kinds: set[str]) -> dict[str, dict[str, Any]]:
    """The first event of each kind, in any order."""
    found: dict[str, dict[str, Any]] = {}
    async with asyncio.timeout(DEADLINE_S):
        while kinds - found.keys():
            kind, data = await anext(events)
            found.setdefault(kind, data)
    return found


async def waited(daemon, query: str) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(url(daemon, f"/wait?{query}")) as answer:
        return answer.status, await answer.json()


async def test_the_life_of_a_version(swarm, states):
    state = states.first()
    swarm.publish(1, state)
    hub = await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1")
    async with listening(hub) as at_hub, listening(peer) as at_peer:
        swarm.publish(2, states.trained(state, 2))
        # A hub's disk may be slower than a peer.
        at_once = await all_of(at_hub, {"opened", "sealed", "staged", "committed"})
        assert at_once["opened"]["version"] == "0.2"
        sealed = at_once["sealed"]
        assert sealed["version"] == "0.2"
        assert sealed["bytes"] in {s.manifest.log for s in hub.state.store.artifacts.values() if s.version.step == 2}
        staged = at_once["staged"]
        assert (staged["peer"], staged["version"]) == ("a", "0.2")
        assert 0 < staged["after_s"] < DEADLINE_S
        committed = at_once["committed"]
        assert (committed["peer"], committed["engine"], committed["version"]) == (
            "a",
            peer.runners[0].installer.name,
            "0.2",
        )
        assert staged["after_s"] <= committed["after_s"] < DEADLINE_S
        assert committed["pause_s"] == pytest.approx(peer.runners[0].report.pause_s, abs=1e-5)

        assert await first(at_peer, "receiving") == {
            "time": pytest.approx(sealed["time"], abs=60),
            "run": hub.token.run.hex(),
            "version": "0.2",
            "base": "0.1",
        }
        received = await first(at_peer, "received")
        assert received["version"] == "0.2"
        staged_s = (await first(at_peer, "staged"))["after_s"]
        assert 0 < received["took_s"] < staged_s < DEADLINE_S
        assert (await first(at_peer, "committed"))["after_s"] < DEADLINE_S
    kinds = [kind for kind, _ in told(hub)]
    assert kinds.index("opened") < kinds.index("staged") < kinds.index("committed")
    assert kinds.index("opened") < kinds.index("sealed")


async def test_events_report_joins_and_departures(swarm, states):
    swarm.publish(1, states.first())
    hub = await swarm.hub_up()
    first_peer, second = await swarm.peers_up("a", "b")
    await swarm.live("0.1")
    await swarm.down(second)
    await swarm.until(lambda: len(told(hub, "left")) == 1, "it has left")
    assert [f["peer"] for _, f in told(hub, "joined")] == ["a", "b"]
    (_, left) = told(hub, "left")[0]
    assert (left["peer"], left["lost"], left["why"]) == ("b", False, None)
    assert told(hub, "plan")[-1][1]["moved"] == []
    next(iter(hub.state.sessions.values())).link.abort()
    await swarm.until(lambda: len(told(hub, "joined")) == 3, "the other one is back")
    (_, lost) = told(hub, "left")[-1]
    assert (lost["peer"], lost["lost"]) == ("a", True)
    assert lost["why"]
    await swarm.until(
        lambda: [k for k, _ in told(first_peer, "hub_lost", "hub_back")] == ["hub_lost", "hub_back"], "it says so too"
    )


async def test_events_show_parents_branches_and_skipped_versions(swarm, states):
    state = states.first()
    swarm.publish(1, state)
    hub = await swarm.hub_up(chains=1)
    a, b = await swarm.peers_up("a", "b")
    await swarm.live("0.1")
    assert told(b, "parent")[-1][1]["parent"] in (a.ident.hex(), hub.ident.hex())
    (swarm.checkpoints / "step_5").mkdir()
    (swarm.checkpoints / "step_5" / "model.safetensors").write_bytes(b"nothing")
    (swarm.checkpoints / "step_5" / "STABLE").touch()
    await swarm.until(lambda: bool(told(hub, "skipped")), "it is skipped")
    assert told(hub, "skipped")[0][1]["folder"] == "step_5"
    swarm.publish(1, states.trained(state, 3))
    await swarm.live("1.1")
    assert told(hub, "branch") == [("branch", {"version": "1.1", "after": "0.1"})]


async def test_a_version_that_is_refused_and_an_install_that_fails(swarm, states):
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    peer = await swarm.peer_up("a", targets=("exec:false",))
    await swarm.until(lambda: bool(told(peer, "install_failed")), "the command fails")
    name, why = peer.runners[0].installer.name, told(peer, "install_failed")[0][1]["why"]
    assert why
    with peer.shadow.path.open("r+b") as file:  # damage the shadow, so that the next version does not fit
        file.seek(-40_000, 2)
        file.write(b"rotten")
    swarm.publish(2, states.trained(state, 2, share=1))
    await swarm.until(lambda: str(peer.staged) == "0.2", "it has healed")
    refused = told(peer, "refused")
    assert [f["version"] for _, f in refused] == ["0.2"]
    text = (await swarm.get(peer, "/metrics"))[1]
    found = {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert found["p2pcast_peer_refused_versions_total",] == 1
    assert found["p2pcast_peer_refused_installs_total", name] >= 1


async def test_events_report_readiness(swarm, states):
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1")
    assert [(k, f["version"]) for k, f in told(peer, "ready", "unready")] == [("ready", "0.1")]
    name = peer.runners[0].installer.name
    # As a barrier does it: the others have gone on without it.
    peer.startup.orders.commits = "barrier"
    peer.startup.dispatcher.on_hub_message(Commit(Version(0, 2)))
    assert told(peer, "unready") == [
        ("unready", {"engine": name, "version": "0.1", "why": "version 0.1 while the others are at 0.2"}),
    ]
    swarm.publish(2, states.trained(state, 2))
    await swarm.live("0.2")
    await swarm.until(
        lambda: told(peer, "ready", "unready")[-1] == ("ready", {"engine": name, "version": "0.2"}), "it says so"
    )


async def test_waiting_at_the_hub(swarm, states):
    state = states.first()
    swarm.publish(1, state)
    hub = await swarm.hub_up()
    assert (await waited(hub, "version=0.1&what=published&timeout_s=600"))[0] == 200
    # Without peers no fraction is reached.
    code, answer = await waited(hub, "version=0.1&timeout_s=0&fraction=0")
    assert (code, answer["engines"]) == (408, {})
    assert (await waited(hub, "version=0.1&what=staged&timeout_s=0"))[1]["peers"] == {}
    a, b = await swarm.peers_up("a", "b")
    code, answer = await waited(hub, "version=0.1&timeout_s=600&fraction=1")
    engines = {f"{p.config.name}/{p.runners[0].installer.name}" for p in (a, b)}
    assert (code, set(answer["engines"]), set(answer["engines"].values())) == (200, engines, {"0.1"})
    async with b.startup.shadow_state.held_still():
        later = [
            asyncio.create_task(waited(hub, f"version=0.2&{q}&timeout_s=600"))
            for q in ("what=published", "what=staged&fraction=0.5", "fraction=0.5")
        ]
        swarm.publish(2, states.trained(state, 2))
        assert [code for code, _ in await asyncio.gather(*later)] == [200, 200, 200]
        code, answer = await waited(hub, "version=0.2&what=staged&timeout_s=0")
        assert (code, answer["peers"]) == (408, {"a": "0.2", "b": "0.1"})
        assert (await waited(hub, "version=0.2&timeout_s=0"))[0] == 408
    code, answer = await waited(hub, "version=0.2&timeout_s=600&fraction=1")
    assert (code, set(answer["engines"].values())) == (200, {"0.2"})
    # An older version is reached as well; a later branch is not.
    assert (await waited(hub, "version=0.1&timeout_s=0"))[0] == 200
    assert (await waited(hub, "version=1.0&timeout_s=0"))[0] == 408


async def test_waiting_at_a_peer(swarm, states):
    state = states.first()
    hub = await swarm.hub_up(commit="manual")
    peer = await swarm.peer_up("a")
    later = asyncio.create_task(waited(peer, "version=0.1&timeout_s=600"))
    assert (await waited(peer, "version=0.1&what=staged&timeout_s=0"))[0] == 408
    swarm.publish(1, state)
    assert (await waited(peer, "version=0.1&what=published&timeout_s=600"))[0] == 200
    assert (await waited(peer, "version=0.1&what=staged&timeout_s=600"))[1]["staged"] == "0.1"
    assert not later.done()
    code, answer = await waited(peer, "version=0.1&timeout_s=0")
    assert (code, answer["engines"]) == (408, {peer.runners[0].installer.name: None})
    await swarm.post(hub, "/commit", {"version": "0.1"})
    code, answer = await later
    assert (code, answer["engines"]) == (200, {peer.runners[0].installer.name: "0.1"})


# -- metrics


async def test_every_metric_is_in_the_guide_and_no_other(swarm, states, tmp_path):
    swarm.plaintext = False  # some are there behind TLS alone
    state = states.first()
    swarm.publish(1, state)
    hub = await swarm.hub_up(commit="barrier", mirror=f"file://{tmp_path}/mirror")
    peer = await swarm.peer_up("a", mirror=f"file://{tmp_path}/mirror")
    await swarm.live("0.1")
    swarm.publish(2, states.trained(state, 2))
    await swarm.live("0.2")
    await swarm.until(lambda: (hub.fleet.membership.score(peer.ident.hex(), 0.0)) is not None, "it has a score")
    await swarm.until(
        lambda: any(str(e.committed) == "0.2" for p in hub.fleet.membership.peers.values() for e in p.engines),
        "the hub has heard",
    )
    peer.startup.timeline.refused_installs["an engine"] += 1
    at_hub, at_peer = [served((await swarm.get(d, "/metrics"))[1]) for d in (hub, peer)]
    guide = {name: labels for name, labels in documented().items() if not name.startswith("p2pcast_ledger_")}
    assert sorted(at_hub.keys() | at_peer.keys()) == sorted(guide)
    for name, labels in (at_hub | at_peer).items():
        assert labels == guide[name], name
    assert not [n for n in at_hub if n.startswith("p2pcast_peer_")] + [
        n for n in at_peer if n.startswith("p2pcast_hub_")
    ]


async def test_metrics_show_the_version_and_its_peers(swarm, states):
    state = states.first()
    swarm.publish(1, state)
    hub = await swarm.hub_up(commit="manual")
    await swarm.published("0.1")
    peer = await swarm.peer_up("a")
    name = peer.runners[0].installer.name
    await swarm.until(lambda: str(peer.runners[0].staged) == "0.1", "it is staged")
    await swarm.post(hub, "/commit", {"version": "0.1"})
    await swarm.live("0.1")
    for step in (2, 3):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.until(lambda s=step: str(peer.runners[0].staged) == f"0.{s}", "it is staged")
    await swarm.until(lambda: str(next(iter(hub.fleet.membership.peers.values())).staged) == "0.3", "the hub knows")

    async def values(daemon) -> dict[tuple[str, ...], float]:
        text = (await swarm.get(daemon, "/metrics"))[1]
        return {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples}

    at_hub, at_peer = await values(hub), await values(peer)
    assert at_hub["p2pcast_hub_lag_versions", name, "a"] == at_peer["p2pcast_peer_lag_versions", name] == 2
    assert at_hub["p2pcast_hub_publish_to_staged_seconds_count", "a"] == 2
    assert 0 < at_hub["p2pcast_hub_publish_to_staged_seconds_sum", "a"] < 2 * DEADLINE_S
    assert ("p2pcast_hub_publish_to_live_seconds_count", name, "a") not in at_hub, (
        "it was live with no version that began while it was there"
    )
    assert at_peer["p2pcast_peer_opened_to_staged_seconds_count",] >= 2
    assert at_peer["p2pcast_peer_staged_to_live_seconds_count", name] == 1
    assert at_peer["p2pcast_peer_commit_pause_seconds_count", name] == 1
    assert at_peer["p2pcast_peer_last_commit_pause_seconds", name] == pytest.approx(
        peer.runners[0].report.pause_s, abs=1e-5
    )
    for daemon, found in ((hub, at_hub), (peer, at_peer)):
        layout = (hub.publishing.pipeline.shadow if daemon is hub else daemon.shadow).layout
        assert found["p2pcast_shadow_bytes",] >= layout.nbytes
        assert found["p2pcast_disk_bytes",] >= layout.nbytes
    await swarm.post(hub, "/commit", {"version": "0.3"})
    await swarm.live("0.3")
    await swarm.until(lambda: str(next(iter(hub.fleet.membership.peers.values())).committed) == "0.3", "the hub knows")
    assert (await values(hub))["p2pcast_hub_publish_to_live_seconds_count", name, "a"] == 1
    assert (await values(hub))["p2pcast_hub_lag_versions", name, "a"] == 0
    await swarm.down(peer)
    await swarm.until(lambda: not hub.state.sessions, "it has left")
    assert not [key for key in await values(hub) if "a" in key[1:]]
