"""From the trainer's folder to the peers' folders, bit for bit: versions, bases, branches, layouts, late joiners."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from p2pcast.checkpoint import Checkpoint
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from p2pcast.offline import verify_digests


async def test_versions_arrive_bit_for_bit(swarm, states):
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    await swarm.peers_up("a", "b", "c")
    await swarm.live("0.1")
    files = {"config.json": b'{"a": 1}', "tokenizer/vocab.txt": b"x" * 70_000, "empty": b""}
    for step, changes in enumerate(({}, {"config.json": b"{}"}, {}, {"new.json": b"[]"}), 2):
        state = states.trained(state, step)
        files = files | changes
        swarm.publish(step, state, files)
        await swarm.live(f"0.{step}")
    assert sorted(set(swarm.versions("delta"))) == ["0.2", "0.3", "0.4", "0.5"]
    assert swarm.versions("anchor") == ["0.1"]
    for peer in swarm.peers.values():
        assert peer.node.bytes_duplicate == 0
        kept = swarm.hub.state.store.artifacts.values()
        each = [a for a in kept if a.base is None or a.version.step == a.base.step + 1]
        assert peer.node.bytes_received == sum(a.manifest.log for a in each), (
            "the hub's squashes are for those who were away"
        )
        assert (await swarm.get(peer, "/readyz"))[0] == 200


async def test_a_version_without_changes_and_one_where_all_changes(swarm, states):
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    await swarm.peers_up("a", "b")
    await swarm.live("0.1")
    swarm.publish(2, state)
    await swarm.live("0.2")
    await swarm.published("0.2")
    assert swarm.hub.publishing.lifecycle.published.changed == 0
    assert swarm.hub.publishing.lifecycle.published.bytes == 0
    everything = states.trained(state, 3, share=1.0)
    swarm.publish(3, everything)
    await swarm.live("0.3")
    await swarm.published("0.3")
    assert swarm.hub.publishing.lifecycle.published.changed == swarm.hub.publishing.lifecycle.published.params
    swarm.publish(4, everything, {})
    await swarm.live("0.4")


async def test_a_small_file_that_goes(swarm, states):
    state = states.first()
    swarm.publish(1, state, {"config.json": b"{}", "gone.json": b"[]"})
    await swarm.hub_up()
    await swarm.peer_up("a")
    await swarm.live("0.1")
    swarm.publish(2, state, {"config.json": b"{}"})
    await swarm.live("0.2")
    swarm.publish(3, state, {"config.json": b"{}", "gone.json": b"[1]"})
    await swarm.live("0.3")


async def test_small_files_that_come_late_or_change_are_a_version_of_their_own(swarm, states):
    """The weights stay: peers, a newcomer, a peer that returns and a mirror's reader get the files of the folder."""
    url = f"file://{swarm.folder / 'mirror'}"
    state, final = states.first(), {"config.json": b'{"a": 2}', "tokenizer.json": b"{}"}
    folder = swarm.checkpoints / "step_1"
    await swarm.hub_up(mirror=url)
    returning = (await swarm.peers_up("there", "returning"))[1]
    states.write(folder, state, {"config.json": b'{"a": 1}'})
    swarm.steps[1] = (state, {"config.json": b'{"a": 1}'})
    await swarm.live("0.1")
    await swarm.down(returning)
    for path, contents in final.items():
        (folder / path).write_bytes(contents)
    (folder / "STABLE").touch()
    swarm.steps[1] = (state, final)
    await swarm.live("1.1")
    await swarm.published("1.1")
    assert swarm.hub.publishing.lifecycle.published.changed == 0
    code, text = await swarm.get(swarm.hub, "/wait?folder=step_1&timeout_s=600")
    assert (code, json.loads(text)["version"]) == (200, "1.1")
    await swarm.peers_up("newcomer", "returning")
    await swarm.live("1.1")
    digests, files = await swarm.status(swarm.hub), json.loads((await swarm.get(swarm.hub, "/files"))[1])["files"]
    for name in ("there", "newcomer", "returning"):
        assert verify_digests(swarm.out(name) / "step_1", digests, files).version == Version(1, 1)
    copied = shutil.copytree(swarm.out("there") / "step_1", swarm.folder / "copied")
    (copied / "config.json").write_bytes(b'{"a": 9}')
    assert "small file 'config.json' differs" in verify_digests(copied, digests, files).faults[0]
    await swarm.mirrored("1.1")
    far = await swarm.peer_up("far", hub=None, mirror=url)
    await swarm.live("1.1", far)
    swarm.publish(2, states.trained(state, 2), final)
    await swarm.published("1.2")
    (folder / "config.json").write_bytes(b'{"a": 3}')
    (folder / "STABLE").touch()
    await swarm.until(lambda: "step_1" in swarm.hub.publishing.lifecycle.skipped, "an older step stays as it is")
    assert "config.json" in swarm.hub.publishing.lifecycle.skipped["step_1"]
    assert str(swarm.hub.publishing.pipeline.head) == "1.2"


