"""Repair of corrupt cells of a peer's shadow, when its disk is damaged too. The peer fetches only those cells from
others and verifies them by their signatures.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from p2pcast.ground import limits
from p2pcast.ground.version import Version
from rollout_node.sync import downloader

MIB = 1 << 20
SHAPES = {f"layer.{n}": ("bfloat16", (3, MIB // 4)) for n in range(8)}
"""8 cells of 1.5 MiB, in 12 pieces of an anchor."""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a busy machine a source may come late."""
    monkeypatch.setattr(downloader, "HOPELESS_S", 600.0)


async def started(swarm, states, *names, steps=3):
    state = states.first(shapes=SHAPES)
    await swarm.hub_up(chains=1)
    await swarm.peers_up(*names)
    for step in range(1, steps + 1):
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
        state = states.trained(state, step)
    return state


def rot(swarm, name: str, *tensors: int) -> None:
    """A bit in the middle of each of these."""
    path = swarm.tmpfs / name / "model.safetensors"
    start = path.stat().st_size - len(SHAPES) * 3 * MIB // 2
    with path.open("r+b") as file:
        for number in tensors:
            at = start + number * 3 * MIB // 2 + 700_001
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 16]))


def wipe(swarm, name: str) -> None:
    """Nothing of the run is left on its disk but its own papers."""
    for part in ("deltas", "anchors"):
        for path in (swarm.folder / name / part).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def most_bytes(swarm, cells: int, artifacts: int) -> int:
    """Of an anchor 3 pieces a cell at most, and of each delta its share and a piece."""
    deltas = [s.manifest.log for s in swarm.hub.state.store.artifacts.values() if s.base is not None]
    share = cells / len(SHAPES)
    return cells * 3 * limits.ANCHOR_PIECE_BYTES + sum(
        int(size * share) + (cells + 1) * limits.PIECE_BYTES for size in sorted(deltas)[-artifacts:]
    )


async def test_cells_damaged_while_down_are_fetched_one_by_one(swarm, states, caplog):
    state = await started(swarm, states, "a", "b")
    await swarm.down(swarm.peers["a"])
    rot(swarm, "a", 2)
    wipe(swarm, "a")
    back = await swarm.peer_up("a")
    await swarm.live("0.3")
    assert 0 < back.node.bytes_received <= most_bytes(swarm, 1, 2) < 5 * MIB
    assert back.node.bytes_duplicate == 0
    assert back.startup.timeline.healed_cells == 1
    assert "made anew" not in caplog.text
    assert back.shadow.verify() == []
    assert list((swarm.folder / "a" / "partial").iterdir()) == []
    assert not any(h.excerpt for h in back.node.holdings.values())
    assert not back.node.excerpts
    assert not back.node.pulled
    swarm.publish(4, state)
    await swarm.live("0.4")


async def test_cells_damaged_while_running_are_fetched_without_delay_for_others(swarm, states, caplog):
    state = await started(swarm, states, "a", "b", "c")
    chain = [n.ident for n in sorted(swarm.peers.values(), key=lambda p: len(p.node.path))]
    first = next(p for p in swarm.peers.values() if p.ident == chain[0])
    name, shadow, links = first.config.name, first.shadow, set(first.node.downstream.children)
    received = {n: p.node.bytes_received for n, p in swarm.peers.items()}
    rot(swarm, name, 0, 5)
    wipe(swarm, name)
    runners = [r for p in swarm.peers.values() for r in p.runners]
    await swarm.until(lambda: all(r.versions[-1:] == [Version(0, 3)] for r in runners), "engines are through with it")
    before = [len(r.versions) for r in runners]
    swarm.publish(4, state)
    await swarm.live("0.4")
    await swarm.until(lambda: all(r.versions[-1:] == [Version(0, 4)] for r in runners), "engines are through with it")
    size = swarm.hub.publishing.lifecycle.published.bytes
    fetched = first.node.bytes_received - received[name] - size
    assert 0 < fetched <= most_bytes(swarm, 2, 2)
    assert first.shadow is shadow
    assert first.sync.activity.error is None
    assert "made anew" not in caplog.text
    others = [p for p in swarm.peers.values() if p is not first]
    assert [p.node.bytes_received - received[p.config.name] for p in others] == [size] * 2
    assert set(first.node.downstream.children) >= {c for c in links if c.stripes}, "those below it stayed"
    assert [len(r.versions) for r in runners] == [count + 1 for count in before]
    assert (await swarm.get(first, "/metrics"))[1].count("p2pcast_peer_healed_cells_total 2.0") == 1


async def test_an_anchor_with_the_same_damaged_cell_is_dropped(swarm, states):
    """The cells that can be are put right from disk."""
    await started(swarm, states, "a", "b")
    await swarm.down(swarm.peers["a"])
    rot(swarm, "a", 1, 6)
    weights = swarm.folder / "a" / "anchors" / "0.1" / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size - 2 * MIB)
        file.write(b"damage")
    back = await swarm.peer_up("a")
    await swarm.live("0.3")
    assert 0 < back.node.bytes_received <= 3 * limits.ANCHOR_PIECE_BYTES
    assert not weights.exists()
    assert back.shadow.verify() == []


