"""A live rank that makes no progress: the other ranks get an error, and the next version can be published."""

from __future__ import annotations

from scripted_ranks import FILES, T, Trainer, layout_of, nothing_is_left


def lose_patience(swarm) -> None:
    """From now on: ranks that are still on their way when a test begins may take as long as a busy machine needs."""
    assert swarm.hub.publishing.rank_intake._overdue.wait_s == 0.0, "as the hub was told"
    swarm.hub.publishing.rank_intake._overdue.wait_s = 0.2


def be_patient(swarm) -> None:
    swarm.hub.publishing.rank_intake._overdue.wait_s = 0.0


async def overdue(swarm, ranks: str) -> None:
    """The hub has named the rank."""
    await swarm.until(
        lambda: any(e.kind == "ranks_overdue" for e in swarm.hub.events.after(0)[1]), "it is told as an event"
    )
    _, events = swarm.hub.events.after(0)
    assert {e.facts["ranks"] for e in events if e.kind == "ranks_overdue"} == {ranks}


async def test_an_incomplete_rank_group_is_ended(swarm):
    await swarm.hub_up(rank_timeout_s=0.0)
    trainer = Trainer(swarm, 3)
    for rank in trainer.ranks[:2]:
        await rank.dial(swarm)
        rank.say(T.RANK, group=trainer.group, rank=rank.rank, ranks=3)
    await swarm.until(lambda: swarm.hub.publishing.rank_intake.present == "2 of 3", "two ranks are there")
    lose_patience(swarm)
    for rank in trainer.ranks[:2]:
        assert "rank 2 of 3 kept the others waiting" in await rank.ended()
    await overdue(swarm, "rank 2 of 3")


async def test_a_rank_that_does_not_begin_is_not_waited_for(swarm, states, trainers):
    await swarm.hub_up(rank_timeout_s=0.0)
    trainer = await trainers(3)
    state = states.first()
    trainer.layout, trainer.serial = layout_of(state), 0
    trainer.ranks[0].say(T.LAYOUT, layout=trainer.layout.layout_id, document=trainer.layout.document)
    for rank in trainer.ranks[:2]:
        rank.say(T.BEGIN, serial=0, step=1, layout=trainer.layout.layout_id, resume=False)
    await swarm.until(lambda: swarm.hub.publishing.rank_intake._group.silent == [2], "two ranks have begun")
    lose_patience(swarm)
    assert "rank 2 of 3 kept the others waiting" in await trainer.aborted()
    await overdue(swarm, "rank 2 of 3")
    be_patient(swarm)
    await trainer.publish(1, state, files=FILES)


async def test_a_rank_that_hangs_after_begin_does_not_keep_the_turn(swarm, states, trainers):
    await swarm.hub_up(rank_timeout_s=0.0)
    trainer = await trainers(2)
    state = states.first()
    begun = await trainer.begin(1, state)
    said = trainer.script(begun, state, files=FILES)
    for kind, body in said[0]:
        trainer.ranks[0].say(kind, **body)
    parts = swarm.hub.publishing.rank_intake._pending.parts
    await swarm.until(lambda: parts.behind == [1], "one rank has sent all")
    lose_patience(swarm)
    assert "rank 1 of 2 kept the others waiting" in await trainer.aborted()
    await overdue(swarm, "rank 1 of 2")
    be_patient(swarm)
    await swarm.until(
        lambda: not swarm.hub.publishing.pipeline.turn.locked() and nothing_is_left(swarm), "others may publish"
    )
    swarm.publish(1, state)
    await swarm.until(lambda: swarm.hub.publishing.lifecycle.published is not None, "the folder is published")
    await trainer.publish(2, states.trained(state, 2), stated=1.0)
