"""A crash at any step. One run of a hub, its peer and a follower of its mirror is recorded: every write, sync, rename,
store and removal, and every mirror request. Meanwhile versions are published, received, staged, committed, mirrored and
expired. Then each moment is restored as a crash would have left it, and hub, peer and follower resume from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from disk_image import Image, Left
from step_recorder import Recorder

from p2pcast.artifact.artifact_file import P2pdFile
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import run_id
from p2pcast.checkpoint import Checkpoint
from p2pcast.files import disk
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.mirror import requests, upload_plan
from p2pcast.mirror.object_names import run_folder
from p2pcast.mirror.object_store import Objects
from p2pcast.offline import state_digest
from p2pcast.process.events import Events
from p2pcast.relay.artifact_path import Edge, cheapest_path
from p2pcast.relay.node import Node
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from p2pcast.store import retention
from p2pcast.store.artifact_store import ArtifactStore
from rollout_node.installers.step_folders import StepFolders
from rollout_node.sync import mirror_source
from trainer_node.background import anchors_and_squashes
from trainer_node.background.mirror_uploader import MirrorUploader
from trainer_node.publish import version_numbers
from trainer_node.publish.hub_shadow import HubShadow
from trainer_node.publish.version_numbers import VersionNumbers, this_boot

VERSIONS = 5
AT_LEAST = 500
MIRRORS = 60
"""Distinct ones, each with a hub that goes on with it."""
DAEMONS = 10
"""So many crashes, evenly spread, after which a real hub, a real peer and a real follower are brought up."""
SAMPLE = 5
"""`make test` checks one crash in so many."""
PEERS = ("a", "far")
"""A follower that knows the hub, and one that knows the mirror alone."""
SHAPES = {
    "embed": ("bfloat16", (61, 17)),
    "norm": ("float32", (53,)),
    "odd": ("uint8", (101,)),
    "wide": ("float64", (7, 3)),
}
MEMORY = ("tmpfs",)
PARTS = {"hub": ("hub", "tmpfs/hub"), "mirror": ("mirror", "hub/deltas", "hub/anchors")}
for _name in PEERS:
    PARTS |= {_name: (_name, f"tmpfs/{_name}"), f"{_name}-out": (f"{_name}-out",)}
"""Part → the folders that decide what becomes of it: where they are as they were, nothing new is to be seen."""
NEEDS = PARTS | {"mirror": ("mirror", "hub")}


@dataclass
class Story:
    """The record of one run. ``states``: version → digest of the trainer's saved state; ``contents``: step → SHA-256 of
    its bytes in the folder.
    """

    recorder: Recorder
    key: RunKey
    states: dict[Version, int]
    contents: dict[int, str]

    def promised(self, steps: int, what: str) -> list[Version]:
        """The versions that ``what`` had been said of when so many steps were done."""
        words = [note.split() for at, note in self.recorder.notes if at <= steps]
        return [Version.parse(version) for said, version in words if said == what]


@pytest.fixture
def small(monkeypatch):
    """Retention that has something to let go within a few versions."""
    monkeypatch.setattr(anchors_and_squashes, "ANCHOR_EVERY", 2)
    monkeypatch.setattr(retention, "KEEP_DELTAS", 2)
    monkeypatch.setattr(retention, "KEEP_ANCHORS", 1)
    monkeypatch.setattr(mirror_source, "POLL_MIN_S", 0.02)
    monkeypatch.setattr(mirror_source, "POLL_MAX_S", 0.1)


@pytest.fixture
async def story(swarm, states, small, monkeypatch, tmp_path) -> Story:
    """A hub with a mirror, a peer and a follower through a few versions. All are below one folder, with shadows in
    ``tmpfs`` beneath it (as far as a crash of the machine goes).
    """
    swarm.tmpfs = tmp_path / "tmpfs"
    recorder = Recorder(tmp_path)
    seal, settle = ArtifactStore._add, StepFolders.settle
    told = True

    def note(text: str) -> None:
        # Daemons that start later from a crash image publish versions of their own.
        if told:
            recorder.note(text)

    def noted_seal(self, *given):
        stored = seal(self, *given)
        note(f"{self.root.name}-sealed {stored.version}")
        return stored

    opened = Node.open

    def noted_open(self, signed, source, log=None):
        # This artifact goes out from now on.
        holding = opened(self, signed, source, log)
        if log is not None:
            note(f"opened {holding.open.version}")
        return holding

    def noted_settle(self, version):
        settle(self, version)
        note(f"{self.folder.name.removesuffix('-out')}-installed {version}")

    monkeypatch.setattr(ArtifactStore, "_add", noted_seal)
    monkeypatch.setattr(StepFolders, "settle", noted_settle)
    monkeypatch.setattr(Node, "open", noted_open)
    state, digests, contents = states.first(shapes=SHAPES), {}, {}
    with disk.watched(recorder), requests.watched(recorder):
        await swarm.hub_up(mirror=f"file://{tmp_path / 'mirror'}")
        peer = await swarm.peer_up("a", keep=2)
        for step in range(1, VERSIONS + 1):
            swarm.publish(step, state, {"config.json": b"%d" % (step // 2), "deep/er/file.txt": b"x"})
            if step == 1:  # before that there is nothing to follow
                await swarm.mirrored("0.1")
                far = await swarm.peer_up("far", hub=None, mirror=f"file://{tmp_path / 'mirror'}", keep=2)
            await swarm.live(f"0.{step}")
            folder = swarm.checkpoints / f"step_{step}"
            digests[Version(0, step)] = state_digest(Checkpoint.open(folder))
            await swarm.until(
                lambda: (
                    not swarm.hub.publishing.anchors_and_squashes.busy
                    and swarm.hub.publishing.mirror_uploader.status()["current"]
                ),
                "anchors are made, the mirror is current",
            )
            contents[step] = _sum(swarm.out("far") / f"step_{step}")
            recorder.note(f"mirrored 0.{step}")
            state = states.trained(state, step)
        await swarm.down(far)
        await swarm.down(peer)
        await swarm.down(swarm.hub)
    told = False
    assert len(recorder.done) >= AT_LEAST / 2
    return Story(recorder, RunKey.load_or_create(swarm.folder / "hub" / "run.key"), digests, contents)


def _sum(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def crashes(story: Story) -> Iterator[tuple[str, int, Image, Left | None]]:
    """Every moment: after each step, in the middle of each that can be half done, each way in which the machine may go
    down. (Name, steps done, image, part that is left.)
    """
    image = Image()
    for steps, done in enumerate(story.recorder.done):
        with image.torn(done) as half:
            if half:
                yield f"in the middle of {done.what} {done.path}", steps, image, None
        image.apply(done)
        yield f"after {done.what} {done.path}", steps + 1, image, None
        if not done.path.startswith(MEMORY):
            for left in Left:
                yield f"the machine goes down after {done.what} {done.path}: {left.value}", steps + 1, image, left


@pytest.mark.parametrize("one_in", [SAMPLE, pytest.param(1, marks=pytest.mark.prove)])
async def test_a_crash_at_any_step_loses_nothing_and_nothing_wrong_is_believed(story, swarm, tmpfs, one_in):
    seen: set[tuple[str, bytes, int]] = set()
    counted: Counter[str] = Counter()
    with_daemons = set(range(0, 6 * len(story.recorder.done), 6 * len(story.recorder.done) * one_in // DAEMONS))
    staging, notes = Staging(1), [at for at, _ in story.recorder.notes]
    try:
        for number, (what, steps, image, left) in enumerate(crashes(story)):
            if number % one_in:
                continue
            promises = bisect_right(notes, steps)

            def new(part: str, *folders: str, image=image, left=left, promises=promises) -> bool:
                """Whether this part of the crash differs from all checked ones."""
                same = part, image.fingerprint(left, MEMORY, folders), promises
                known = same in seen
                seen.add(same)
                return not known

            if not new("all", ""):
                continue
            counted["machine" if left else "process"] += 1
            place = tmpfs / "crash"
            shutil.rmtree(place, ignore_errors=True)
            parts = [part for part, folders in PARTS.items() if new(part, *folders)]
            image.materialise(place, left, MEMORY, {folder for part in parts for folder in NEEDS[part]})
            try:
                if "hub" in parts:
                    await _hub(story, place, steps, staging, "another boot" if left else this_boot())
                for name in PEERS:
                    if name in parts:
                        _peer(story, place, steps, name)
                    if f"{name}-out" in parts:
                        _folders(story, place, steps, name)
                if "mirror" in parts:
                    await _mirror(swarm, story, place, steps)
                    counted["mirror"] += 1
                if with_daemons and number >= min(with_daemons):
                    with_daemons -= set(range(number + 1))
                    shutil.rmtree(place, ignore_errors=True)
                    image.materialise(place, left, MEMORY)
                    await _daemons(swarm, place)
                    counted["with daemons"] += 1
            except Exception as error:
                raise AssertionError(f"crash {number}: {what}") from error
    finally:
        staging.close()
    assert counted["process"] + counted["machine"] >= AT_LEAST / one_in, counted
    assert counted["mirror"] >= MIRRORS / one_in, counted
    assert counted["with daemons"] >= DAEMONS / 2 / one_in, counted


async def _daemons(swarm: Any, place: Path) -> None:
    """Hub, mirror, peer and follower become current again by themselves."""
    again = type(swarm)(place, place / "tmpfs")
    shutil.copytree(swarm.checkpoints, again.checkpoints, dirs_exist_ok=True)
    again.steps = swarm.steps
    for name in ("hub", *PEERS):
        (place / name / "daemon.json").unlink(missing_ok=True)  # tells the fixture when a daemon answers
    try:
        await again.hub_up(mirror=f"file://{place / 'mirror'}")
        await again.until(
            lambda: (head := again.hub.publishing.pipeline.head) is not None and head.step == VERSIONS,
            "the hub is current",
        )
        await again.peer_up("a", keep=2)
        await again.until(lambda: again.hub.publishing.mirror_uploader.status()["current"], "the mirror is current")
        await again.peer_up("far", hub=None, mirror=f"file://{place / 'mirror'}", keep=2)
        # A version that was opened and never sealed has come again in a higher branch.
        await again.live(str(again.hub.publishing.pipeline.head))
    finally:
        await again.all_down()


async def _hub(story: Story, place: Path, steps: int, staging: Staging, boot: str) -> None:
    """The store opens, and holds every version that it had sealed and no other bytes. The shadow comes back at the
    newest, and no number that was opened is given out again.
    """
    if not (place / "hub" / "run.key").exists():
        assert not story.promised(steps, "hub-sealed")
        return
    key = RunKey.load_or_create(place / "hub" / "run.key")
    store = ArtifactStore(place / "hub", key.public)
    _store(story, store, steps, "hub-sealed")
    numbers = VersionNumbers(place / "hub" / version_numbers.FILE, boot)
    for used in story.promised(steps, "opened"):
        assert numbers.next(store.newest(), used.step) != used
    if store.newest() is None:
        return
    node = Node(None, b"h" * 16, key.public)
    for stored in store.artifacts.values():
        node.add_stored(stored.assembly, store.open_log(stored))
    hub_shadow = HubShadow(node, store, staging, place / "tmpfs" / "hub", numbers.seen)
    await hub_shadow.restore()
    shadow = hub_shadow.shadow
    assert shadow is not None
    assert shadow.version == store.newest()
    assert not shadow.verify()
    assert shadow.state_digest == story.states[shadow.version]
    shadow.close()
    node.close()


async def _mirror(swarm: Any, story: Story, place: Path, steps: int) -> None:
    """Ready versions are whole, signed, and lead to a state that the trainer saved. The newest of them never goes back,
    and a restarted hub completes the mirror.
    """
    if not (place / "hub" / "run.key").exists():
        assert not (place / "mirror").exists()
        return
    key = RunKey.load_or_create(place / "hub" / "run.key")
    objects = Objects(f"file://{place / 'mirror'}", run_folder(run_id(key.public)))
    ready = await swarm.mirror_holds(objects, key.public)
    promised = story.promised(steps, "mirrored")
    if promised:
        assert _leads_to(ready) >= max(promised)
    store = ArtifactStore(place / "hub", key.public)
    sealed = set(story.promised(steps, "hub-sealed"))
    assert {entry.version for entry in ready.values()} <= sealed
    assert all(entry.state == story.states[entry.version] for entry in ready.values())
    mirroring = MirrorUploader(store, objects, Events(), lambda: False, Wakeup())
    task = asyncio.create_task(mirroring.run())
    await swarm.until(lambda: mirroring.status()["current"], "the mirror is current")
    task.cancel()
    await asyncio.wait([task])
    assert mirroring.errors == 0
    if store.newest() is not None:
        after = await swarm.mirror_holds(objects, key.public)
        assert _leads_to(after) == store.newest()
        assert after.keys() >= store.artifacts.keys() - set(upload_plan.expendable(store.artifacts.values()))


def _leads_to(entries: dict[bytes, Any]) -> Version:
    return cheapest_path(None, [Edge(a, e.base, e.version, e.size) for a, e in entries.items()])[-1].version


def _peer(story: Story, place: Path, steps: int, name: str) -> None:
    store = ArtifactStore(place / name, story.key.public, keep_partial=True)
    _store(story, store, steps, f"{name}-sealed")
    for part in store.resume():
        part.log.close()
    layouts = {s.assembly.layout.layout_id: s.assembly.layout for s in store.artifacts.values()}
    for layout in layouts.values():
        with contextlib.suppress(IntegrityError, LocalError), Shadow.open(place / "tmpfs" / name, layout) as shadow:
            # A shadow that opens holds the right state.
            assert shadow.state_digest == story.states[shadow.version]
            assert not shadow.verify()


def _store(story: Story, store: ArtifactStore, steps: int, what: str) -> None:
    assert store.damaged == []
    sealed = story.promised(steps, what)
    held = {s.version for s in store.artifacts.values()}
    if sealed:
        newest = max(sealed)
        assert newest in held
        assert {s.base for s in store.artifacts.values() if s.version == newest} != set()
    for stored in store.artifacts.values():
        assert stored.manifest.state == story.states[stored.version]
        if stored.kind == "delta":
            with P2pdFile.open(stored.path, store.run_key) as file:
                file.verify_pieces()
        else:
            assert state_digest(Checkpoint.open(stored.path)) == stored.manifest.state


def _folders(story: Story, place: Path, steps: int, name: str) -> None:
    """Installed versions exist and are complete; every folder marked complete is."""
    out = place / f"{name}-out"
    for folder in out.glob("step_*"):
        if (folder / "STABLE").exists():
            assert _sum(folder) == story.contents[int(folder.name[5:])]
    installed = story.promised(steps, f"{name}-installed")
    if installed:
        assert (out / "latest" / "STABLE").exists()
