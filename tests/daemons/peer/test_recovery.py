"""Recovery after losing a peer, a shadow, the hub or artifacts; and the limits of retention."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace

import pytest

from p2pcast.files import disk
from p2pcast.ground import limits
from p2pcast.ground.errors import RefusedError
from p2pcast.ground.version import Version
from p2pcast.relay import upstream
from p2pcast.store import retention
from p2pcast.store.artifact_journal import JournalKind
from p2pcast.store.artifact_store import ArtifactStore
from p2pcast.store.retention import RetentionCounts
from p2pcast.trust.join_token import JoinToken
from rollout_node.control.reporter import Reporter
from topology import version_sizes
from trainer_node.background import anchors_and_squashes


async def started(swarm, states, *names, steps=2):
    """A run with some versions that all peers have; the newest state."""
    state = states.first()
    await swarm.hub_up()
    await swarm.peers_up(*names)
    for step in range(1, steps + 1):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
    return state


async def test_a_peer_comes_back_with_its_shadow(swarm, states):
    state = await started(swarm, states, "a", "b")
    await swarm.down(swarm.peers["a"])
    back = await swarm.peer_up("a")
    await swarm.live("0.2")
    assert back.node.bytes_received == 0
    await swarm.down(back)
    swarm.publish(3, states.trained(state, 3))
    await swarm.live("0.3")
    back = await swarm.peer_up("a")
    await swarm.live("0.3")
    await swarm.published("0.3")
    assert back.node.bytes_received == swarm.hub.publishing.lifecycle.published.bytes


async def test_a_peer_that_lost_its_shadow_refills_from_disk(swarm, states, tmpfs):
    state = await started(swarm, states, "a", "b")
    await swarm.down(swarm.peers["a"])
    shutil.rmtree(tmpfs / "a")
    back = await swarm.peer_up("a")
    await swarm.live("0.2")
    assert back.node.bytes_received == 0
    swarm.publish(3, states.trained(state, 3))
    await swarm.live("0.3")


async def test_a_shadow_damaged_while_down_is_repaired_from_disk(swarm, states, tmpfs, caplog):
    await started(swarm, states, "a")
    await swarm.down(swarm.peers["a"])
    weights = tmpfs / "a" / "model.safetensors"
    rotten = bytearray(weights.read_bytes())
    rotten[-1000] ^= 4
    weights.write_bytes(rotten)
    back = await swarm.peer_up("a")
    await swarm.live("0.2")
    assert back.node.bytes_received == 0
    assert "1 cells of the shadow were repaired" in caplog.text


async def test_a_shadow_damaged_while_running_is_repaired_from_disk(swarm, states, tmpfs):
    state = await started(swarm, states, "a")
    peer = swarm.peers["a"]
    shadow, received = peer.shadow, peer.node.bytes_received
    with (tmpfs / "a" / "model.safetensors").open("r+b") as file:
        file.seek(-40_000, 2)
        file.write(b"rotten")
    swarm.publish(3, states.trained(state, 3, share=0.5))
    await swarm.live("0.3")
    assert peer.sync.activity.error is None
    assert peer.shadow is shadow
    assert peer.node.bytes_received - received == swarm.hub.publishing.lifecycle.published.bytes


async def test_a_damaged_shadow_without_artifacts_is_rebuilt(swarm, states, tmpfs):
    state = await started(swarm, states, "a", "b")
    peer = swarm.peers["a"]
    for path in (swarm.folder / "a" / "deltas").iterdir():
        path.unlink()
    with (tmpfs / "a" / "model.safetensors").open("r+b") as file:
        file.seek(-40_000, 2)
        file.write(b"rotten")
    swarm.publish(3, states.trained(state, 3, share=0.5))
    await swarm.live("0.3")
    assert peer.sync.activity.error is None


RECALL_S = 600.0
"""Longer than any test: it ends when the peers are back."""


async def test_a_damaged_shadow_of_the_hub_costs_no_version(swarm, states, tmpfs, caplog):
    state = await started(swarm, states, "a")
    with (tmpfs / "hub" / "model.safetensors").open("r+b") as file:
        file.seek(-40_000, 2)
        file.write(b"rotten")
    swarm.publish(3, states.trained(state, 3, share=0.5))
    # 0.3 was opened before the corruption was found: its number is used.
    await swarm.live("1.3")
    await swarm.published("1.3")
    assert swarm.hub.publishing.lifecycle.skipped == {}
    assert "cells of the shadow were repaired" in caplog.text


class Full:
    """A watcher of the disk on which there is no room left below a folder."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.full = True

    def step(self, step, do):
        if self.full and step.what in ("write", "allocate", "create") and step.path.is_relative_to(self.folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(step.path))
        return do()


