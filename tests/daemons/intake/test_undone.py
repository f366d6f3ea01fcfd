"""Versions that are undone everywhere, because ranks are lost, disagree, give up or are replaced; and versions that go
out all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from scripted_ranks import (
    CELL_WORDS,
    FILES,
    Rank,
    T,
    layout_of,
    miscounted,
    nothing_is_left,
    part,
    words_of,
)

from p2pcast.ground import limits
from p2pcast.ground.version import Version


def until_lost(where: str) -> Callable[[int, int], bool]:
    """(cells said, cells to say) → whether the rank dies now."""
    return {"before": lambda n, of: True, "between": lambda n, of: n == of // 2, "after": lambda n, of: n == of}[where]


@pytest.mark.parametrize("where", ["before", "between", "after", "done"])
@pytest.mark.parametrize("first", [True, False], ids=["anchor", "delta"])
async def test_a_lost_rank_undoes_the_version(swarm, states, trainers, where, first):
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    state = states.first()
    swarm.steps[0] = (state, FILES)
    if not first:
        swarm.publish(1, state)
        await swarm.live("0.1")
    head = swarm.hub.publishing.pipeline.head
    trainer = await trainers(4)
    trainer.previous = None if first else ([0, 1], state)
    new = states.trained(state, 2)
    words = CELL_WORDS if first else limits.CELL_WORDS
    said = trainer.script(await trainer.begin(2, new, cell_words=words), new)
    lost = trainer.ranks[2]
    row = said[2]
    said[2] = []
    cells = sum(kind is T.CELL for kind, _ in row)
    done = row.pop()
    sent = 0
    dies = until_lost("after" if where == "done" else where)
    for rank, others in zip(trainer.ranks, said, strict=True):
        for kind, body in others:
            if kind is not T.DONE or (where == "done" and rank.rank != 0):
                rank.say(kind, **body)
    for kind, body in row:
        if dies(sent, cells):
            break
        lost.say(kind, **body)
        sent += kind is T.CELL
    if where == "done":
        lost.say(*done[:1], **done[1])
    lost.link.close()
    assert (await trainer.aborted(but=lost)).startswith("rank 2 of 4 is gone")
    for rank in trainer.ranks:
        if rank is not lost:
            assert "rank 2 of 4 is gone" in await rank.ended()
    await swarm.until(lambda: "step_2 from ranks" in swarm.hub.publishing.lifecycle.skipped, "the hub has given it up")
    await swarm.until(lambda: nothing_is_left(swarm), "nothing of it is left at the hub")
    assert swarm.hub.publishing.pipeline.head == head
    await swarm.until(lambda: all(h.finished for h in peer.node.holdings.values()), "nor at the peer")
    assert "step_2 from ranks" in (await swarm.status(swarm.hub))["skipped"]
    again = await trainers(2)
    again.previous = trainer.previous
    await again.publish(3, new, files=FILES, cell_words=words)
    await swarm.live("0.3")
    # The hub notes the published version after it has stored the version: a peer may serve the version first.
    await swarm.until(
        lambda: not swarm.hub.publishing.lifecycle.skipped, "the version that was given up is no longer listed"
    )
    assert swarm.versions() == (["0.3"] if first else ["0.1", "0.3"])


async def test_after_every_done_the_version_is_published_without_the_ranks(swarm, states, trainers, monkeypatch):
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    new = states.trained(state, 2)
    said = trainer.script(await trainer.begin(2, new), new)
    held, go_on = asyncio.Event(), asyncio.Event()
    seal = swarm.hub.publishing.sealer._seal

    async def held_back(holding: Any) -> None:
        held.set()
        await go_on.wait()
        await seal(holding)

    monkeypatch.setattr(swarm.hub.publishing.sealer, "_seal", held_back)
    trainer.say(said)
    await held.wait()
    trainer.ranks[1].link.close()
    other = trainer.ranks[0]
    await swarm.until(lambda: len(swarm.hub.publishing.rank_intake._links) == 1, "the hub has seen it go")
    go_on.set()
    assert (await other.hear(T.DURABLE))["version"] == [0, 2]
    assert "rank 1 of 2 is gone" in await other.ended()
    swarm.steps[2] = (new, FILES)
    await swarm.live("0.2")


async def test_ranks_that_do_not_agree(swarm, states, trainers):
    await swarm.hub_up()
    trainer = await trainers(3)
    state = states.first()
    layout = layout_of(state)
    said = {"step": 4, "layout": layout.layout_id, "resume": False}
    for serial, odd in enumerate(({"step": 5}, {"layout": bytes(32)}, {"resume": True})):
        trainer.serial = serial
        for rank in trainer.ranks:
            rank.say(T.BEGIN, serial=serial, **said | (odd if rank.rank == 1 else {}))
        reason = await trainer.aborted()
        assert "the ranks do not agree: ranks 0, 2 said" in reason
        assert "; rank 1 said" in reason
    for rank in trainer.ranks:
        rank.say(T.BEGIN, serial=3 + rank.rank, **said)
    for rank in trainer.ranks:
        assert (
            "rank 2 said serial 5"
            in (await rank.hear(T.ABORTED, lambda body, own=3 + rank.rank: body["serial"] == own))["reason"]
        )
    trainer.serial = 5
    await trainer.publish(4, state, files=FILES)
    assert swarm.versions() == ["0.4"]


async def test_another_layout_that_comes_to_nothing_costs_no_anchor(swarm, states, trainers):
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    state = states.trained(state, 2)
    await trainer.publish(2, state)
    previous = trainer.previous
    grown = states.first(2, states.shapes | {"model.head": ("bfloat16", (40, 9))})
    begun = await trainer.begin(3, grown)
    assert begun["base"] is None
    trainer.previous = None
    said = trainer.script(begun, grown)
    miscounted(said)
    trainer.say(said)
    await trainer.aborted()
    trainer.previous = previous
    new = states.trained(state, 4)
    await trainer.publish(4, new)
    await swarm.live("0.4")
    assert swarm.versions("anchor") == ["0.1"]


async def test_a_rank_that_gives_up(swarm, states, trainers):
    await swarm.hub_up()
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    await trainer.begin(2, state)
    trainer.ranks[1].say(T.ABORTED, serial=1, reason="out of memory")
    assert await trainer.aborted() == "rank 1 of 2 gave up: out of memory"
    # The failure precedes the other ranks' BEGIN: they learn of it now, and again at their BEGIN.
    trainer.serial += 1
    trainer.ranks[0].say(T.ABORTED, serial=2, reason="not yet")
    assert await trainer.aborted() == "rank 0 of 2 gave up: not yet"
    trainer.ranks[1].say(T.BEGIN, serial=2, step=2, layout=trainer.layout.layout_id, resume=False)
    assert (await trainer.ranks[1].hear(T.ABORTED))["serial"] == 2
    trainer.ranks[1].say(
        T.CELL, **part(trainer.layout.cells[0], 0, words_of(state, trainer.layout, trainer.layout.cells[0])), serial=2
    )
    await trainer.publish(2, states.trained(state, 2))
    assert swarm.hub.publishing.pipeline.head == (1, 2)


async def test_an_unknown_layout(swarm, states, trainers):
    await swarm.hub_up()
    trainer = await trainers(2)
    trainer.serial = 0
    for rank in trainer.ranks:
        rank.say(T.BEGIN, serial=0, step=1, layout=bytes(32), resume=False)
    assert "rank 0 has to send it" in await trainer.aborted()
    trainer.serial = 1
    trainer.ranks[0].say(T.LAYOUT, layout=bytes(32), document=b"nonsense")
    for rank in trainer.ranks:
        rank.say(T.BEGIN, serial=1, step=1, layout=bytes(32), resume=False)
    assert "does not match its layout_id" in await trainer.aborted()
    await trainer.publish(1, states.first(), files=FILES)


async def test_a_new_group_takes_the_place_of_an_older(swarm, states, trainers):
    await swarm.hub_up()
    old = await trainers(2)
    state = states.first()
    await old.publish(1, state, files=FILES)
    await old.begin(2, state)
    new = await trainers(3)
    assert "another group" in await old.aborted()
    for rank in old.ranks:
        assert "another group" in await rank.ended()
    new.previous = old.previous
    await new.publish(2, states.trained(state, 2))
    straggler = Rank(0, 2)
    await straggler.dial(swarm)
    straggler.say(T.RANK, group=old.group, rank=0, ranks=2)
    assert "that group of ranks is over" in await straggler.ended()
    await new.publish(3, states.trained(state, 3))


async def test_a_trainer_of_an_older_branch_is_refused(swarm, states, trainers):
    """A trainer hung, was taken for dead, and comes back when its successor has resumed."""
    await swarm.hub_up()
    old = await trainers(2)
    state = states.first()
    assert (await old.publish(1, state, files=FILES, resume=True))["version"] == [0, 1]
    new = await trainers(1)
    new.previous = old.previous
    told = await new.publish(1, state, resume=True)
    assert told["version"] == [1, 1]
    back = await trainers(2)
    back.serial += 1
    for rank in back.ranks:
        rank.say(T.BEGIN, serial=0, step=2, layout=layout_of(state).layout_id, resume=False, branch=0)
    for rank in back.ranks:
        assert "branch 1 was opened after this trainer's branch 0" in await rank.ended()
    assert swarm.hub.publishing.pipeline.head == Version(1, 1)
    again = await trainers(1)
    again.previous = new.previous
    told = await again.publish(2, states.trained(state, 2), branch=1)
    assert told["version"] == [1, 2]


async def test_an_unexpected_error_undoes_a_version_and_not_the_hub(swarm, states, trainers, monkeypatch):
    swarm.expects_failures = True
    hub = await swarm.hub_up()
    peer = await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()

    async def fail(*_):
        raise KeyError("an unforeseen cell")

    monkeypatch.setattr(hub.publishing.pipeline, "publish", fail)
    await trainer.begin(1, state)
    for rank in trainer.ranks:
        assert "internal error at the hub (KeyError)" in (await rank.hear(T.ABORTED))["reason"]
    monkeypatch.undo()
    swarm.publish(1, state)
    await swarm.until(lambda: peer.committed is not None and peer.committed.step == 1, "the next version is live")
    swarm.check(peer, 1)
