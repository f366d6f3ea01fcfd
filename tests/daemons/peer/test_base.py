"""Peers that start from their own folder (``--base``): the weights are the run's; small files may differ."""

from __future__ import annotations

import shutil

import pytest

from p2pcast.artifact.piece_size import LEAST_PIECE_BYTES

FILES = {"config.json": b'{"layers": 2}', "tokenizer/merges.txt": b"a b\nb c\n", "empty.txt": b""}
STALE = {
    "the same": FILES,
    "another configuration": {**FILES, "config.json": b'{"layers": 3}'},
    "nothing but weights": {},
    "something of its own": {**FILES, "notes.md": b"mine"},
}


@pytest.mark.parametrize("own", STALE)
async def test_small_files_are_the_runs_and_not_the_bases(swarm, states, own):
    state = states.first()
    swarm.publish(1, state, FILES)
    await swarm.hub_up()
    await swarm.published("0.1")
    base = states.write(swarm.folder / "base", state, STALE[own])
    peer = await swarm.peer_up("a", base=base)
    await swarm.live("0.1")
    anchor = next(s.manifest for s in swarm.hub.state.store.artifacts.values())
    small = sum(size for size in (len(c) for c in FILES.values()))
    last = anchor.log % LEAST_PIECE_BYTES  # the piece in which they lie
    assert small < last < anchor.log
    assert peer.node.bytes_received == (0 if own in ("the same", "something of its own") else last)
    state = states.trained(state, 2)
    swarm.publish(2, state, FILES)
    await swarm.live("0.2")


async def test_a_later_version_that_is_the_base_again_brings_its_own_files(swarm, states):
    """The weights equal the base's, and its small files differ: versions in between, which this peer never had, changed
    them.
    """
    first = states.first()
    later = {**FILES, "config.json": b'{"layers": 2, "rope": 5}', "generation.json": b"{}"}
    swarm.publish(1, first, FILES)
    await swarm.hub_up()
    await swarm.published("0.1")
    second = states.trained(first, 2)
    for step, state, files in ((2, second, FILES), (3, second, later), (4, first, later)):
        swarm.publish(step, state, files)
        await swarm.published(f"0.{step}")
    base = states.write(swarm.folder / "base", first, FILES)
    peer = await swarm.peer_up("a", base=base)
    await swarm.live("0.4", peer)
    swarm.publish(5, second, later)
    await swarm.live("0.5", peer)


async def test_a_small_file_that_was_damaged_or_lost_is_fetched_again(swarm, states):
    state = states.first()
    swarm.publish(1, state, FILES)
    await swarm.hub_up()
    await swarm.peer_up("a")
    await swarm.live("0.1")
    swarm.publish(2, states.trained(state, 2), FILES)
    await swarm.live("0.2")
    await swarm.down(swarm.peers["a"])
    kept = sorted((swarm.folder / "a" / "files").iterdir())
    assert len(kept) == len(FILES)
    kept[0].unlink()
    damaged = next(path for path in kept[1:] if path.stat().st_size)
    damaged.write_bytes(bytes(len(damaged.read_bytes())))
    swarm.publish(3, states.trained(state, 3), FILES)
    await swarm.published("0.3")
    await swarm.peer_up("a")
    await swarm.live("0.3")


async def test_without_a_hub_small_files_come_from_the_mirror(swarm, states):
    url = f"file://{swarm.folder / 'mirror'}"
    first = states.first()
    swarm.publish(1, first, FILES)
    await swarm.hub_up(mirror=url)
    await swarm.published("0.1")
    second = states.trained(first, 2)
    later = {**FILES, "config.json": b'{"layers": 4}'}
    swarm.publish(2, second, later)
    await swarm.mirrored("0.2")
    base = states.write(swarm.folder / "base", second, FILES)
    peer = await swarm.peer_up("far", hub=None, mirror=url, base=base)
    await swarm.live("0.2", peer)
    swarm.publish(3, first, later)
    await swarm.live("0.3", peer)


async def test_a_small_file_damaged_anywhere_on_disk_is_repaired(swarm, states):
    state = states.first()
    swarm.publish(1, state, FILES)
    await swarm.hub_up()
    await swarm.peer_up("a")
    await swarm.live("0.1")
    await swarm.down(swarm.peers["a"])
    for path in (swarm.folder / "a" / "files", swarm.folder / "a" / "anchors" / "0.1"):
        for file in path.rglob("*"):
            if file.is_file() and file.read_bytes() == FILES["config.json"]:
                file.write_bytes(b'{"layers": 9}')
    shutil.rmtree(swarm.out("a"))
    await swarm.peer_up("a")
    await swarm.live("0.1")