@pytest.mark.parametrize("where", ["disk", "memory"])
async def test_a_peer_without_room_says_so_once_and_loses_nothing(swarm, states, tmpfs, where):
    """The peer is unhealthy and says why; with room again it goes on, and no peer below was delayed."""
    swarm.expects_failures = True
    state = await started(swarm, states, "a", "b")
    folder = swarm.folder / "a" if where == "disk" else tmpfs / "a" / "patches"
    peer, other = swarm.peers["a"], swarm.peers["b"]
    received = peer.node.bytes_received
    room = Full(folder)
    with disk.watched(room):
        swarm.publish(3, states.trained(state, 3))
        await swarm.until(lambda: not peer.tasks.healthy()[0], "the peer is unhealthy")
        code, text = await swarm.get(peer, "/healthz")
        assert (code, "no space is left" in text, str(folder) in text) == (503, True, False)
        await swarm.live("0.3", other)
        assert peer.committed == Version(0, 2)
        room.full = False
        await swarm.live("0.3")
        await swarm.until(lambda: peer.tasks.healthy()[0], "the peer is healthy again")
    await swarm.published("0.3")
    assert peer.node.bytes_received - received <= swarm.hub.publishing.lifecycle.published.bytes
    kinds = [event.kind for event in peer.events.after(0, 10_000)[1]]
    assert (kinds.count("work_fails") >= 1, kinds.count("work_fails")) == (True, kinds.count("work_recovers"))


async def test_a_hub_without_room_skips_that_version_and_goes_on(swarm, states):
    state = await started(swarm, states, "a")
    room = Full(swarm.folder / "hub" / "partial")
    with disk.watched(room):
        swarm.publish(3, states.trained(state, 3))
        await swarm.until(lambda: "step_3" in swarm.hub.publishing.lifecycle.skipped, "it is skipped")
        assert "no space is left" in swarm.hub.publishing.lifecycle.skipped["step_3"]
        await swarm.until(lambda: not swarm.hub.tasks.healthy()[0], "the hub is unhealthy")
        room.full = False
        swarm.publish(4, states.trained(state, 4))
        await swarm.live("0.4")
        await swarm.until(lambda: swarm.hub.tasks.healthy()[0], "the hub is healthy again")


async def test_an_artifact_damaged_on_a_peers_disk_is_fetched_again(swarm, states, tmpfs):
    await started(swarm, states, "a", "b")
    await swarm.down(swarm.peers["a"])
    shutil.rmtree(tmpfs / "a")
    weights = swarm.folder / "a" / "anchors" / "0.1" / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1000, 2)
        file.write(b"damage")
    await swarm.peer_up("a")
    await swarm.live("0.2")


async def test_a_peer_that_lost_everything(swarm, states, tmpfs):
    await started(swarm, states, "a", "b")
    await swarm.down(swarm.peers["a"])
    shutil.rmtree(tmpfs / "a")
    shutil.rmtree(swarm.folder / "a")
    await swarm.peer_up("a")
    await swarm.live("0.2")


async def test_the_hub_restarts_and_nothing_is_sent_twice(swarm, states):
    state = await started(swarm, states, "a", "b", "c")
    run, epoch = swarm.hub.token.run, swarm.hub.fleet.membership.plan.epoch
    received = {n: p.node.bytes_received for n, p in swarm.peers.items()}
    await swarm.down(swarm.hub)
    await swarm.hub_up()
    assert swarm.hub.token.run == run
    assert str(swarm.hub.publishing.pipeline.head) == "0.2"
    await swarm.until(lambda: len(swarm.hub.state.sessions) == 3, "all peers are back")
    await swarm.until(
        lambda: all(p.relay.parent_failover.live is not None for p in swarm.peers.values()), "all have parents"
    )
    assert swarm.hub.fleet.membership.plan.epoch > epoch
    swarm.publish(3, states.trained(state, 3))
    await swarm.live("0.3")
    await swarm.published("0.3")
    for name, peer in swarm.peers.items():
        assert peer.node.bytes_received - received[name] == swarm.hub.publishing.lifecycle.published.bytes
        assert peer.node.bytes_duplicate == 0


