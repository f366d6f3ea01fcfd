"""An aborted artifact is dropped by every node, and no link ends."""

from __future__ import annotations

from chain_members import MEGABYTES, Swarm


def test_an_abort_removes_the_artifact_from_every_node(swarm, maker):
    made, other = maker.make(MEGABYTES, step=1), maker.make([5000], step=2)

    async def play(swarm: Swarm) -> None:
        first, *rest = await swarm.chain(4)
        holding = await first.publish(made, until=3)
        await swarm.until(lambda: all(made.id in m.node.holdings for m in swarm.members))
        first.node.abort(holding)
        await swarm.until(lambda: all(m.aborted == [made.id] for m in swarm.members))
        for member in swarm.members:
            assert made.id not in member.node.holdings
            assert list((member.store.root / "partial").iterdir()) == []
        await first.publish(other)
        await swarm.all_have(other)
        for member in rest:
            assert member.lost == [], "no link ended"
            assert not member.upstream.active

    swarm(play, stripes=4)


def test_a_slow_child_never_sees_an_artifact_aborted_early(swarm, maker):
    """The OPEN never went out, so no ABORT may go out for a handle that the child does not know."""
    big = maker.make(MEGABYTES, step=1)
    made, other = maker.make([5000] * 3, step=2), maker.make([5000], step=3)

    async def play(swarm: Swarm) -> None:
        first, second = await swarm.chain(2)
        second.upstream.link.pause_reading()
        (child,) = first.downstream.children.values()
        for n in range(200):
            # Fill the socket: from then on only control messages go out on stripe 0.
            await first.publish(maker.make([200_000] * 5, step=10 + n))
            if not child.link.stripes[0].writable:
                break
        await first.publish(big)
        first.node.abort(await first.publish(made, until=0))
        await first.publish(other)
        second.upstream.link.resume_reading()
        await swarm.all_have(big, other)
        assert second.lost == []
        assert made.id not in second.node.holdings

    swarm(play)
