"""From a trainer's ranks to the peers' folders, bit for bit; branches, anchors, restarts, and messages to ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scripted_ranks import (
    FILES,
    T,
    layout_of,
)

from p2pcast.artifact.artifact_file import HEADER
from p2pcast.artifact.piece_size import LEAST_PIECE_BYTES
from p2pcast.codec.layout import Layout
from p2pcast.ground import limits
from trainer_node.publish import delta_builder


@pytest.mark.parametrize("ranks", [1, 2, 4])
async def test_versions_arrive_bit_for_bit(swarm, states, trainers, ranks):
    await swarm.hub_up()
    await swarm.peers_up("a", "b")
    trainer = await trainers(ranks, seed=ranks)
    assert trainer.told == {"head": None, "layout": None, "state": None}
    state = states.first()
    await trainer.publish(1, state, files={"config.json": b'{"a": 1}', "tok/vocab.txt": b"x" * 70_000, "empty": b""})
    await swarm.live("0.1")
    for step, stated in ((2, 0.0), (3, 0.3), (7, 1.0)):
        before, state = state, states.trained(state, step)
        done = await trainer.publish(step, state, stated=stated)
        assert done["version"] == [0, step]
        assert done["bytes"] == swarm.hub.publishing.lifecycle.published.bytes
        words = [
            (np.frombuffer(before[n][2], f"<u{w}"), np.frombuffer(state[n][2], f"<u{w}")) for n, w in WIDTHS.items()
        ]
        assert done["changed"] == sum(int(np.count_nonzero(a != b)) for a, b in words)
        await swarm.live(f"0.{step}")
    assert swarm.versions("delta") == ["0.2", "0.3", "0.7"]
    assert swarm.versions("anchor") == ["0.1"]
    status = await swarm.status(swarm.hub)
    assert status["last"]["version"] == "0.7"
    assert status["last"]["kind"] == "delta"
    assert status["skipped"] == {}
    assert status["ranks"] == f"{ranks} of {ranks}"
    late = await swarm.peer_up("c")
    await swarm.live("0.7", late)


WIDTHS = {
    "model.embed.weight": 2,
    "model.norm.weight": 4,
    "model.odd": 1,
    "model.scalar": 4,
    "model.scalar16": 2,
    "model.wide": 8,
    "model.ids": 8,
}


async def test_a_version_without_changes_and_one_where_all_changes(swarm, states, trainers):
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    assert (await trainer.publish(2, state))["bytes"] == 0
    await swarm.live("0.2")
    await trainer.publish(3, states.trained(state, 3, share=1.0))
    await swarm.live("0.3")
    await swarm.published("0.3")
    assert swarm.hub.publishing.lifecycle.published.changed == swarm.hub.publishing.lifecycle.published.params


async def test_small_files_stay_until_others_come(swarm, states, trainers):
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES | {"stays.json": b"[]"})
    for step, files in ((2, None), (3, {"config.json": b"{}"}), (4, None)):
        state = states.trained(state, step)
        await trainer.publish(step, state, files=files)
        await swarm.live(f"0.{step}")
    await trainer.publish(5, state, files={"config.json": b'{"corrected": 1}'})
    await swarm.live("0.5")
    assert swarm.hub.publishing.lifecycle.published.changed == 0
    grown = states.first(2, states.shapes | {"model.head": ("bfloat16", (40, 9))})
    assert (await trainer.publish(6, grown))["version"] == [0, 6]
    await swarm.live("0.6")
    assert swarm.versions("anchor") == ["0.1", "0.6"]


async def test_every_fiftieth_version_is_an_anchor_too(swarm, states, trainers, monkeypatch):
    monkeypatch.setattr("trainer_node.background.anchors_and_squashes.ANCHOR_EVERY", 2)
    await swarm.hub_up()
    told = await swarm.peer_up("b")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    for step in (2, 3, 4):
        state = states.trained(state, step)
        await trainer.publish(step, state)
    await swarm.until(lambda: not swarm.hub.publishing.pipeline.turn.locked(), "the hub is through")
    await swarm.until(
        lambda: {(None, (0, 3)), (None, (0, 4))} & {(e.base, e.version) for e in told.startup.catalog.edges().values()},
        "peers know of the anchor",
    )
    await swarm.peer_up("a")
    await swarm.live("0.4")


async def test_pieces_leave_while_later_cells_are_still_to_come(swarm, states, trainers, monkeypatch):
    """Pieces made just after the last signature leave too, as soon as no piece waits to be packed."""
    monkeypatch.setattr(delta_builder, "EMIT_S", 1e9)
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first(0, {"a": ("bfloat16", (400, 1000)), "b": ("bfloat16", (9,))})
    await trainer.publish(1, state, files=FILES)
    await swarm.live("0.1")
    before = peer.node.bytes_received
    new = states.trained(state, 2, share=0.9)
    said = trainer.script(await trainer.begin(2, new), new)
    ends = [row.pop() for row in said]
    held = [next(k for k, (_, body) in enumerate(row) if body["cell"] >= 390) for row in said]
    for rank, row, end in zip(trainer.ranks, said, held, strict=True):
        for kind, body in row[:end]:
            rank.say(kind, **body)
        rank.say(T.PASSED, serial=trainer.serial, cell=390)
    pending = swarm.hub.publishing.rank_intake._pending
    await swarm.until(
        lambda: pending.queued_bytes == pending.parts.waiting_bytes == 0 and pending.parts._low == 390,
        "the hub has packed what was sent",
    )
    (log,) = (swarm.folder / "hub" / "partial").iterdir()
    (piece,) = (h.open.piece for h in swarm.hub.node.holdings.values() if h.open.version == (0, 2))
    assert piece == LEAST_PIECE_BYTES, "the state is small, so its deltas are"
    whole = (log.stat().st_size - len(HEADER)) // piece * piece
    assert whole > 4 * piece
    await swarm.until(
        lambda: peer.node.bytes_received - before == whole,
        "every piece that is whole has come, before the last cells were sent",
    )
    assert swarm.hub.publishing.pipeline.head == (0, 1)
    for rank, row, end, done in zip(trainer.ranks, said, held, ends, strict=True):
        for kind, body in [*row[end:], done]:
            rank.say(kind, **body)
    await trainer.durable(2, new)
    await swarm.live("0.2")


async def test_folders_and_ranks_take_turns(swarm, states, trainers):
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    await swarm.peer_up("a")
    await swarm.live("0.1")
    trainer = await trainers(3)
    manifest = swarm.hub.state.store.manifest((0, 1))
    assert trainer.told == {"head": [0, 1], "layout": manifest.layout, "state": manifest.state}
    document = await trainer.ranks[2].hear(T.LAYOUT)
    assert Layout.from_document(document["document"], manifest.layout) == layout_of(state, limits.CELL_WORDS)
    trainer.previous = ([0, 1], state)
    state = states.trained(state, 2)
    await trainer.publish(2, state, cell_words=limits.CELL_WORDS)
    await swarm.live("0.2")
    state = states.trained(state, 3)
    swarm.publish(3, state)
    await swarm.live("0.3")
    trainer.previous = ([0, 3], state)
    await trainer.publish(4, states.trained(state, 4), cell_words=limits.CELL_WORDS)
    await swarm.live("0.4")
    assert swarm.versions("anchor") == ["0.1"]
    swarm.publish(4, states.trained(state, 4))
    await swarm.until(lambda: swarm.hub.state.history[4].folder is not None, "the hub has looked at step_4")
    assert swarm.versions() == ["0.1", "0.2", "0.3", "0.4"], (
        "the weights that ranks published as step 4 are nothing new"
    )
    assert swarm.hub.state.history[2].mark == swarm.hub.publishing.pipeline.mark_of((0, 2))


async def test_a_resumed_trainer_opens_a_branch(swarm, states, trainers):
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(5, state, files=FILES)
    state = states.trained(state, 2)
    assert (await trainer.publish(6, state, resume=True))["version"] == [1, 6]
    await swarm.live("1.6")
    state = states.trained(state, 3)
    assert (await trainer.publish(6, state))["version"] == [2, 6]
    await swarm.live("2.6")
    assert (await trainer.publish(2, states.trained(state, 4)))["version"] == [3, 2]
    await swarm.live("3.2")
    assert swarm.versions("anchor") == ["0.5"]


async def test_without_a_folder_and_after_a_restart(swarm, states, trainers):
    await swarm.hub_up(checkpoints=None)
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    await swarm.live("0.1")
    await swarm.down(swarm.hub)
    assert all([await rank.ended() for rank in trainer.ranks])
    await swarm.hub_up(checkpoints=None)
    again = await trainers(4)
    assert again.told["head"] == [0, 1]
    again.previous = ([0, 1], state)
    new = states.trained(state, 2)
    await again.publish(2, new)
    await swarm.live("0.2")
    assert swarm.versions("delta") == ["0.2"]


async def test_ranks_learn_the_versions_that_engines_serve(swarm, states, trainers):
    await swarm.hub_up()
    await swarm.peers_up("a", "b")
    trainer = await trainers(2)
    assert {"engines", "head"} == set(await trainer.ranks[1].hear(T.LIVE))
    await trainer.publish(1, states.first(), files=FILES)

    def all_live(body: dict[str, Any]) -> bool:
        return body["head"] == [0, 1] and [row[1:] for row in body["engines"]] == [[[0, 1], True]] * 2

    for rank in trainer.ranks:
        live = await rank.hear(T.LIVE, all_live)
        assert {name.split("/")[0] for name, _, _ in live["engines"]} == {"a", "b"}
    await swarm.down(swarm.peers["b"])
    await trainer.ranks[0].hear(T.LIVE, lambda body: len(body["engines"]) == 1)


async def test_a_rank_that_leaves_in_peace(swarm, states, trainers):
    """The others are still told what engines serve; but there are no more versions."""
    await swarm.hub_up()
    trainer = await trainers(3)
    await trainer.publish(1, states.first(), files=FILES)
    left, begins, listens = trainer.ranks
    left.say(T.LEAVE)
    await left.ended()
    await swarm.peers_up("a")
    for rank in (begins, listens):
        await rank.hear(T.LIVE, lambda body: [row[1] for row in body["engines"]] == [[0, 1]])
    begins.say(T.BEGIN, serial=trainer.serial + 1, step=2, layout=trainer.layout.layout_id, resume=False)
    assert "rank 0 of 3 has left" in await begins.ended()
    assert "rank 1 of 3 is gone" in await listens.ended()
    again = await trainers(3)
    await again.publish(2, states.trained(states.first(), 2), files=FILES)
