"""A crash at any step: everything that hub and peer write, name, sync, remove or store while versions are published, received, staged, committed and let go is
recorded once; then each moment of it is brought back as a crash would have left it, and a hub and a peer go on from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from netem.crash.image import Image, Left
from netem.crash.recorder import Recorder
from p2pcast.artifact.p2pd import P2pdFile
from p2pcast.artifact.records import RunKey
from p2pcast.checkpoint import Checkpoint
from p2pcast.errors import IntegrityError, LocalError
from p2pcast.offline import state_digest
from p2pcast.relay.node import Node
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from p2pcast.store import disk, retention
from p2pcast.store import store as store_module
from p2pcast.store.store import Store
from p2pcast.version import Version
from rollout_node.installers.step_folders import StepFolders
from trainer_node import keeping
from trainer_node.publishing import Publishing

VERSIONS = 5
AT_LEAST = 500
DAEMONS = 10
"""So many crashes, evenly spread, after which a real hub and a real peer are brought up."""
SHAPES = {"embed": ("bfloat16", (61, 17)), "norm": ("float32", (53,)), "odd": ("uint8", (101,)), "wide": ("float64", (7, 3))}
MEMORY = ("tmpfs",)


@dataclass
class Story:
    """What was recorded. ``states``: version → digest of what the trainer saved; ``contents``: step → SHA-256 of its bytes in the folder."""

    recorder: Recorder
    states: dict[Version, int]
    contents: dict[int, str]

    def promised(self, steps: int, what: str) -> list[Version]:
        """The versions that ``what`` had been said of when so many steps were done."""
        words = [note.split() for at, note in self.recorder.notes if at <= steps]
        return [Version.parse(version) for said, version in words if said == what]


@pytest.fixture
def small(monkeypatch):
    """Retention that has something to let go within a few versions."""
    monkeypatch.setattr(keeping, "ANCHOR_EVERY", 2)
    defaults = dict(zip(("deltas", "anchors"), (2, 1), strict=True))
    expendable = retention.expendable
    monkeypatch.setattr(store_module, "expendable", lambda artifacts: expendable(artifacts, **defaults))


@pytest.fixture
async def story(swarm, states, small, monkeypatch, tmp_path) -> Story:
    """A hub and a peer through a few versions; all below one folder, shadows in ``tmpfs`` beneath it (as far as a crash of the machine goes)."""
    swarm.tmpfs = tmp_path / "tmpfs"
    recorder = Recorder(tmp_path)
    seal, settle = Store._add, StepFolders.settle

    def noted_seal(self, *given):
        stored = seal(self, *given)
        recorder.note(f"{self.root.name}-sealed {stored.version}")
        return stored

    def noted_settle(self, version):
        settle(self, version)
        recorder.note(f"installed {version}")

    monkeypatch.setattr(Store, "_add", noted_seal)
    monkeypatch.setattr(StepFolders, "settle", noted_settle)
    state, digests, contents = states.first(shapes=SHAPES), {}, {}
    with disk.watched(recorder):
        await swarm.hub_up()
        peer = await swarm.peer_up("a", keep=2)
        for step in range(1, VERSIONS + 1):
            swarm.publish(step, state, {"config.json": b"%d" % (step // 2), "deep/er/file.txt": b"x"})
            await swarm.live(f"0.{step}")
            folder = swarm.checkpoints / f"step_{step}"
            digests[Version(0, step)] = state_digest(Checkpoint.open(folder))
            contents[step] = _sum(swarm.out("a") / f"step_{step}")
            state = states.trained(state, step)
        await swarm.down(peer)
        await swarm.down(swarm.hub)
    assert len(recorder.done) >= AT_LEAST / 2
    return Story(recorder, digests, contents)


def _sum(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def crashes(story: Story) -> Iterator[tuple[str, int, Image, Left | None]]:
    """Every moment: after each step, in the middle of each that can be half done, each way in which the machine may go down. (Name, steps done, image, what is left.)"""
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


async def test_a_crash_at_any_step_loses_nothing_and_nothing_wrong_is_believed(story, swarm, tmpfs):
    seen: set[tuple[bytes, int]] = set()
    counted: Counter[str] = Counter()
    with_daemons = set(range(0, 6 * len(story.recorder.done), 6 * len(story.recorder.done) // DAEMONS))
    staging = Staging(1)
    try:
        for number, (what, steps, image, left) in enumerate(crashes(story)):
            same = image.fingerprint(left, MEMORY), sum(at <= steps for at, _ in story.recorder.notes)
            if same in seen:
                continue
            seen.add(same)
            place = tmpfs / "crash"
            shutil.rmtree(place, ignore_errors=True)
            image.materialise(place, left, MEMORY)
            counted["machine" if left else "process"] += 1
            try:
                await _hub(story, place, steps, staging)
                _peer(story, place, steps)
                _folders(story, place, steps)
                if with_daemons and number >= min(with_daemons):
                    with_daemons -= set(range(number + 1))
                    shutil.rmtree(place)
                    image.materialise(place, left, MEMORY)
                    await _daemons(swarm, place)
                    counted["with daemons"] += 1
            except Exception as error:
                raise AssertionError(f"crash {number}: {what}") from error
    finally:
        staging.close()
    assert counted["process"] + counted["machine"] >= AT_LEAST, counted
    assert counted["with daemons"] >= DAEMONS / 2, counted


async def _daemons(swarm: Any, place: Path) -> None:
    """Hub and peer become current again by themselves."""
    again = type(swarm)(place, place / "tmpfs")
    shutil.copytree(swarm.checkpoints, again.checkpoints, dirs_exist_ok=True)
    again.steps = swarm.steps
    for name in ("hub", "a"):
        (place / name / "daemon.json").unlink(missing_ok=True)  # tells the fixture when a daemon answers
    try:
        await again.hub_up()
        await again.until(lambda: again.hub.publishing.head == Version(0, VERSIONS), "the hub is current")
        await again.peer_up("a", keep=2)
        await again.live(f"0.{VERSIONS}")
    finally:
        await again.all_down()


async def _hub(story: Story, place: Path, steps: int, staging: Staging) -> None:
    """The store opens, holds every version that it had sealed and no other bytes, and the shadow comes back at the newest."""
    if not (place / "hub" / "run.key").exists():
        assert not story.promised(steps, "hub-sealed")
        return
    key = RunKey.load_or_create(place / "hub" / "run.key")
    store = Store(place / "hub", key.public)
    _store(story, store, steps, "hub-sealed")
    if store.newest() is None:
        return
    node = Node(None, b"h" * 16, key.public)
    for stored in store.artifacts.values():
        node.add_stored(stored.assembly, store.open_log(stored))
    taken_up = Publishing(node, store, key, staging, place / "tmpfs" / "hub", None)
    await taken_up.restore()
    shadow = taken_up.shadow
    assert shadow is not None
    assert taken_up.head == store.newest()
    assert not shadow.verify()
    assert shadow.state_digest == story.states[shadow.version]
    shadow.close()
    node.close()


def _peer(story: Story, place: Path, steps: int) -> None:
    if not (place / "hub" / "run.key").exists():
        return
    key = RunKey.load_or_create(place / "hub" / "run.key")
    store = Store(place / "a", key.public, keep_partial=True)
    _store(story, store, steps, "a-sealed")
    for part in store.resume():
        part.log.close()
    layouts = {s.assembly.layout.layout_id: s.assembly.layout for s in store.artifacts.values()}
    for layout in layouts.values():
        with contextlib.suppress(IntegrityError, LocalError), Shadow.open(place / "tmpfs" / "a", layout) as shadow:
            # Whatever is believed is right.
            assert shadow.state_digest == story.states[shadow.version]
            assert not shadow.verify()


def _store(story: Story, store: Store, steps: int, what: str) -> None:
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


def _folders(story: Story, place: Path, steps: int) -> None:
    """What was installed is there, whole; whatever says that it is complete is so."""
    out = place / "a-out"
    for folder in out.glob("step_*"):
        if (folder / "STABLE").exists():
            assert _sum(folder) == story.contents[int(folder.name[5:])]
    installed = story.promised(steps, "installed")
    if installed:
        assert (out / "latest" / "STABLE").exists()
