"""``--commit barrier`` with a real hub and real peers: which engines switch to which version, and when none does."""

from __future__ import annotations

import json
import sys

import pytest

from p2pcast.ground.version import Version
from rollout_node.peer import Peer
from trainer_node.commit.barrier import Tick

ONE, TWO, THREE = (Version(0, n) for n in (1, 2, 3))


def serving(peer: Peer) -> list[str]:
    """Versions that its engine has switched to, in order."""
    return [str(v) for v in peer.runners[0].versions]


def outcomes(hub) -> list[tuple[str, str]]:
    """(version, outcome) of the barrier's events."""
    return [(e.facts["version"], e.facts["outcome"]) for e in hub.events.after(0, 10_000)[1] if e.kind == "barrier"]


async def fleet(swarm, states, *names, **options):
    """A run at version 0.1, with peers that all serve it."""
    swarm.publish(1, states.first())
    hub = await swarm.hub_up(commit="barrier", **options)
    peers = await swarm.peers_up(*names)
    await swarm.live("0.1")
    await at_target(swarm, hub, "0.1")
    return hub, peers


async def at_target(swarm, hub, version: str) -> None:
    """The hub knows that all its peers serve it, and is done with the round."""
    await swarm.until(
        lambda: all(
            p.engines and all(e.ready and str(e.committed) == version for e in p.engines)
            for p in hub.fleet.membership.peers.values()
        ),
        f"all are at {version}",
    )
    await swarm.until(lambda: hub.publishing.commits.status()["phase"] == "idle", "the round is over")


async def test_all_switch_and_none_before_the_last_has_staged(swarm, states):
    hub, peers = await fleet(swarm, states, "a", "b", "c", barrier_timeout_s=600.0)
    slow = peers[2]
    state = states.trained(swarm.steps[1][0], 2)
    async with slow.startup.shadow_state.held_still():  # this peer's shadow cannot move, so this peer is the last
        swarm.publish(2, state)
        await swarm.until(lambda: all(p.staged == TWO for p in peers[:2]), "two have staged it")
        await swarm.until(lambda: hub.publishing.commits.status()["staged"] == 2, "the hub knows")
        shown = (await swarm.status(hub))["barrier"]
        assert (shown["phase"], shown["version"], shown["ready"], shown["needed"]) == ("gathering", "0.2", 3, 3)
        assert shown["waiting_for"] == ["c"]
        assert 0 < shown["deadline_s"] <= 600
        assert {str(p.committed) for p in peers} == {"0.1"}
        assert [(await swarm.status(p))["state"] for p in peers[:2]] == ["held", "held"]
        assert [(await swarm.get(p, "/readyz"))[0] for p in peers] == [200, 200, 200]
    await swarm.live("0.2")
    await at_target(swarm, hub, "0.2")
    assert outcomes(hub)[-1] == ("0.2", "committed")
    assert hub.state.state_file["target"] == [0, 2]


async def test_the_quorum_switches_and_a_late_engine_stays_unready(swarm, states):
    hub, peers = await fleet(swarm, states, "a", "b", "c", barrier_timeout_s=0.5, barrier_quorum=0.6)
    late = peers[2]
    async with late.startup.shadow_state.held_still():
        swarm.publish(2, states.trained(swarm.steps[1][0], 2))
        await swarm.live("0.2", *peers[:2])
        await swarm.until(lambda: late.startup.orders.target == TWO, "it has heard of it")
        assert await swarm.get(late, "/readyz") == (
            503,
            f"not ready: {late.runners[0].installer.name}: version 0.1 while the others are at 0.2\n",
        )
        assert [(await swarm.get(p, "/readyz"))[0] for p in peers[:2]] == [200, 200]
        row = (await swarm.status(late))["engines"][0]
        assert (row["ready"], row["committed"]) == (False, "0.1")
        await swarm.until(
            lambda: not hub.fleet.membership.peers[late.ident.hex()].engines[0].ready,
            "the hub knows that it is unready",
        )
    await swarm.live("0.2")
    assert (await swarm.get(late, "/readyz"))[0] == 200
    assert outcomes(hub)[-1] == ("0.2", "quorum")
    assert (await swarm.status(hub))["barrier"]["last"]["late"] == ["c"]


