"""Late peers: squashes that the hub keeps, squashes made on request, and the choice of a path."""

from __future__ import annotations

import pytest

from p2pcast.artifact.artifact_file import P2pdFile
from p2pcast.ground.version import Version
from p2pcast.offline import squash_files
from p2pcast.store import retention

SHAPES = {"w": ("bfloat16", (30_000,)), "norm": ("float32", (53,))}


async def run_to(swarm, states, steps, first=1, state=None, **options):
    """Versions of which most changes fall where others fell before, so that squashes save something."""
    if state is None:
        state = states.first(shapes=SHAPES)
        swarm.publish(first, state, {"config.json": b"0"})
        await swarm.hub_up(**options)
        await swarm.published(f"0.{first}")
    for step in range(first + 1, first + steps):
        state = states.trained(states.trained(state, step % 3, share=0.02), 100 + step, share=0.002)
        swarm.publish(step, state, {"config.json": b"%d" % (step // 3)})
        await swarm.published(f"0.{step}")
    return state


def spans(hub):
    return {(s.base.step, s.version.step) for s in hub.state.store.artifacts.values() if s.base is not None}


async def test_the_hub_keeps_a_ladder(swarm, states):
    await run_to(swarm, states, 19)
    await swarm.until(lambda: {(1, 17), (1, 5), (5, 9), (9, 13), (13, 17)} <= spans(swarm.hub), "the ladder is made")
    late = await swarm.peer_up("a", squashes="kept")
    await swarm.live("0.19")
    # live() has compared the newest version and its files bit for bit.
    assert late.node.bytes_duplicate == 0


async def test_a_late_peer_takes_squashes_that_are_kept(swarm, states):
    state = await run_to(swarm, states, 1)
    peer = await swarm.peer_up("a")
    await swarm.live("0.1")
    await swarm.down(peer)
    await run_to(swarm, states, 19, state=state)
    await swarm.until(lambda: (1, 17) in spans(swarm.hub), "the ladder is made")
    chain = sum(
        s.manifest.log for s in swarm.hub.state.store.artifacts.values() if s.base and s.version.step - s.base.step == 1
    )
    back = await swarm.peer_up("a", squashes="kept")
    await swarm.live("0.19")
    held = {(s.base.step, s.version.step) for s in back.relay.store.artifacts.values() if s.base is not None}
    assert (1, 17) in held
    assert back.node.bytes_received < chain


async def test_a_squash_is_made_on_request(swarm, states, tmp_path):
    state = await run_to(swarm, states, 2)
    peer = await swarm.peer_up("a")
    await swarm.live("0.2")
    await swarm.down(peer)
    await run_to(swarm, states, 14, first=2, state=state)
    back = await swarm.peer_up("a", squashes="ask")
    await swarm.live("0.15")
    assert (2, 15) in spans(swarm.hub)
    held = {(s.base.step, s.version.step) for s in back.relay.store.artifacts.values() if s.base is not None}
    assert (2, 15) in held
    files = sorted(swarm.hub.state.store.artifacts.values(), key=lambda s: s.version)
    steps = [s.path for s in files if s.base is not None and s.version.step - s.base.step == 1 and s.base.step >= 2]
    squash_files(steps, tmp_path / "exact.p2pd", base=swarm.checkpoints / "step_2")
    with P2pdFile.open(tmp_path / "exact.p2pd") as exact:
        assert back.node.bytes_received <= 1.05 * exact.manifest.log


async def test_a_hub_without_squashes_makes_none(swarm, states):
    state = await run_to(swarm, states, 2, squashes=False)
    peer = await swarm.peer_up("a")
    await swarm.live("0.2")
    await swarm.down(peer)
    await run_to(swarm, states, 10, first=2, state=state)
    await swarm.peer_up("a", squashes="ask")
    await swarm.live("0.11")
    assert {end - begin for begin, end in spans(swarm.hub)} == {1}


async def test_artifacts_that_a_live_peer_needs_are_kept(swarm, states, monkeypatch):
    """A peer that stands still far behind still finds the deltas from there."""
    monkeypatch.setattr(retention, "KEEP_DELTAS", 2)
    state = await run_to(swarm, states, 2, squashes=False)
    await swarm.peer_up("a")
    await swarm.live("0.2")
    hub = swarm.hub
    behind = next(iter(hub.fleet.membership.peers.values()))
    state = await run_to(swarm, states, 4, first=2, state=state)
    await swarm.live("0.5")
    behind.staged = Version(0, 2)
    assert {
        s.version.step for s in hub.state.store.artifacts.values() if s.id in hub.publishing.sealed_artifacts.needed()
    } == {3, 4, 5}


@pytest.mark.parametrize("codec", ["flat", "context"])
async def test_squashes_of_any_codec(swarm, states, codec):
    state = await run_to(swarm, states, 2, codec=codec)
    peer = await swarm.peer_up("a")
    await swarm.live("0.2")
    await swarm.down(peer)
    await run_to(swarm, states, 7, first=2, state=state)
    await swarm.peer_up("a", squashes="ask")
    await swarm.live("0.8")
    assert (2, 8) in spans(swarm.hub)


async def test_anchors_do_not_hold_up_versions(swarm, states, monkeypatch):
    """While a whole state is written slowly, versions go on; the written state is that of the beginning."""
    import threading

    from p2pcast.state.shadow_snapshot import ShadowSnapshot
    from trainer_node.background import anchors_and_squashes

    monkeypatch.setattr(anchors_and_squashes, "ANCHOR_EVERY", 2)
    begun, go_on = threading.Event(), threading.Event()
    words = ShadowSnapshot.words

    def slow(self, cell):
        begun.set()
        go_on.wait(600)
        return words(self, cell)

    monkeypatch.setattr(ShadowSnapshot, "words", slow)
    state = await run_to(swarm, states, 3)
    await swarm.peer_up("a")
    await swarm.until(begun.is_set, "an anchor is being written")
    try:
        await run_to(swarm, states, 4, first=3, state=state)
        await swarm.live("0.6")
        assert swarm.versions("anchor") == ["0.1"]
    finally:
        go_on.set()
    await swarm.until(lambda: len(swarm.versions("anchor")) > 1, "it is written")
    assert swarm.versions("anchor")[1] == "0.3"
    shadow_free = await swarm.peer_up("b")
    await swarm.live("0.6", shadow_free)


async def test_with_the_base_folder_and_one_squash(swarm, states, tmp_path):
    """A peer that has the folder that the run began from downloads one squash, and nothing else."""
    base = states.write(tmp_path / "base", states.first(shapes=SHAPES), {"config.json": b"0"})
    state = states.first(shapes=SHAPES)
    await swarm.hub_up(base=base)
    await swarm.published("0.0")
    await run_to(swarm, states, 9, first=0, state=state)
    peer = await swarm.peer_up("a", base=base, squashes="ask")
    await swarm.live("0.8")
    squash = next(
        s for s in swarm.hub.state.store.artifacts.values() if s.base == Version(0, 0) and s.version == Version(0, 8)
    )
    assert peer.node.bytes_received == squash.manifest.log


async def test_an_anchor_and_one_squash(swarm, states):
    """A peer without any state asks for a squash from the anchor that it is receiving."""
    await run_to(swarm, states, 9)
    peer = await swarm.peer_up("a", squashes="ask")
    await swarm.live("0.9")
    held = {(None if s.base is None else s.base.step, s.version.step) for s in peer.relay.store.artifacts.values()}
    assert held == {(None, 1), (1, 9)}
    assert peer.node.bytes_duplicate == 0