async def test_with_the_base_at_hand_nothing_is_downloaded(swarm, states, tmp_path):
    state = states.first()
    base = states.write(tmp_path / "base", state, {"config.json": b"{}"})
    swarm.steps[0] = (state, {"config.json": b"{}"})
    await swarm.hub_up(base=base)
    with_base = await swarm.peer_up("a", base=base)
    without = await swarm.peer_up("b")
    await swarm.live("0.0")
    assert with_base.node.bytes_received == 0
    assert without.node.bytes_received > 0
    before = without.node.bytes_received
    swarm.publish(1, states.trained(state, 1))
    await swarm.live("0.1")
    await swarm.published("0.1")
    assert swarm.versions("anchor") == ["0.0"]
    assert (
        with_base.node.bytes_received
        == without.node.bytes_received - before
        == swarm.hub.publishing.lifecycle.published.bytes
    )


async def test_a_base_is_recognised_while_the_hub_still_reads_the_folder(swarm, states, tmp_path):
    """The peer joins before the hub has any version."""
    state = states.first()
    base = states.write(tmp_path / "base", state, {"config.json": b'{"a": 1}'})
    await swarm.hub_up()
    peer = await swarm.peer_up("a", base=base)
    await swarm.until(lambda: peer.startup.catalog.complete.is_set(), "the hub has said that it has nothing")
    swarm.publish(1, state)
    await swarm.live("0.1")


async def test_another_base_is_refused_by_name(swarm, states, tmp_path):
    swarm.publish(1, states.first())
    await swarm.hub_up()
    await swarm.published("0.1")
    base = states.write(tmp_path / "other", states.first(seed=5))
    error = await swarm.ended(swarm.peer_begun("a", base=base))
    assert isinstance(error, IntegrityError)
    assert "wrong base" in str(error)
    assert str(base) in str(error)


async def test_a_base_of_another_layout_is_refused(swarm, states, tmp_path):
    swarm.publish(1, states.first())
    await swarm.hub_up()
    await swarm.published("0.1")
    base = states.write(tmp_path / "other", states.first(shapes={"w": ("bfloat16", (30,))}))
    error = await swarm.ended(swarm.peer_begun("a", base=base))
    assert isinstance(error, IntegrityError)


async def test_a_late_joiner(swarm, states):
    state = states.first()
    await swarm.hub_up()
    await swarm.peer_up("a")
    for step in (1, 2, 3, 4):
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
        state = states.trained(state, step)
    await swarm.peer_up("b")
    await swarm.live("0.4")
    swarm.publish(5, state)
    await swarm.live("0.5")


async def test_peers_that_wait_for_the_first_version(swarm, states):
    await swarm.hub_up()
    await swarm.peers_up("a", "b")
    assert (await swarm.get(swarm.hub, "/readyz"))[0] == 503
    assert (await swarm.get(swarm.peers["a"], "/readyz"))[0] == 503
    swarm.publish(7, states.first())
    await swarm.live("0.7")


async def test_another_layout_begins_with_an_anchor(swarm, states):
    swarm.publish(1, states.first())
    await swarm.hub_up()
    await swarm.peers_up("a", "b")
    await swarm.live("0.1")
    grown = states.shapes | {"model.head": ("bfloat16", (40, 9))}
    state = states.first(2, grown)
    swarm.publish(2, state)
    await swarm.live("0.2")
    assert swarm.versions("anchor") == ["0.1", "0.2"]
    swarm.publish(3, states.trained(state, 3))
    await swarm.live("0.3")
    late = await swarm.peer_up("c")
    await swarm.live("0.3", late)


async def test_the_trainer_resumes_from_an_older_step(swarm, states):
    state = states.first()
    await swarm.hub_up()
    await swarm.peers_up("a", "b")
    kept = {}
    for step in (1, 2, 3):
        kept[step] = state
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
        state = states.trained(state, step)
    other = states.trained(kept[1], 99)
    swarm.publish(2, other)
    await swarm.live("1.2")
    swarm.publish(3, states.trained(other, 100))
    await swarm.live("1.3")
    assert swarm.versions("anchor") == ["0.1"]
    late = await swarm.peer_up("c")
    await swarm.live("1.3", late)


