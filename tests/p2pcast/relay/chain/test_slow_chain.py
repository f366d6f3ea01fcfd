"""Slow children and slow disks: no other node becomes slow, and memory is bounded."""

from __future__ import annotations

from chain_members import MEGABYTES, Swarm

from p2pcast.relay import node as node_module
from p2pcast.relay.node import PieceCache
from p2pcast.transport.stripe import WRITE_HIGH_BYTES


def test_a_slow_child_slows_no_other_node_and_costs_no_memory(swarm, maker):
    made = [maker.make(MEGABYTES, step=s) for s in range(1, 5)]

    async def play(swarm: Swarm) -> None:
        first = await swarm.add()
        slow, quick = await swarm.add(first), await swarm.add(first)
        first.node.cache = PieceCache(300_000)
        await swarm.until(lambda: all(m.upstream and m.upstream.attached.is_set() for m in (slow, quick)))
        slow.upstream.link.pause_reading()
        for one in made:
            await first.publish(one)
        await swarm.until(lambda: all(quick.has(one) for one in made))
        assert not slow.has(made[-1])
        child = next(c for c in first.downstream.children.values() if c.link.remote == slow.ident)
        for stripe in child.link.stripes.values():
            assert stripe._transport.get_write_buffer_size() <= WRITE_HIGH_BYTES + 2 * 65536 + 600_000
        assert sum(map(len, first.node.cache._pieces.values())) <= 300_000
        slow.upstream.link.resume_reading()
        await swarm.all_have(*made)
        assert all(m.log(one) == one.log for m in swarm.members for one in made)
        assert slow.sent_twice == 0

    swarm(play)


def test_late_joiners_read_from_the_store_together(swarm, maker):
    """Three children at once, of a parent whose memory holds a piece and a half."""
    made = maker.anchor()

    async def play(swarm: Swarm) -> None:
        first = await swarm.add()
        await first.publish(made)
        first.node.cache = PieceCache(3 << 19)
        for _ in range(3):
            await swarm.add(first)
        await swarm.all_have(made)
        assert all(m.log(made) == made.log for m in swarm.members)
        assert [m.sent_twice for m in swarm.members] == [0] * 4

    swarm(play, stripes=2, bare=True)


def test_a_slow_disk_pauses_reading_and_loses_no_link(swarm, maker, monkeypatch):
    """Bytes verified and not yet written are bounded. Reading resumes on the same link once the disk has caught up."""
    monkeypatch.setattr(node_module, "BACKLOG_HIGH_BYTES", 400_000)
    monkeypatch.setattr(node_module, "BACKLOG_LOW_BYTES", 100_000)
    made = maker.make(MEGABYTES)
    pauses = []

    async def play(swarm: Swarm) -> None:
        first, second = await swarm.chain(2)
        pause = second.upstream.link.pause_reading
        second.upstream.link.pause_reading = lambda: (pauses.append(1), pause())[1]
        await first.publish(made)
        await swarm.all_have(made)
        assert second.log(made) == made.log
        assert not second.node.paused
        assert second.node.writeback.backlog_bytes == 0
        assert second.lost == []
        assert pauses

    swarm(play)