async def test_a_restarted_hub_plans_by_the_saved_version_sizes(swarm, states, monkeypatch):
    monkeypatch.setattr(version_sizes, "SMALLEST", 1)
    await started(swarm, states, "a")
    planned, delta = swarm.hub.fleet.membership.sizes.bytes, swarm.hub.publishing.lifecycle.published.bytes
    assert planned / 2 < delta < 2 * planned
    await swarm.down(swarm.hub)
    await swarm.hub_up()
    assert swarm.hub.fleet.membership.sizes.bytes == planned


async def test_the_hub_restarts_without_its_shadow(swarm, states, tmpfs):
    state = await started(swarm, states, "a")
    await swarm.down(swarm.hub)
    shutil.rmtree(tmpfs / "hub")
    await swarm.hub_up()
    swarm.publish(3, states.trained(state, 3))
    await swarm.live("0.3")


async def test_old_folders_that_look_new_are_not_published_again(swarm, states, monkeypatch):
    """Another mount, other inodes: the hub restarts and all fingerprints differ, of versions too that retention has
    removed.
    """
    monkeypatch.setattr(retention, "KEEP_DELTAS", 1)
    monkeypatch.setattr(retention, "KEEP_ANCHORS", 1)
    monkeypatch.setattr(anchors_and_squashes, "ANCHOR_EVERY", 2)
    await started(swarm, states, "a", steps=4)
    await swarm.until(lambda: "0.2" not in swarm.versions(), "it is let go")
    seen = {step: swarm.hub.state.history[step].folder for step in swarm.steps}
    await swarm.down(swarm.hub)
    kept = dict(swarm.steps)
    for step, (state, files) in kept.items():
        swarm.publish(step, state, files)
    await swarm.hub_up()
    await swarm.until(
        lambda: all(swarm.hub.state.history[k].folder != seen[k] for k in seen), "the hub has looked at all again"
    )
    assert str(swarm.hub.publishing.pipeline.head) == "0.4"


async def test_an_unsealed_artifact_is_forgotten(swarm, states):
    """The hub dies in the middle of a version: peers drop their part of it when the hub is back without it."""
    state = await started(swarm, states, "a", "b")
    hub = swarm.hub
    record, log = begin_unsealed(hub)
    holding = hub.node.open(record, None, log)
    await swarm.until(lambda: all(holding.id in p.node.holdings for p in swarm.peers.values()), "peers receive it")
    await swarm.until(
        lambda: all(p.sync.activity.state == "receiving" for p in swarm.peers.values()), "peers decode it"
    )
    await swarm.down(hub)
    await swarm.hub_up(recall_s=RECALL_S)
    await swarm.until(lambda: all(holding.id not in p.node.holdings for p in swarm.peers.values()), "peers forget it")
    swarm.publish(3, states.trained(state, 3))
    # Peers have shown that 0.9 was opened, which this hub does not remember: no number up to it is used again.
    await swarm.live("1.3")


def begin_unsealed(hub):
    """The first record of a version of which no more will come."""
    from p2pcast.artifact import Open, Packer, run_id
    from p2pcast.ground import limits
    from p2pcast.ground.version import Version

    layout, base = hub.publishing.pipeline.shadow.layout, hub.publishing.pipeline.head
    record = Open(
        bytes(16), base, "delta", layout.layout_id, limits.PIECE_BYTES, run_id(hub.state.key.public), Version(0, 9)
    )
    return Packer(hub.state.key, record, layout).open_signed, hub.state.store.begin(record, layout)


async def test_an_anchor_that_cannot_be_stored_is_not_built_upon(swarm, states):
    await swarm.hub_up()
    await swarm.peer_up("a")
    anchors = swarm.folder / "hub" / "anchors"
    anchors.rmdir()
    anchors.write_text("not a folder")
    state = states.first()
    swarm.publish(1, state)
    await swarm.until(lambda: "step_1" in swarm.hub.publishing.lifecycle.skipped, "the first folder is skipped")
    assert str(anchors) in swarm.hub.publishing.lifecycle.skipped["step_1"]
    anchors.unlink()
    anchors.mkdir()
    swarm.publish(2, states.trained(state, 2))
    await swarm.live("0.2")
    await swarm.published("0.2")
    assert swarm.versions("anchor") == ["0.2"]


async def test_a_later_anchor_that_cannot_be_stored_costs_nothing(swarm, states, monkeypatch):
    monkeypatch.setattr(anchors_and_squashes, "ANCHOR_EVERY", 2)
    state = await started(swarm, states, "a")
    anchors = swarm.folder / "hub" / "anchors"
    anchors.rename(anchors.with_name("aside"))
    anchors.write_text("not a folder")
    swarm.publish(3, state)
    await swarm.live("0.3")
    await swarm.published("0.3")
    anchors.unlink()
    anchors.with_name("aside").rename(anchors)
    swarm.publish(4, states.trained(state, 4))
    await swarm.live("0.4")
    await swarm.published("0.4")
    assert swarm.hub.publishing.lifecycle.skipped == {}
    await swarm.until(lambda: len(swarm.versions("anchor")) == 2, "an anchor is written")
    assert swarm.versions("anchor")[1] in ("0.3", "0.4")


