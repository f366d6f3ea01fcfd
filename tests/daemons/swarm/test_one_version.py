"""A version number always stands for one state, whichever process dies at any time, and whichever copy of its state
folder a hub finds.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading

from p2pcast.files import disk
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from p2pcast.store.artifact_store import ArtifactStore

RECALL_S = 600.0
"""Longer than any test: it ends when the peers are back."""


async def started(swarm, states, *names):
    """Version 0.2 everywhere; its state."""
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    await swarm.peers_up(*names)
    await swarm.live("0.1")
    state = states.trained(state, 2)
    swarm.publish(2, state)
    await swarm.live("0.2")
    return state


class Held:
    """The store's seal at a hub waits for ``go``; with ``dies`` nothing reaches the disk then, as when the process dies
    there.
    """

    def __init__(self, monkeypatch, *, dies: bool = False) -> None:
        self.go, self.asked = threading.Event(), threading.Event()
        seal = ArtifactStore.seal

        def waits(store, log, assembly, durable=None):
            if durable is not None:  # a hub's own
                self.asked.set()
                assert self.go.wait(600)
                if dies:
                    raise LocalError("the end of this hub")
            return seal(store, log, assembly, durable)

        monkeypatch.setattr(ArtifactStore, "seal", waits)


def whole(swarm, version: Version) -> bool:
    return all(
        any(h.open.version == version and h.complete for h in p.node.holdings.values()) for p in swarm.peers.values()
    )


async def test_no_engine_commits_before_the_hub_holds_the_version_on_its_disk(swarm, states, monkeypatch):
    state = await started(swarm, states, "a", "b")
    held = Held(monkeypatch)
    swarm.publish(3, states.trained(state, 3))
    await swarm.until(lambda: held.asked.is_set() and whole(swarm, Version(0, 3)), "0.3 is whole at all peers")
    for _ in range(20):
        await asyncio.sleep(0.01)
        assert all(p.committed == p.staged == Version(0, 2) for p in swarm.peers.values())
        assert all(
            Version(0, 3) not in {s.version for s in p.relay.store.artifacts.values()} for p in swarm.peers.values()
        )
    held.go.set()
    await swarm.live("0.3")


async def test_a_hub_that_dies_between_seal_and_disk_goes_on_with_another_number_and_other_bytes(
    swarm, states, monkeypatch
):
    state = await started(swarm, states, "a", "b")
    with monkeypatch.context() as patched:
        held = Held(patched, dies=True)
        swarm.publish(3, states.trained(state, 3))
        await swarm.until(lambda: held.asked.is_set() and whole(swarm, Version(0, 3)), "0.3 is whole at all peers")
        held.go.set()
        await swarm.ended(swarm.hub)
    other = states.trained(state, 33)
    swarm.publish(3, other)
    await swarm.hub_up(recall_s=RECALL_S)
    await swarm.live("1.3")
    for peer in swarm.peers.values():
        assert {s.version for s in peer.relay.store.artifacts.values()} >= {Version(1, 3)}
        assert Version(0, 3) not in {h.open.version for h in peer.node.holdings.values()}
        await swarm.until(
            lambda p=peer: [r.versions for r in p.runners] == [[Version(0, 1), Version(0, 2), Version(1, 3)]],
            "the engines went from 0.2 to 1.3",
        )


class FullAtTheTail:
    """No room for the tail of a version, which follows all its pieces."""

    def __init__(self, hub) -> None:
        self.partial = hub / "partial"
        self.full = True

    def step(self, step, do):
        is_tail = step.what == "write" and step.path.is_relative_to(self.partial) and len(step.parts) == 2 and step.at
        if self.full and is_tail:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(step.path))
        return do()


async def short_of_room(swarm) -> None:
    await swarm.until(lambda: not swarm.hub.tasks.healthy()[0], "the hub is unhealthy")
    assert "'seal 0.3' waits: no space is left" in swarm.hub.tasks.healthy()[1]


async def test_a_hub_whose_disk_is_full_at_the_tail_seals_once_there_is_room(swarm, states):
    state = await started(swarm, states, "a")
    room = FullAtTheTail(swarm.folder / "hub")
    with disk.watched(room):
        swarm.publish(3, states.trained(state, 3))
        await short_of_room(swarm)
        assert swarm.peers["a"].committed == Version(0, 2), "no peer takes a version that is not durable"
        room.full = False
        await swarm.live("0.3")
    await swarm.published("0.3")
    assert swarm.hub.tasks.healthy()[0]


async def test_a_hub_that_ends_with_a_full_disk_at_the_tail_uses_no_number_twice(swarm, states):
    state = await started(swarm, states, "a")
    with disk.watched(FullAtTheTail(swarm.folder / "hub")):
        swarm.publish(3, states.trained(state, 3))
        await short_of_room(swarm)
        await swarm.down(swarm.hub)
    # The hub's own notes must name the opened version: no peer is connected to show it.
    await swarm.down(swarm.peers["a"])
    swarm.publish(3, states.trained(state, 33))
    await swarm.hub_up()
    await swarm.published("1.3")
    await swarm.peer_up("a")
    await swarm.live("1.3")


def copied(swarm, name: str):
    kept = swarm.folder / f"{name}-copy"
    shutil.copytree(swarm.folder / name, kept)
    return kept


def restored(swarm, kept) -> None:
    shutil.rmtree(swarm.folder / "hub")
    shutil.move(kept, swarm.folder / "hub")
    shutil.rmtree(swarm.tmpfs / "hub")


async def test_a_hub_restored_from_an_older_copy_learns_from_its_peers(swarm, states, caplog):
    state = await started(swarm, states, "a", "b")
    await swarm.down(swarm.hub)
    kept = copied(swarm, "hub")
    (kept / "peers.log").write_bytes(b"")
    await swarm.hub_up()
    swarm.publish(3, states.trained(state, 3))
    await swarm.live("0.3")
    await swarm.down(swarm.hub)
    restored(swarm, kept)
    swarm.publish(3, states.trained(state, 33))
    await swarm.hub_up(recall_s=600.0)
    await swarm.until(lambda: "proves a version 0.3 that this hub does not hold" in caplog.text, "a peer shows it")
    swarm.hub.state.recovery.done.set()
    await swarm.live("1.3")
    swarm.publish(4, states.trained(state, 4))
    await swarm.live("1.4")


async def test_a_returning_peer_with_another_state_discards_that_state(swarm, states, caplog):
    """The peer was away while a restored hub made that version with other bytes. Both states are discarded, and the hub
    continues above both.
    """
    state = await started(swarm, states, "a", "b")
    await swarm.down(swarm.hub)
    kept = copied(swarm, "hub")
    await swarm.hub_up()
    swarm.publish(3, states.trained(state, 3))
    await swarm.live("0.3")
    await swarm.down(swarm.peers["a"])
    await swarm.down(swarm.peers["b"])
    (swarm.folder / "b").rename(swarm.folder / "gone")
    shutil.rmtree(swarm.tmpfs / "b")
    await swarm.down(swarm.hub)
    restored(swarm, kept)
    swarm.publish(3, states.trained(state, 33))
    await swarm.hub_up()
    await swarm.peer_up("b")
    await swarm.live("0.3")
    back = await swarm.peer_up("a")
    await swarm.until(
        lambda: "is not the run's" in caplog.text and back.staged is not None, "it gives up its own state"
    )
    await swarm.live("0.3")
    assert swarm.hub.state.numbers.floor == 1
    swarm.publish(4, states.trained(state, 4))
    await swarm.live("1.4")
    assert back.relay.store.identity(Version(1, 4)) == swarm.hub.state.store.identity(Version(1, 4))


async def test_every_artifact_names_the_hashes_of_its_base_and_version(swarm, states, monkeypatch):
    monkeypatch.setattr("trainer_node.background.anchors_and_squashes.ANCHOR_EVERY", 3)
    state = await started(swarm, states, "a")
    for step in range(3, 12):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
    store = swarm.hub.state.store
    await swarm.until(lambda: len([s for s in store.artifacts.values() if s.base is None]) > 1, "an anchor is kept")
    await swarm.until(
        lambda: any(s.base and s.version.step - s.base.step > 1 for s in store.artifacts.values()), "a squash is kept"
    )
    for stored in store.artifacts.values():
        assert stored.manifest.identity == store.identity(stored.version)
        if stored.base is not None:
            assert stored.assembly.open.base_hash == store.identity(stored.base)
    again = ArtifactStore(store.root, store.run_key)
    assert {s.id: s.manifest.identity for s in again.artifacts.values()} == {
        s.id: s.manifest.identity for s in store.artifacts.values()
    }
    assert all(s.assembly.confirmed for s in again.artifacts.values())


async def test_a_connected_peer_with_another_state_discards_that_state(swarm, states):
    """As when a restored hub made the version with other bytes: the catalog names another hash for the version that the
    engine serves.
    """
    await started(swarm, states, "a")
    peer = swarm.peers["a"]
    engine = peer.runners[0]
    served = list(engine.versions)
    peer.sync.stage.identities.contradict(peer.startup.catalog.identities() | {Version(0, 2): bytes(32)})
    await swarm.until(lambda: peer.staged != Version(0, 2), "the state is given up")
    peer.sync.stage.identities.contradict(peer.startup.catalog.identities())
    await swarm.live("0.2")
    assert len(engine.versions) > len(served)
