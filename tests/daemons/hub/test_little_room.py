"""A hub whose state folder has little room, on a real tmpfs: squashes give way to versions, and no step is lost for
good.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pcast.files import disk
from trainer_node.background import anchors_and_squashes

pytestmark = pytest.mark.root

SHAPES = {"w": ("bfloat16", (512, 512))}
"""A state of half a MiB; half of its words change in a step, so a delta has more than 100 kB."""
FILLER = "filler"


@pytest.fixture
def state_folder(tmp_path: Path) -> Iterator[Path]:
    """The hub's state folder: a tmpfs of 16 MiB."""
    folder = tmp_path / "hub"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "p2pcast-test", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors_and_squashes, "RETRY_S", 0.05)
    monkeypatch.setattr("trainer_node.hub_startup.RUNGS", (2,))


def leave(folder: Path, nbytes: int) -> None:
    """Another program's file takes all of the room but ``nbytes``."""
    give_back(folder)
    with (folder / FILLER).open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, int(disk.free_bytes(folder)) - nbytes)


def give_back(folder: Path) -> None:
    (folder / FILLER).unlink(missing_ok=True)


async def steps(swarm, states, count, *, first=1, state=None):
    """Publish steps one after the other; the newest state."""
    state = states.first(0, SHAPES) if state is None else state
    for step in range(first, first + count):
        state = states.trained(state, step, share=0.5)
        swarm.publish(step, state)
        await swarm.published(f"0.{step}")
    return state


def squashes(swarm) -> list[tuple[int, int]]:
    """First and last step of each squash in the hub's store."""
    kept = [s for s in swarm.hub.state.store.artifacts.values() if s.base is not None]
    return sorted((s.base.step, s.version.step) for s in kept if s.version.step - s.base.step > 1)


def newest_delta_bytes(swarm) -> int:
    return swarm.hub.publishing.lifecycle.published.bytes


async def test_squashes_give_way_to_the_next_step(swarm, states, state_folder):
    await swarm.hub_up()
    state = await steps(swarm, states, 6)
    await swarm.until(lambda: len(squashes(swarm)) == 2, "two squashes are made")
    leave(state_folder, newest_delta_bytes(swarm) // 2)
    await steps(swarm, states, 1, first=7, state=state)
    assert squashes(swarm) == []
    assert swarm.hub.publishing.lifecycle.skipped == {}
    late = await swarm.peer_up("a")
    await swarm.live("0.7", late)


async def test_no_squash_takes_the_room_of_the_next_versions(swarm, states, state_folder, caplog):
    await swarm.hub_up()
    state = await steps(swarm, states, 2)
    # Room for three deltas and their squash, but not for a whole state as well.
    leave(state_folder, 5 * newest_delta_bytes(swarm))
    state = await steps(swarm, states, 1, first=3, state=state)
    await swarm.until(lambda: "waits for room" in caplog.text, "the squash waits")
    await steps(swarm, states, 2, first=4, state=state)
    assert squashes(swarm) == []
    assert caplog.text.count("waits for room") == 1
    give_back(state_folder)
    await swarm.until(lambda: len(squashes(swarm)) > 1, "squashes are made once there is room")


@pytest.mark.parametrize("first", [1, 3])
async def test_a_step_that_found_no_room_is_published_once_there_is_more(swarm, states, state_folder, first):
    """A whole state (the first step) or a delta; without another step, and without attempts in between."""
    await swarm.hub_up()
    state = await steps(swarm, states, first - 1)
    leave(state_folder, 100_000)
    swarm.publish(first, states.trained(state or states.first(0, SHAPES), first, share=0.5))
    lifecycle = swarm.hub.publishing.lifecycle
    await swarm.until(lambda: f"step_{first}" in lifecycle.skipped, "it is skipped")
    assert "no space is left" in lifecycle.skipped[f"step_{first}"]
    opened = len([e for e in swarm.hub.state.events.after(0, 1000)[1] if e.kind == "opened"])
    leave(state_folder, 120_000)
    give_back(state_folder)
    await swarm.until(lambda: lifecycle.skipped == {}, "it is published")
    events = [e for e in swarm.hub.state.events.after(0, 1000)[1] if e.kind == "opened"]
    assert len(events) == opened + 1
    assert swarm.hub.publishing.pipeline.head.step == first
    late = await swarm.peer_up("a")
    await swarm.live(str(swarm.hub.publishing.pipeline.head), late)


async def test_a_newer_step_replaces_one_that_found_no_room(swarm, states, state_folder):
    await swarm.hub_up()
    state = await steps(swarm, states, 2)
    leave(state_folder, 100_000)
    swarm.publish(3, states.trained(state, 3, share=0.5))
    lifecycle = swarm.hub.publishing.lifecycle
    await swarm.until(lambda: "step_3" in lifecycle.skipped, "it is skipped")
    swarm.publish(4, states.trained(state, 4, share=0.5))
    await swarm.until(lambda: "step_4" in lifecycle.skipped, "so is the next one")
    give_back(state_folder)
    await swarm.until(lambda: swarm.hub.publishing.pipeline.head.step == 4, "the newest one is published")
    assert "step_3" in lifecycle.skipped
