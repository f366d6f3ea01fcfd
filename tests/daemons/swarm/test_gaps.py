"""States of disks from which no artifact leads on to the newest version: each is healed, or loud at both ends."""

from __future__ import annotations

import shutil

from click.testing import CliRunner

from p2pcast.artifact.artifact_file import HEADER
from p2pcast.cli.state_folder import check
from p2pcast.ground.errors import EXIT_REFUSED
from p2pcast.ground.version import Version
from trainer_node.publish.publish_history import FILE, PublishHistory

RECALL_S = 600.0
"""Longer than any test: it ends when the peers are back."""


async def stopped_with_a_hole(swarm, states, *names):
    """A run of three versions, of which ``names`` have all and "late" has the first. All are down, and the hub's disk
    has lost the delta to 0.1.
    """
    state = states.first()
    swarm.publish(0, state)
    await swarm.hub_up()
    await swarm.peers_up("late", *names)
    await swarm.live("0.0")
    await swarm.down(swarm.peers["late"])
    for step in (1, 2):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.published(f"0.{step}")
        await swarm.live(f"0.{step}")
    await swarm.down(swarm.hub)
    for name in names:
        await swarm.down(swarm.peers[name])
    lose(swarm, "hub", "0.1")
    return state


def lose(swarm, name, version):
    [path] = (swarm.folder / name / "deltas").glob(f"{version}-*")
    path.unlink()


def checked(swarm, name):
    """Exit code and output of ``p2pcast check``."""
    folder = str(swarm.folder / name)
    found = CliRunner().invoke(check, [folder, "--shadow", str(swarm.tmpfs / name)])
    return found.exit_code, found.output


async def test_a_lost_delta_comes_back_from_a_peer(swarm, states, tmpfs):
    state = await stopped_with_a_hole(swarm, states, "a")
    code, text = checked(swarm, "hub")
    assert code == EXIT_REFUSED
    assert "leads to 0.1, the base of 0.2, is missing, and so is a newer whole state; start the hub" in text
    assert "sound" not in text
    code, text = checked(swarm, "a")
    assert (code, "3 artifacts of run" in text, "are sound" in text) == (0, True, True)
    await swarm.hub_up(recall_s=RECALL_S)
    await swarm.peers_up("late", "a", "new")
    await swarm.live("0.2")
    assert swarm.versions("anchor") == ["0.0"], "no whole state was made"
    assert swarm.versions("delta") == ["0.1", "0.2"]
    swarm.publish(3, states.trained(state, 3))
    await swarm.live("0.3")


async def test_a_delta_that_is_lost_everywhere_is_passed_by_a_whole_state(swarm, states, caplog):
    """The trainer publishes nothing more: the hub makes the whole state at its start."""
    await stopped_with_a_hole(swarm, states, "a")
    lose(swarm, "a", "0.1")
    events = (await swarm.hub_up(recall_s=RECALL_S)).events
    await swarm.peers_up("late", "a", "new")
    await swarm.live("0.2")
    assert swarm.versions("anchor") == ["0.0", "0.2"]
    closed = [event.facts["closed"] for event in events.after(0, 1000)[1] if event.kind == "gap"]
    assert closed == [None, "anchor"]
    assert "no way leads from nothing to 0.2" in caplog.text
    assert (await swarm.status(swarm.hub))["unready"] == []
    made = swarm.hub.state.store.manifest(Version(0, 2))
    await swarm.down(swarm.hub)
    await swarm.hub_up()
    kept = {s.manifest.state for s in swarm.hub.state.store.artifacts.values() if s.version == Version(0, 2)}
    assert kept == {made.state}, "the anchor outlives the hub, and is the version that was published"


async def test_a_peers_other_state_under_a_lost_version_is_not_taken(swarm, states):
    """As the hub recorded the version when it published it."""
    await stopped_with_a_hole(swarm, states, "a")
    history = PublishHistory(swarm.folder / "hub" / FILE, set)
    history.note(1, mark=f"{history[1].mark[:-1]}{'0' if history[1].mark[-1] == '1' else '1'}")
    history.close()
    await swarm.hub_up(recall_s=RECALL_S)
    await swarm.peers_up("late", "a")
    await swarm.live("0.2")
    assert (swarm.versions("anchor"), swarm.versions("delta")) == (["0.0", "0.2"], ["0.2"])


async def test_without_any_way_both_ends_say_so_until_the_next_version(swarm, states, tmpfs):
    """The delta is lost everywhere, and the hub's machine was restarted: its shadow is lost, too."""
    state = await stopped_with_a_hole(swarm, states, "a")
    lose(swarm, "a", "0.1")
    shutil.rmtree(tmpfs / "hub")
    assert checked(swarm, "a")[0] == 0, "its shadow is at the newest version"
    (tmpfs / "a").rename(tmpfs / "aside")
    code, text = checked(swarm, "a")
    (tmpfs / "aside").rename(tmpfs / "a")
    assert (code, "to 0.1, the base of 0.2" in text, "start the peer" in text) == (EXIT_REFUSED, True, True)
    hub = await swarm.hub_up(whole=False, recall_s=RECALL_S)
    late, current = await swarm.peers_up("late", "a")
    await swarm.until(lambda: late.sync.activity.state == "stranded", "it has found no way")
    why = "no way leads from 0.0 to 0.2: every artifact that leads to 0.1, the base of 0.2, is missing"
    status = await swarm.status(late)
    assert (status["state"], status["staged"]) == ("stranded", "0.0")
    assert why in status["error"]
    code, text = await swarm.get(late, "/readyz")
    assert (code, why in text) == (503, True)
    assert "p2pcast_peer_stranded 1.0" in (await swarm.get(late, "/metrics"))[1]
    await swarm.live("0.2", current)
    assert (await swarm.get(current, "/readyz"))[0] == 200, "it holds the newest version"
    await swarm.until(lambda: "stranded" in {p.report.state for p in hub.fleet.membership.peers.values()}, "it is told")
    status = await swarm.status(hub)
    assert "to 0.2: every artifact that leads to 0.1" in status["verdict"]["alarms"][0]["text"]
    assert {row["name"]: row["verdict"]["level"] == "alarm" for row in status["peers"]} == {"a": False, "late": True}
    assert "p2pcast_hub_gap 1.0" in (await swarm.get(hub, "/metrics"))[1]
    swarm.publish(3, states.trained(state, 3))
    await swarm.live("0.3")
    assert (await swarm.get(late, "/readyz"))[0] == 200
    assert (await swarm.status(hub))["unready"] == []


async def test_an_artifact_that_the_hubs_disk_damages_is_replaced(swarm, states, tmpfs):
    """The hub finds the damage while it runs, when a new peer asks for the artifact; no other peer has one."""
    state = states.first()
    swarm.publish(0, state)
    await swarm.hub_up()
    for step in (1, 2):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.published(f"0.{step}")
    swarm.hub.node.cache._pieces.clear()
    [path] = (swarm.folder / "hub" / "deltas").glob("0.1-*")
    with path.open("r+b") as file:
        file.seek(len(HEADER) + 50)
        file.write(b"damage")
    await swarm.peer_up("new")
    await swarm.live("0.2")
    assert swarm.versions("anchor") == ["0.0", "0.2"]
    assert swarm.versions("delta") == ["0.2"]
    assert not path.exists()
