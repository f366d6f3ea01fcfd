"""A peer that starts while the hub is down: it resumes from its state and takes no engine back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version


async def run_with(swarm, states, *names, steps=2, **hub):
    """A run with some versions that all peers have, and then no hub; the newest state."""
    state = states.first()
    await swarm.hub_up(**hub)
    await swarm.peers_up(*names)
    for step in range(1, steps + 1):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
    return state


@pytest.mark.parametrize("shadow", ["kept", "lost"])
async def test_a_peer_starts_without_its_hub_and_feeds_an_engine(swarm, states, tmpfs, shadow):
    state = await run_with(swarm, states, "a")
    await swarm.down(swarm.peers["a"])
    await swarm.down(swarm.hub)
    if shadow == "lost":
        shutil.rmtree(tmpfs / "a")
    shutil.rmtree(swarm.out("a"))
    peer = await swarm.peer_up("a")
    await swarm.live("0.2")
    assert peer.node.bytes_received == 0
    told = (await swarm.status(peer))["hub"]
    assert (told["connected"], told["heard_s"]) == (False, None)
    await swarm.hub_up()
    await swarm.until(lambda: peer.startup.hub_session.connected, "the peer is back at the hub")
    swarm.publish(3, states.trained(state, 3))
    await swarm.live("0.3")


async def test_a_peer_gets_missed_versions_from_the_swarm_without_the_hub(swarm, states):
    swarm.plaintext = False
    state = await run_with(swarm, states, "a", "b", chains=1)
    a, b = swarm.peers["a"], swarm.peers["b"]
    await swarm.until(lambda: b.relay.parent_failover.parent == a.ident, "b hangs below a")
    await swarm.down(b)
    for step in (3, 4):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.live(f"0.{step}", a)
    await swarm.published("0.4")
    await swarm.down(swarm.hub)
    b = await swarm.peer_up("b")
    await swarm.live("0.4", b)
    assert not b.startup.hub_session.connected
    assert b.view.freshness.source == "swarm"


async def test_a_first_join_keeps_trying_until_the_hub_is_there(swarm, states, caplog):
    await swarm.hub_up()
    await swarm.down(swarm.hub)
    peer = swarm.peer_begun("a")
    await swarm.until(lambda: "trying for 60 s" in caplog.text, "it says that it keeps trying")
    await swarm.hub_up()
    swarm.publish(1, states.first())
    await swarm.live("0.1", peer)
    assert caplog.text.count("trying for 60 s") == 1


async def test_a_first_join_gives_up_after_its_time(swarm):
    await swarm.hub_up()
    await swarm.down(swarm.hub)
    error = await swarm.ended(swarm.peer_begun("a", join_timeout_s=0.2))
    assert isinstance(error, RetryableError)
    assert "cannot reach" in str(error)


async def test_without_the_hub_a_damaged_disk_takes_no_engine_back(swarm, states, tmpfs):
    """The newest version is gone from disk and memory: an older one that is there is not installed in its place."""
    await run_with(swarm, states, "a")
    await swarm.down(swarm.peers["a"])
    await swarm.down(swarm.hub)
    shutil.rmtree(tmpfs / "a")
    for path in (swarm.folder / "a" / "deltas").iterdir():
        path.unlink()
    peer = await swarm.peer_up("a")
    seen: list[Version] = []
    peer.on_staged = seen.append
    await swarm.until(
        lambda: peer.sync.planner.begun.is_set() and peer.sync.activity.state == "waiting", "it waits for the hub"
    )
    assert peer.sync.planner.path() == []
    await swarm.hub_up()
    await swarm.live("0.2")
    assert Version(0, 1) not in [v for r in peer.runners for v in r.versions]


async def test_without_the_hub_no_engine_gets_less_than_was_staged_before(swarm, states):
    await run_with(swarm, states, "a")
    await swarm.down(swarm.peers["a"])
    await swarm.down(swarm.hub)
    memory = swarm.folder / "a" / "peer.json"
    memory.write_text(json.dumps(json.loads(memory.read_text()) | {"newest": "0.9"}))
    shutil.rmtree(swarm.out("a"))
    peer = await swarm.peer_up("a")
    await swarm.until(lambda: peer.runners[0].waits_for == "commit", "the engine waits")
    await swarm.hub_up()
    await swarm.live("0.2")


async def test_without_the_hub_engines_still_wait_for_its_command(swarm, states):
    """With --commit manual, the hub's last word counts when a peer starts without it."""
    state = states.first()
    hub = await swarm.hub_up(commit="manual")
    peer = await swarm.peer_up("a")
    swarm.publish(1, state)
    await swarm.until(lambda: peer.staged == Version(0, 1), "0.1 is staged")
    await hub.publishing.commits.command({"version": "0.1"})
    await swarm.live("0.1")
    swarm.publish(2, states.trained(state, 2))
    await swarm.until(lambda: peer.staged == Version(0, 2), "0.2 is staged")
    await swarm.down(peer)
    await swarm.down(swarm.hub)
    peer = await swarm.peer_up("a")
    await swarm.until(lambda: peer.runners[0].waits_for == "commit", "its engine waits for the command")
    assert (peer.startup.orders.commits, peer.startup.orders.target) == ("manual", Version(0, 1))