async def test_below_quorum_no_engine_switches(swarm, states):
    hub, peers = await fleet(swarm, states, "a", "b", barrier_timeout_s=0.2)
    async with peers[1].startup.shadow_state.held_still():
        swarm.publish(2, states.trained(swarm.steps[1][0], 2))
        await swarm.until(lambda: outcomes(hub)[-1:] == [("0.2", "failed")], "it says that it failed")
        shown = (await swarm.status(hub))["barrier"]
        assert shown["phase"] == "failed"
        assert {k: shown["last"][k] for k in ("version", "outcome", "staged", "ready", "needed", "late")} == {
            "version": "0.2", "outcome": "failed", "staged": 1, "ready": 2, "needed": 2, "late": ["b"],
        }  # fmt: skip
        assert {str(p.committed) for p in peers} == {"0.1"}
        assert hub.state.state_file["target"] == [0, 1]
        assert 'p2pcast_hub_barrier_outcomes_total{outcome="failed"} 1.0' in (await swarm.get(hub, "/metrics"))[1]
    await swarm.live("0.2")
    assert outcomes(hub)[-1] == ("0.2", "committed")


async def test_below_quorum_a_newer_version_takes_over(swarm, states):
    hub, peers = await fleet(swarm, states, "a", "b", barrier_timeout_s=0.2)
    state = states.trained(swarm.steps[1][0], 2)
    async with peers[1].startup.shadow_state.held_still():
        swarm.publish(2, state)
        await swarm.until(lambda: outcomes(hub)[-1:] == [("0.2", "failed")], "it says that it failed")
        swarm.publish(3, states.trained(state, 3))
        await swarm.until(lambda: outcomes(hub)[-1:] == [("0.2", "superseded")], "the next one takes over")
        await swarm.until(lambda: peers[0].staged == THREE, "who can goes on to it")
    await swarm.live("0.3")
    await at_target(swarm, hub, "0.3")
    assert [serving(p) for p in peers] == [["0.1", "0.3"], ["0.1", "0.3"]]


async def test_a_peer_that_dies_meanwhile_is_not_waited_for(swarm, states):
    hub, peers = await fleet(swarm, states, "a", "b", barrier_timeout_s=600.0)
    async with peers[1].startup.shadow_state.held_still():
        swarm.publish(2, states.trained(swarm.steps[1][0], 2))
        await swarm.until(lambda: hub.publishing.commits.status()["staged"] == 1, "one has staged it")
    await swarm.down(peers[1])
    await swarm.live("0.2", peers[0])


async def test_a_peer_that_joins_during_a_round_is_not_waited_for(swarm, states):
    hub, peers = await fleet(swarm, states, "a", "b", barrier_timeout_s=600.0)
    async with peers[1].startup.shadow_state.held_still():
        swarm.publish(2, states.trained(swarm.steps[1][0], 2))
        await swarm.until(lambda: hub.publishing.commits.status()["staged"] == 1, "one has staged it")
        late = await swarm.peer_up("late")
        await swarm.until(lambda: str(late.runners[0].staged) == "0.2", "the newcomer has staged it")
        assert hub.publishing.commits.status()["ready"] == 2
        # On its way it may have come past what the others serve; it is not ahead of them.
        assert late.committed in (None, ONE)
    await swarm.live("0.2")


async def test_a_trainer_that_never_waits(swarm, states, tmp_path):
    """Versions come while engines are busy with the last: every engine goes through the same ones, and all end at the
    newest.
    """
    swarm.publish(1, states.first())
    hub = await swarm.hub_up(commit="barrier", barrier_timeout_s=600.0)
    folder = [await swarm.peer_up(name) for name in "ab"]
    slow = f"exec:{sys.executable} -c 'import time; time.sleep(0.3)'"
    busy = await swarm.peer_up("c", targets=(slow,))
    await swarm.until(lambda: busy.committed == ONE, "the slow one is live")
    await swarm.live("0.1", *folder)
    await at_target(swarm, hub, "0.1")
    state, last = swarm.steps[1][0], 25
    for step in range(2, last + 1):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.published(f"0.{step}")
    await swarm.until(lambda: all(p.committed == Version(0, last) for p in (*folder, busy)), "all are at the newest")
    assert serving(folder[0]) == serving(folder[1]) == serving(busy)
    assert 2 < len(serving(busy)) < last, "some were skipped, not all"
    assert {outcome for _, outcome in outcomes(hub)} == {"committed"}
    assert [v for v, _ in outcomes(hub)] == serving(busy)
    swarm.check(folder[0], last)


