"""Parents die, links are cut, pieces are corrupted, a store fails: no held piece is sent again, and no corrupt piece is
passed on.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from chain_members import LIMIT_S, MEGABYTES, Corrupting, Swarm

from p2pcast.ground.errors import LocalError
from p2pcast.relay.upstream import Upstream
from p2pcast.transport.dial import dial
from p2pcast.transport.link import QuietOwner


@pytest.mark.parametrize("stripes", [1, 3])
def test_orphans_complete_an_artifact_from_each_others_parts(swarm, maker, stripes):
    """No node has the whole artifact and one has the seal. Each node receives from the next, in a ring."""
    made = maker.make(MEGABYTES)

    async def play(swarm: Swarm) -> None:
        ring = [await swarm.add() for _ in range(3)]
        for number, member in enumerate(ring):
            node = member.node
            holding = node.open(made.open, None)
            for batch in made.batches:
                node.add_batch(holding, batch)
            for index, piece in enumerate(made.pieces(65536)):
                if index % 3 == number:
                    holding.artifact.offer(index, memoryview(piece))
                    node.add_piece(holding, index, memoryview(piece))
        ring[0].node.seal(ring[0].node.holdings[made.id], made.manifest)
        for member, following in zip(ring, [*ring[1:], ring[0]], strict=True):
            member.beside = True
            member._spawn(member.follow([following]))
        await swarm.all_have(made)
        for member in ring:
            assert member.log(made) == made.log
            assert member.sent_twice == 0
            assert member.node.bytes_received == len(made.log)
            assert member.node.path == [member.ident]

    swarm(play, stripes=stripes)


@pytest.mark.parametrize("stripes", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_child_of_a_dead_parent_goes_to_its_grandparent(swarm, maker, seed, stripes):
    """1 → 2 → 3 → 4; node 2 dies at some piece of node 3."""
    draw = random.Random(seed)
    made = maker.make(MEGABYTES, seed=seed)

    async def play(swarm: Swarm) -> None:
        first, second, third, fourth = await swarm.chain(4)
        left = draw.randrange(1, 58)

        def hook() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                dead.set()

        dead = asyncio.Event()
        third.piece_hook = hook
        publishing = asyncio.ensure_future(first.publish(made))
        async with asyncio.timeout(LIMIT_S):
            await dead.wait()
        await second.stop()
        await publishing
        await swarm.all_have(made)
        path = [m.ident for m in (first, third, fourth)]
        await swarm.until(lambda: third.parents[:2] == [2, 1] and fourth.node.path == path)
        assert set(fourth.parents) == {3}, "its parent is alive and keeps sending"
        for member in (third, fourth):
            assert member.log(made) == made.log
            assert member.sent_twice == 0
            assert member.node.bytes_received == len(made.log), "no piece came twice"

    swarm(play, stripes=stripes)


@pytest.mark.parametrize("seed", range(3))
def test_a_new_link_resumes_at_the_first_missing_piece(swarm, maker, seed):
    draw = random.Random(seed)
    made = [maker.make(MEGABYTES, step=s, seed=seed) for s in (1, 2)]

    async def play(swarm: Swarm) -> None:
        first, second, third, _ = await swarm.chain(4)
        left = [draw.randrange(1, 100) for _ in range(2)]

        def cut() -> None:
            left[0] -= 1
            if left[0] == 0:
                left.pop(0)
                left.append(1 << 30)
                # Not from inside the read of the same link.
                asyncio.get_running_loop().call_soon(third.upstream.link.abort)

        third.piece_hook = cut
        for one in made:
            await first.publish(one)
        await swarm.all_have(*made)
        assert all(m.log(one) == one.log for m in swarm.members for one in made)
        assert [m.sent_twice for m in swarm.members] == [0] * 4
        assert third.parents[0] == second.number
        assert len(third.parents) > 1

    swarm(play)


def test_a_corrupt_piece_is_dropped_blamed_and_fetched_from_another_node(swarm, maker):
    made = maker.make(MEGABYTES)

    async def play(swarm: Swarm) -> None:
        good = await swarm.add()
        evil = await swarm.add(good, kind=Corrupting)
        await good.publish(made)
        await swarm.all_have(made)
        assert evil.log(made) == made.log, "the liar holds the right bytes and sends others"
        victim = await swarm.add(evil, good)
        child = await swarm.add(victim)
        await swarm.all_have(made)
        assert victim.node.pieces_corrupt == 1
        assert child.node.pieces_corrupt == 0, "the corrupt piece was never passed on"
        assert victim.parents == [evil.number, good.number]
        (why,) = victim.lost
        assert why is not None
        assert why.wire_code == "integrity"
        assert "piece 3 of 0.1 does not match its hash" in str(why)
        for member in (victim, child):
            assert member.log(made) == made.log
            assert member.sent_twice == 0

    swarm(play)


def test_a_loop_is_refused(swarm, maker):
    async def play(swarm: Swarm) -> None:
        first, _, third = await swarm.chain(3)
        where = third.listener.address
        link = await dial(QuietOwner(), *where, first.identity, purpose="data", role="child", stripes=1)
        upstream = Upstream(first.node, link, live=True)
        upstream.start()
        async with asyncio.timeout(LIMIT_S):
            error = await upstream.run()
        assert error is not None
        assert "loop" in str(error)
        assert upstream not in first.node.upstreams

    swarm(play)


def test_a_store_that_fails_ends_the_node(swarm, maker):
    made = maker.make(MEGABYTES)

    async def play(swarm: Swarm) -> None:
        first, second = await swarm.chain(2)
        begin = second.store.begin

        def full(open_, layout):
            log = begin(open_, layout)
            log.close()
            return log

        second.store.begin = full
        node, *second.tasks = second.tasks
        await first.publish(made)
        await swarm.until(node.done)
        (error,) = node.exception().exceptions
        assert isinstance(error, LocalError)
        assert "was closed while it was in use" in str(error)

    swarm(play)