async def test_the_same_step_again_is_nothing_new(swarm, states):
    state = states.first()
    await swarm.hub_up()
    await swarm.peer_up("a")
    swarm.publish(1, state)
    await swarm.live("0.1")
    swarm.publish(2, states.trained(state, 2))
    await swarm.live("0.2")
    swarm.publish(1, state)  # other inodes and times, the same weights
    told = swarm.hub.state.history[1].folder
    await swarm.until(lambda: swarm.hub.state.history[1].folder != told, "the hub has looked at step_1 again")
    assert swarm.versions() == ["0.1", "0.2"]
    assert swarm.hub.publishing.lifecycle.skipped == {}


async def test_damaged_and_vanishing_folders_are_skipped(swarm, states):
    state = states.first()
    await swarm.hub_up()
    await swarm.peer_up("a")
    swarm.publish(1, state)
    await swarm.live("0.1")
    states.write(swarm.checkpoints / ".making", state)
    weights = swarm.checkpoints / ".making" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    (swarm.checkpoints / ".making" / "STABLE").touch()
    (swarm.checkpoints / ".making").rename(swarm.checkpoints / "step_2")
    await swarm.until(lambda: "step_2" in swarm.hub.publishing.lifecycle.skipped, "the damaged folder is named")
    assert "model.safetensors" in swarm.hub.publishing.lifecycle.skipped["step_2"]
    assert "step_2" in (await swarm.status(swarm.hub))["skipped"]
    swarm.publish(3, states.trained(state, 3))
    await swarm.live("0.3")
    swarm.publish(2, states.trained(state, 2))  # repaired; it comes after step 3 and so begins a branch
    await swarm.live("1.2")
    await swarm.until(
        lambda: swarm.hub.publishing.lifecycle.skipped == {}, "it is no longer named, once the hub is through with it"
    )


@pytest.mark.parametrize("left", [0, 3, -1])
async def test_a_checkpoint_truncated_while_being_read_is_skipped(swarm, states, monkeypatch, left):
    """Another process truncates the file between the check and the read; reading it by mmap would kill this process.
    ``left``: cells whose bytes stay, or all bytes but the last.
    """
    state = states.first()
    await swarm.hub_up()
    await swarm.peer_up("a")
    swarm.publish(1, state)
    await swarm.live("0.1")
    lent = Checkpoint.lent

    def cut(checkpoint, cell):
        weights = checkpoint.folder / "model.safetensors"
        if checkpoint.folder.name == "step_2":
            size = f"-{1}" if left < 0 else str(left * cell.nbytes)
            subprocess.run(["truncate", "--no-create", "--size", size, weights], check=True)
        return lent(checkpoint, cell)

    monkeypatch.setattr(Checkpoint, "lent", cut)
    swarm.publish(2, states.trained(state, 2))
    await swarm.until(lambda: "step_2" in swarm.hub.publishing.lifecycle.skipped, "it is named")
    swarm.publish(3, states.trained(state, 3))
    await swarm.live("0.3")
    await swarm.published("0.3")
    assert swarm.versions("delta") == ["0.3"]
    assert [e.facts["folder"] for e in swarm.hub.events.after(0)[1] if e.kind == "skipped"] == ["step_2"]


async def test_the_newest_skipped_folders_are_named(swarm, states, monkeypatch):
    monkeypatch.setattr(limits, "MAX_SKIPPED", 2)
    await swarm.hub_up()
    for step in range(1, 6):
        folder = swarm.checkpoints / f"step_{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x" * 7)
        (folder / "STABLE").touch()
        await swarm.until(lambda step=step: f"step_{step}" in swarm.hub.publishing.lifecycle.skipped, "it is named")
    assert list(swarm.hub.publishing.lifecycle.skipped) == ["step_4", "step_5"]


@pytest.mark.parametrize("keep", [1, 2])
async def test_old_folders_go(swarm, states, keep):
    state = states.first()
    await swarm.hub_up()
    peer = await swarm.peer_up("a", keep=keep)
    for step in (1, 2, 3):
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
    assert sorted(p.name for p in swarm.out("a").glob("step_*")) == [f"step_{s}" for s in (1, 2, 3)[-keep:]]
    assert peer.sync.activity.error is None
