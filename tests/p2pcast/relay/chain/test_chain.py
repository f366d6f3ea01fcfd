"""Chains of real nodes: every node ends with the bytes that were published."""

from __future__ import annotations

import asyncio

import pytest
from chain_members import MEGABYTES, Swarm

from p2pcast.artifact.piece_set import PieceSet
from p2pcast.process import event_loop
from p2pcast.store.artifact_store import ArtifactStore


@pytest.mark.parametrize("loop", [event_loop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("stripes", [1, 2, 8])
def test_every_node_of_a_chain_ends_with_the_published_bytes(swarm, maker, loop, stripes):
    made = [
        maker.make(MEGABYTES, step=1),
        maker.make([], step=2),
        maker.make([1], step=3),
        maker.make([65536] * 3, step=4),
        maker.make([65536, 65537, 65535, 1], step=5, files=3),
        maker.make([100] * 40, step=6, files=1),
    ]

    async def play(swarm: Swarm) -> None:
        first, *rest = await swarm.chain(4)
        for one in made:
            await first.publish(one)
        await swarm.all_have(*made)
        for member in swarm.members:
            assert [member.log(one) for one in made] == [one.log for one in made]
            assert member.sent_twice == 0
        for member in rest:
            assert member.lost == []
            assert member.node.bytes_received == sum(len(one.log) for one in made)
            assert member.node.path == [m.ident for m in swarm.members[: member.number]]

    swarm(play, loop=loop, stripes=stripes)


def test_an_anchor_and_its_files_pass_down_a_chain(swarm, maker):
    made = maker.anchor()

    async def play(swarm: Swarm) -> None:
        first, *_ = await swarm.chain(3)
        await first.publish(made)
        await swarm.all_have(made)
        for member in swarm.members:
            assert member.log(made) == made.log
            stored = member.store.artifacts[made.id]
            assert (stored.path / "f2.json").read_bytes() == made.log[-200:]
            assert member.sent_twice == 0

    swarm(play, stripes=2, bare=True)


def test_a_chain_works_over_tls(swarm, maker, papers):
    made = [maker.make(MEGABYTES, step=1), maker.make([], step=2)]

    async def play(swarm: Swarm) -> None:
        first, *_ = await swarm.chain(4)
        for one in made:
            await first.publish(one)
        await swarm.all_have(*made)
        for member in swarm.members:
            assert [member.log(one) for one in made] == [one.log for one in made]
            assert member.sent_twice == 0
        child = next(iter(first.downstream.children.values()))
        version = child.link.stripes[0]._transport.get_extra_info("ssl_object").version()
        assert version == "TLSv1.3"

    swarm(play, stripes=2, tls=papers)


def test_stored_artifacts_are_served_after_a_restart(swarm, maker):
    made = [maker.make(MEGABYTES, step=1), maker.make([9], step=2)]

    async def play(swarm: Swarm) -> None:
        first = await swarm.add()
        for one in made:
            await first.publish(one)
        first.store = ArtifactStore(first.store.root, maker.key.public)
        again = await swarm.add()
        for stored in first.store.artifacts.values():
            holding = again.node.add_stored(stored.assembly, first.store.open_log(stored))
            assert holding.finished
            assert holding.stored.ranges() == PieceSet(holding.assembly.pieces).ranges()
        late = await swarm.add(again)
        await swarm.until(lambda: all(late.has(one) for one in made))
        assert all(late.log(one) == one.log for one in made)

    swarm(play)