async def test_a_shadow_that_nothing_signed_vouches_for_waits_for_the_hub(swarm, states, tmp_path):
    """A peer that began from --base holds no signed record of that version."""
    state = states.first()
    base = states.write(tmp_path / "base", state)
    await swarm.hub_up(base=base)
    peer = await swarm.peer_up("a", base=base)
    await swarm.until(lambda: peer.staged is not None, "the base is staged")
    await swarm.down(peer)
    await swarm.down(swarm.hub)
    peer = await swarm.peer_up("a", base=base)
    await swarm.until(lambda: peer.sync.activity.state == "waiting", "it waits")
    assert peer.shadow is None
    await swarm.hub_up()
    swarm.publish(1, states.trained(state, 1))
    await swarm.live("0.1")
    await swarm.published("0.1")
    assert peer.node.bytes_received == swarm.hub.publishing.lifecycle.published.bytes


async def test_a_good_shadow_is_not_thrown_away_because_the_hub_is_away(swarm, states, caplog):
    """The version's record is missing on disk, so only the hub can confirm the shadow."""
    await run_with(swarm, states, "a")
    await swarm.down(swarm.peers["a"])
    await swarm.down(swarm.hub)
    for path in (swarm.folder / "a" / "deltas").iterdir():
        path.unlink()
    caplog.set_level("INFO", "p2pcast.peer")
    peer = await swarm.peer_up("a")
    await swarm.until(lambda: peer.sync.activity.state == "waiting", "it waits")
    await swarm.hub_up()
    await swarm.live("0.2")
    assert "the shadow of an earlier process is good: version 0.2" in caplog.text


async def test_a_key_that_the_token_does_not_pin_is_not_used(swarm, states):
    await run_with(swarm, states, "a")
    await swarm.down(swarm.peers["a"])
    await swarm.down(swarm.hub)
    memory = swarm.folder / "a" / "peer.json"
    memory.write_text(json.dumps(json.loads(memory.read_text()) | {"key": "00" * 32}))
    assert isinstance(await swarm.ended(swarm.peer_begun("a", join_timeout_s=0.2)), RetryableError)


async def test_a_peer_whose_knowledge_is_too_old_is_unready(swarm, states):
    await swarm.hub_up()
    peer = await swarm.peer_up("a", max_age_s=3600.0)
    swarm.publish(1, states.first())
    await swarm.live("0.1")
    assert (await swarm.get(peer, "/readyz"))[0] == 200
    await swarm.down(swarm.hub)
    peer.view.config = replace(peer.config, max_age_s=0.5)
    await swarm.until(lambda: not peer.view.ready()[0], "it is unready")
    status, why = await swarm.get(peer, "/readyz")
    assert status == 503
    assert "--max-age 0.5" in why
    assert (await swarm.status(peer))["knowledge"]["age_s"] > 0.5
    assert "p2pcast_peer_knowledge_age_seconds" in (await swarm.get(peer, "/metrics"))[1]
    await swarm.hub_up()
    await swarm.until(lambda: peer.view.ready()[0], "it is ready again")