@pytest.mark.parametrize("every", [2, 100])
async def test_retention_never_breaks_a_late_joiner(swarm, states, monkeypatch, every):
    monkeypatch.setattr(anchors_and_squashes, "ANCHOR_EVERY", every)
    monkeypatch.setattr(retention, "KEEP_DELTAS", 1)
    monkeypatch.setattr(retention, "KEEP_ANCHORS", 1)
    state = await started(swarm, states, "a", steps=5)
    late = await swarm.peer_up("b")
    await swarm.live("0.5", late)
    for step in (6, 7):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
    later = await swarm.peer_up("c")
    await swarm.live("0.7", later)
    if every == 2:
        assert len(swarm.versions()) < 5


async def test_a_late_joiner_takes_the_newest_anchor(swarm, states, monkeypatch):
    monkeypatch.setattr(anchors_and_squashes, "ANCHOR_EVERY", 3)
    await started(swarm, states, "a", steps=6)
    await swarm.until(lambda: len(swarm.versions("anchor")) == 2, "an anchor is written")
    late = await swarm.peer_up("b")
    await swarm.live("0.6", late)
    held = sorted(str(s.version) for s in late.relay.store.artifacts.values())
    assert held[0] in swarm.versions("anchor")
    sizes = {str(s.version): s.manifest.log for s in swarm.hub.state.store.artifacts.values() if str(s.version) in held}
    assert late.node.bytes_received == sum(s.manifest.log for s in late.relay.store.artifacts.values())
    assert len(sizes) == len(held)


async def test_a_wrong_token_is_refused(swarm, states):
    await swarm.hub_up()
    good = JoinToken.parse((swarm.folder / "token").read_text())
    for wrong in (JoinToken(good.run, bytes(20)), JoinToken(bytes(16), good.secret)):
        assert isinstance(await swarm.ended(swarm.peer_begun("a", token=wrong)), RefusedError)
    assert not swarm.hub.state.sessions


BIG = {"w": ("bfloat16", (400_000,))}
"""Deltas of it have a dozen pieces."""


def half_received(swarm, name: str, version: str) -> int:
    """Leave in a peer's folder what a process that was killed in the middle of receiving leaves; its bytes."""
    store = swarm.hub.state.store
    stored = next(s for s in store.artifacts.values() if str(s.version) == version)
    assembly, piece = stored.assembly, stored.assembly.open.piece
    pieces = range(0, assembly.pieces, 2)
    part = ArtifactStore(swarm.folder / name, store.run_key, keep_partial=True).begin(
        assembly.open, assembly.layout, resumable=True
    )
    part.note([(JournalKind.OPEN, assembly.open_signed), *((JournalKind.BATCH, b) for b in assembly.signed_batches())])
    whole = store.open_log(stored)
    sizes = [assembly.piece_bytes(index) for index in pieces]
    for index, size in zip(pieces, sizes, strict=True):
        part.write(index * piece, [whole.read(index * piece, size)])
    part.close()
    whole.close()
    return sum(sizes)


async def test_a_restarted_peer_resumes_a_partial_artifact_by_piece(swarm, states):
    state = states.first(shapes=BIG)
    swarm.publish(1, state)
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1")
    await swarm.down(peer)
    swarm.publish(2, states.trained(state, 2, share=1))
    await swarm.published("0.2")
    had = half_received(swarm, "a", "0.2")
    size = swarm.hub.publishing.lifecycle.published.bytes
    assert 0.4 * size < had < 0.7 * size
    peer = await swarm.peer_up("a")
    await swarm.live("0.2")
    # The last piece's length was unknown.
    assert 0 <= peer.node.bytes_received - (size - had) <= 65536
    assert peer.node.bytes_duplicate == 0
    assert list((swarm.folder / "a" / "partial").iterdir()) == []