def end_of_wait(hub) -> None:
    """The hub no longer waits for others to rejoin."""
    hub.publishing.commits.barrier._settled_at = 0.0
    hub.publishing.commits.handle(Tick())


async def test_a_hub_that_is_restarted_in_the_middle_of_a_round(swarm, states, monkeypatch):
    monkeypatch.setattr("trainer_node.commit.commits.REJOIN_S", 600.0)
    hub, peers = await fleet(swarm, states, "a", "b", barrier_timeout_s=600.0)
    async with peers[1].startup.shadow_state.held_still():
        swarm.publish(2, states.trained(swarm.steps[1][0], 2))
        await swarm.until(lambda: hub.publishing.commits.status()["staged"] == 1, "one has staged it")
        await swarm.down(hub)
        hub = await swarm.hub_up(commit="barrier", barrier_timeout_s=600.0)
        assert (hub.publishing.commits.barrier.target, hub.publishing.commits.barrier.hold) == (ONE, TWO)
        await swarm.until(lambda: hub.publishing.commits.status()["ready"] == 2, "both are back")
        end_of_wait(hub)
        assert {str(p.committed) for p in peers} == {"0.1"}
    await swarm.live("0.2")
    assert [p.startup.orders.commits for p in peers] == ["barrier", "barrier"]


async def test_a_peer_that_starts_without_the_hub_waits_for_the_end_of_the_round(swarm, states, monkeypatch):
    monkeypatch.setattr("trainer_node.commit.commits.REJOIN_S", 600.0)
    hub, (a, b) = await fleet(swarm, states, "a", "b", barrier_timeout_s=600.0)
    async with b.startup.shadow_state.held_still():
        swarm.publish(2, states.trained(swarm.steps[1][0], 2))
        await swarm.until(lambda: hub.publishing.commits.status()["staged"] == 1, "one has staged it")
        await swarm.down(hub)
        await swarm.down(a)
        a = await swarm.peer_up("a")
        await swarm.until(lambda: a.runners[0].waits_for == "commit", "its engine waits for the command")
        assert (a.startup.orders.commits, a.startup.orders.target, a.staged) == ("barrier", ONE, TWO)
        assert str(b.committed) == "0.1"
        hub = await swarm.hub_up(commit="barrier", barrier_timeout_s=600.0)
        await swarm.until(lambda: a.startup.hub_session.connected and b.startup.hub_session.connected, "both are back")
        end_of_wait(hub)
        assert serving(a) == []
    await swarm.live("0.2")


async def test_a_branch_goes_through_the_barrier_too(swarm, states):
    hub, _ = await fleet(swarm, states, "a", "b", barrier_timeout_s=600.0)
    swarm.publish(1, states.trained(swarm.steps[1][0], 9))
    await swarm.live("1.1")
    assert outcomes(hub)[-1] == ("1.1", "committed")


@pytest.mark.parametrize("mode", ["auto", "barrier"])
async def test_only_a_manual_hub_takes_commits(swarm, states, mode):
    swarm.publish(1, states.first())
    hub = await swarm.hub_up(commit=mode)
    await swarm.published("0.1")
    code, answer = await swarm.post(hub, "/commit", {"version": "0.1"})
    assert (code, json.loads(answer)["error"]) == (
        400,
        "this hub commits automatically: start the hub with --commit manual for this command",
    )
    assert ((await swarm.status(hub))["barrier"] is None) == (mode == "auto")


async def test_artifacts_behind_the_held_version_are_kept(swarm, states, monkeypatch):
    _, peers = await fleet(swarm, states, "a", "b", barrier_timeout_s=600.0)
    spared = []
    retain = peers[0].relay.store.retain
    monkeypatch.setattr(peers[0].relay.store, "retain", lambda spare: spared.append(spare) or retain(spare))
    state = swarm.steps[1][0]
    async with peers[1].startup.shadow_state.held_still():
        for step in (2, 3, 4):
            state = states.trained(state, step)
            swarm.publish(step, state)
            await swarm.published(f"0.{step}")
            await swarm.until(lambda: peers[0].staged == TWO, "it is where it is told to stay")
        await swarm.until(lambda: len(spared) == 3, "it has all three")
        versions = {a: s.version.step for a, s in peers[0].relay.store.artifacts.items()}
        assert sorted(versions[a] for a in spared[-1]) == [3, 4]
    await swarm.live("0.4")