async def test_damaged_weights_in_an_engine_trigger_a_check_of_the_shadow(swarm, states, caplog):
    """The engine's audit finds the damage without a new version."""
    await started(swarm, states, "a", "b")
    peer = swarm.peers["a"]
    rot(swarm, "a", 3)
    wipe(swarm, "a")
    shutil.rmtree(swarm.out("a"))
    await swarm.until(lambda: peer.startup.timeline.healed_cells == 1, "it is healed")
    await swarm.until(lambda: peer.runners[0].ready, "the engine is well")
    await swarm.live("0.3")
    assert "made anew" not in caplog.text


async def test_a_source_that_sends_other_cells_is_refused(swarm, states, monkeypatch):
    """The source has a certificate and the run's records, and is asked first. Its pieces do not match the signed
    hashes.
    """
    monkeypatch.setattr(downloader, "ENOUGH", 1)
    monkeypatch.setattr(downloader, "ANSWER_S", 60.0)
    await started(swarm, states, "a", "evil")
    await swarm.down(swarm.peers["a"])
    rot(swarm, "a", 4)
    wipe(swarm, "a")
    evil, every = swarm.peers["evil"], [s.id for s in swarm.hub.state.store.artifacts.values()]
    holders = swarm.hub.control.plan_distributor.sources._whole
    await swarm.until(
        lambda: all(evil.ident.hex() in holders.get(a, ()) for a in every), "the hub knows that it holds all"
    )
    real = evil.node.payload

    def forged(holding, index):
        found = real(holding, index)
        return None if found is None else (np.frombuffer(found, np.uint8) ^ 1).tobytes()

    monkeypatch.setattr(evil.node, "payload", forged)
    back = await swarm.peer_up("a")
    await swarm.live("0.3", back)
    assert back.node.garbled == {evil.ident: 1}
    assert back.startup.timeline.healed_cells == 1
    assert back.shadow.verify() == []


async def test_without_the_hub_the_parent_is_asked(swarm, states):
    await started(swarm, states, "a", "b")
    below = max(swarm.peers.values(), key=lambda p: len(p.node.path))
    assert len(below.node.path) == 3
    await swarm.down(swarm.hub)
    await swarm.until(lambda: not below.startup.hub_session.connected, "it is alone with its parent")
    received, shadow = below.node.bytes_received, below.shadow
    rot(swarm, below.config.name, 7)
    wipe(swarm, below.config.name)
    below.sync.stage.check.suspect()
    await swarm.until(lambda: below.startup.timeline.healed_cells == 1, "it is healed")
    assert 0 < below.node.bytes_received - received < 5 * MIB
    assert below.shadow is shadow
    assert shadow.verify() == []
    assert below.staged == Version(0, 3)


async def test_repair_links_are_dialled_again(swarm, states, monkeypatch):
    """A source opens an artifact once per link, so a released artifact needs a new link."""
    monkeypatch.setattr(downloader, "LINGER_S", 3600.0)
    monkeypatch.setattr(downloader, "AVOID_S", 3600.0)
    monkeypatch.setattr("p2pcast.relay.pull_schedule.PULL_STALL_S", 3600.0)
    await started(swarm, states, "b")
    late = await swarm.peer_up("late")
    await swarm.live("0.3")
    assert late.relay.downloader.sources
    rot(swarm, "late", 5)
    wipe(swarm, "late")
    late.sync.stage.check.suspect()
    await swarm.until(lambda: late.startup.timeline.healed_cells == 1, "it is healed")
    assert late.shadow.verify() == []
    assert late.node.bytes_duplicate == 0


async def test_cells_are_fetched_from_the_mirror_without_reachable_nodes(swarm, states, monkeypatch):
    monkeypatch.setattr(downloader, "HOPELESS_S", 0.0)
    url = f"file://{swarm.folder / 'mirror'}"
    state = states.first(shapes=SHAPES)
    hub = await swarm.hub_up(mirror=url)
    swarm.publish(1, state)
    await swarm.published("0.1")
    swarm.publish(2, states.trained(state, 2))
    await swarm.published("0.2")
    peer = await swarm.peer_up("a", mirror=url)
    await swarm.live("0.2")
    await swarm.mirrored("0.2")
    await swarm.down(hub)
    await swarm.until(
        lambda: peer.sync.mirror_source.in_use and len(peer.sync.mirror_source.entries) == 2, "it follows the mirror"
    )
    rot(swarm, "a", 2)
    wipe(swarm, "a")
    before, shadow = peer.sync.mirror_source.bytes_received, peer.shadow
    peer.sync.stage.check.suspect()
    await swarm.until(lambda: peer.startup.timeline.healed_cells == 1, "it is healed")
    assert 0 < peer.sync.mirror_source.bytes_received - before < 5 * MIB
    assert peer.shadow is shadow
    assert shadow.verify() == []
    await swarm.until(lambda: list((swarm.folder / "a" / "partial").iterdir()) == [], "nothing is left of it")