async def test_a_useless_partial_artifact_is_dropped(swarm, states):
    state = states.first(shapes=BIG)
    swarm.publish(1, state)
    await swarm.hub_up()
    await swarm.peers_up("a", "b")
    for step in (2, 3):
        swarm.publish(step, states.trained(state, step, share=1))
        await swarm.live(f"0.{step}")
    await swarm.down(swarm.peers["a"])
    # The shadow is complete, so the deltas before it are not needed any more.
    for path in (swarm.folder / "a" / "deltas").glob("0.2-*"):
        path.unlink()
    half_received(swarm, "a", "0.2")
    peer = await swarm.peer_up("a")
    await swarm.live("0.3")
    await swarm.until(lambda: not any(h.idle for h in peer.node.holdings.values()), "it is given up")
    assert peer.node.bytes_received == 0
    await swarm.until(lambda: list((swarm.folder / "a" / "partial").iterdir()) == [], "nothing of it is left")


async def test_a_version_cut_short_by_the_hubs_death_is_aborted_everywhere(swarm, states):
    """A peer that had received a part of it, and was down meanwhile too, does not keep it."""
    state = states.first(shapes=BIG)
    swarm.publish(1, state)
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1")
    swarm.publish(2, states.trained(state, 2, share=1))
    await swarm.live("0.2")
    await swarm.down(peer)
    for path in (swarm.folder / "a" / "deltas").iterdir():
        path.unlink()
    shutil.rmtree(swarm.tmpfs / "a")
    half_received(swarm, "a", "0.2")
    await swarm.down(swarm.hub)
    for path in (swarm.folder / "hub" / "deltas").iterdir():
        path.unlink()
    shutil.rmtree(swarm.tmpfs / "hub")
    (swarm.folder / "hub" / "hub.json").write_text("{}")
    (swarm.folder / "hub" / "published.log").unlink()
    await swarm.hub_up()
    await swarm.until(
        lambda: swarm.hub.publishing.pipeline.head is not None and swarm.hub.publishing.pipeline.head.step == 2,
        "it is made again",
    )
    back = await swarm.peer_up("a")
    await swarm.live("1.2")
    await swarm.until(
        lambda: list((swarm.folder / "a" / "partial").iterdir()) == [], "nothing is left of the other one"
    )
    assert {h.idle for h in back.node.holdings.values()} == {False}


async def test_a_link_that_outlasts_many_versions_remembers_the_last_few(swarm, states, monkeypatch):
    monkeypatch.setattr(upstream, "MAX_HANDLES", 3)
    monkeypatch.setattr(limits, "MAX_CATALOG", 4)
    await started(swarm, states, "a", steps=9)
    (above,) = swarm.peers["a"].node.upstreams
    assert len(above.handles) == 3
    assert len(above.offers) <= 4
    assert swarm.peers["a"].node.bytes_duplicate == 0


async def test_the_hub_forgets_artifacts_that_never_completed(swarm, states, monkeypatch):
    """A peer may claim any artifacts, and ask for missing ones any number of times."""
    said = []
    news = Reporter._changes

    def lies(telling):
        said.extend(os.urandom(16) for _ in range(50))
        return replace(news(telling), held=said[-50:])

    monkeypatch.setattr(Reporter, "_changes", lies)
    await started(swarm, states, "a", steps=2)
    for _ in range(20):
        swarm.peers["a"].startup.hub_session.find_sources(os.urandom(16), [])
    count = len(said)
    await swarm.until(lambda: len(said) > count + 100, "it has said more")
    sources, held = swarm.hub.control.plan_distributor.sources, swarm.hub.node.holdings.keys()
    assert sources._whole.keys() | sources._parts.keys() <= held
    assert all(mine <= held for mine in sources._held.values())


async def test_retention_options_decide_the_files_on_disk(swarm, states):
    state = states.first()
    await swarm.hub_up(anchor_every=2, counts=RetentionCounts(2, 1), squashes=False)
    peer = await swarm.peer_up("a", counts=RetentionCounts(1, 1, 3))
    for step in range(1, 8):
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
        state = states.trained(state, step)
    await swarm.until(lambda: swarm.versions("anchor")[-1:] == ["0.7"], "a whole state is written every two versions")
    await swarm.until(lambda: len(swarm.versions("delta")) == 2, "two deltas stay")
    assert swarm.versions("delta") == ["0.6", "0.7"]
    assert set(swarm.versions("anchor")) == {"0.5", "0.7"}, "the one that the older delta starts from, and the newest"
    await swarm.until(
        lambda: sum(s.base is not None for s in peer.relay.store.artifacts.values()) <= 2,
        "its first anchor is too far back",
    )
    await swarm.down(peer)
    shutil.rmtree(swarm.tmpfs / "a")
    back = await swarm.peer_up("a", counts=RetentionCounts(1, 1, 3))
    await swarm.live("0.7", back)
