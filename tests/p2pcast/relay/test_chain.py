"""Chains of real nodes over loopback sockets: what comes out at the end is what went in, whatever happens on the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import chain, repeat
from pathlib import Path

import pytest
import uvloop

from p2pcast.artifact.assembly import Assembly
from p2pcast.errors import LocalError, P2PCastError
from p2pcast.relay import node as node_module
from p2pcast.relay.downstream import Downstream
from p2pcast.relay.node import Node, PieceCache
from p2pcast.relay.pieces import PieceSet
from p2pcast.relay.upstream import Upstream
from p2pcast.store.store import Store
from p2pcast.transport.dial import dial
from p2pcast.transport.link import Link
from p2pcast.transport.listener import Listener
from p2pcast.transport.stripe import WRITE_HIGH_BYTES
from p2pcast.wire.connection import Identity
from p2pcast.wire.token import Token

TOKEN = Token(bytes(16), bytes(20))
LIMIT_S = 60.0
"""Only to end a test that hangs."""


class Watched(Node):
    """A node that tells its owner of each new piece."""

    def add_piece(self, holding, index, payload):
        super().add_piece(holding, index, payload)
        self.owner.on_piece(holding, index)

    def set_path(self, path):
        super().set_path(path)
        Swarm.changed.set()


class Corrupting(Node):
    """A parent that garbles one piece on its way out."""

    wrong = 3

    def payload(self, holding, index):
        found = super().payload(holding, index)
        if found is None or index != self.wrong:
            return found
        return bytes([found[0] ^ 1]) + bytes(found[1:])


class Member:
    """The smallest owner of a node: stores what comes, wants what its parent has, goes to the next candidate when the parent is lost."""

    def __init__(self, maker, root: Path, number: int, *, stripes=1, tls=None, kind: type[Node] = Watched, bare=False):
        self.maker, self.number, self.stripes = maker, number, stripes
        self.ident = bytes([number]) * 16
        self.identity = Identity(self.ident, f"n{number}", TOKEN)
        papers = None if tls is None else tls.tls(self.ident)
        self.server_tls, self.client_tls = (None, None) if papers is None else (papers.server, papers.client)
        self.store = Store(root / str(number), maker.key.public)
        self.node = kind(self, self.ident, maker.key.public)
        if not bare:
            self.node.add_layout(maker.layout)  # as one that holds an anchor already
        self.downstream = Downstream(self.node)
        self.listener = Listener(self, self.identity, self.server_tls)
        self.upstream: Upstream | None = None
        self.lost: list[P2PCastError | None] = []
        self.aborted: list[bytes] = []
        self.parents: list[int] = []
        self.piece_hook: Callable[[], None] | None = None
        self.tasks: list[asyncio.Task[object]] = []
        self.alive = True
        self.beside = False
        """Its parents are neighbours, and all of them orphans."""

    async def start(self, *candidates: Member) -> Member:
        await self.listener.start("127.0.0.1", 0)
        self._spawn(self.node.run())
        self._spawn(self.downstream.run())
        if candidates:
            self._spawn(self.follow(candidates))
        return self

    def _spawn(self, work) -> None:
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: Swarm.changed.set())
        self.tasks.append(task)

    async def follow(self, candidates) -> None:
        for parent in chain(candidates, repeat(candidates[-1])):
            upstream = Upstream(self.node, live=True, beside=self.beside)
            try:
                link = await dial(
                    upstream, *parent.listener.address, self.identity, purpose="data", role="child",
                    stripes=self.stripes, expect=parent.ident, tls=self.client_tls,
                )  # fmt: skip
            except P2PCastError as error:
                self.lost.append(error)
                continue
            upstream.start(link)
            self.upstream = upstream
            self.parents.append(parent.number)
            self.lost.append(await upstream.run())

    async def stop(self) -> None:
        """As when the process dies: nothing is said to anybody."""
        self.alive = False
        for upstream in list(self.node.upstreams):
            upstream.link.abort()
        for link in list(self.downstream.children):
            link.abort()
        await self.listener.stop()
        self.downstream.close()
        for task in self.tasks:
            task.cancel()
        done = await asyncio.gather(*self.tasks, return_exceptions=True)
        self.node.close()
        for result in done:
            if isinstance(result, Exception):
                raise result

    def __repr__(self) -> str:
        held = [
            (str(h.open.version), h.artifact.held.count, h.stored.count, h.assembly.pieces, h.source)
            for h in self.node.holdings.values()
        ]
        return f"{self.number}: parents {self.parents[-5:]}, lost {self.lost[-3:]}, held {held}"

    # -- NodeOwner

    def make_log(self, open_, layout):
        return self.store.begin(open_, layout)

    def on_piece(self, holding, index) -> None:
        if self.piece_hook is not None:
            self.piece_hook()

    def on_opened(self, holding) -> None:
        Swarm.changed.set()

    def on_complete(self, holding) -> None:
        self.store.seal(holding.log, holding.assembly)
        Swarm.changed.set()

    def on_aborted(self, holding) -> None:
        self.store.abandon(holding.log, holding.id)
        self.aborted.append(holding.id)
        Swarm.changed.set()

    def on_offered(self, upstream) -> None:
        for artifact in upstream.offers:
            upstream.want(artifact)
        Swarm.changed.set()

    def on_upstream_lost(self, upstream, error) -> None:
        Swarm.changed.set()

    # -- Acceptor

    def accept_link(self, link: Link, hello) -> None:
        link.owner = self.downstream
        self.downstream.accept(link)

    def on_link_event(self, link, stripe, event) -> None: ...
    def on_link_read(self, link, payload_bytes) -> None: ...
    def on_link_writable(self, link, stripe) -> None: ...
    def on_link_closed(self, link, error) -> None: ...

    # -- the trainer's part, and looking at the result

    async def publish(self, made, *, until: int | None = None):
        """Batch by batch, as a publisher does while it encodes; with ``until``, that many batches and no seal."""
        node, piece = self.node, None
        node.add_layout(self.maker.layout)
        assembly = Assembly(made.open, self.maker.key.public, self.maker.layout)
        piece = assembly.open.piece
        holding = node.open(made.open, None, self.store.begin(assembly.open, self.maker.layout))
        for batch in made.batches[:until]:
            before = assembly.linked_pieces
            assembly.add_batch(batch)
            holding.log.write(before * piece, [made.log[before * piece : assembly.linked_pieces * piece]])
            node.add_local(holding, batch)
            await asyncio.sleep(0)
        if until is None:
            node.seal(holding, made.manifest)
        return holding

    def has(self, made) -> bool:
        return made.id in self.store.artifacts

    def log(self, made) -> bytes:
        log = self.store.open_log(self.store.artifacts[made.id])
        try:
            return log.read(0, len(made.log))
        finally:
            log.close()

    @property
    def sent_twice(self) -> int:
        return self.node.bytes_duplicate


class Swarm:
    changed: asyncio.Event

    def __init__(self, maker, root: Path, **options):
        self.maker, self.root, self.options = maker, root, options
        self.members: list[Member] = []
        type(self).changed = asyncio.Event()

    async def add(self, *candidates: Member, **options) -> Member:
        member = Member(self.maker, self.root, len(self.members) + 1, **{**self.options, **options})
        self.members.append(member)
        return await member.start(*candidates)

    async def chain(self, length: int) -> list[Member]:
        """Each one's backups are its ancestors, nearest first."""
        for _ in range(length):
            await self.add(*reversed(self.members))
            last = self.members[-1]
            if len(self.members) > 1:
                await self.until(lambda last=last: last.upstream is not None and last.upstream.attached.is_set())
        return self.members

    async def until(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._until(condition)
        except TimeoutError:
            raise AssertionError(f"waited in vain: {self.members}") from None

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            for member in self.members:
                for task in member.tasks:
                    if member.alive and task.done() and not task.cancelled() and task.exception():
                        raise task.exception()
            await self.changed.wait()
            self.changed.clear()

    async def all_have(self, *made) -> None:
        await self.until(lambda: all(m.has(x) for m in self.members if m.alive for x in made))

    async def close(self) -> None:
        results = await asyncio.gather(*(m.stop() for m in self.members if m.alive), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result


Play = Callable[[Swarm], Awaitable[None]]


@pytest.fixture
def swarm(maker, tmp_path):
    def run(play: Play, *, loop=uvloop.new_event_loop, **options) -> None:
        async def body() -> None:
            swarm = Swarm(maker, tmp_path, **options)
            try:
                await play(swarm)
            finally:
                await swarm.close()
                await asyncio.sleep(0)

        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(body())

    return run


MEGABYTES = [128_000] * 30


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("stripes", [1, 2, 8])
def test_a_chain_ends_with_what_began_it(swarm, maker, loop, stripes):
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


def test_an_anchor_with_its_files_goes_down_a_chain(swarm, maker):
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


@pytest.mark.parametrize("stripes", [1, 3])
def test_a_ring_of_orphans_completes_what_it_holds_together(swarm, maker, stripes):
    """Nobody has all of it; one has the seal. Each receives from the next, round and round."""
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
def test_a_dead_parent_is_left_for_the_grandparent(swarm, maker, seed, stripes):
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
        assert set(fourth.parents) == {3}, "its parent lives and goes on"
        for member in (third, fourth):
            assert member.log(made) == made.log
            assert member.sent_twice == 0
            assert member.node.bytes_received == len(made.log), "resumed by piece"

    swarm(play, stripes=stripes)


@pytest.mark.parametrize("seed", range(3))
def test_a_cut_link_resumes_where_it_was(swarm, maker, seed):
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
                # Not from inside the read of that very link.
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


def test_a_corrupt_piece_is_dropped_blamed_and_fetched_elsewhere(swarm, maker):
    made = maker.make(MEGABYTES)

    async def play(swarm: Swarm) -> None:
        good = await swarm.add()
        evil = await swarm.add(good, kind=Corrupting)
        await good.publish(made)
        await swarm.all_have(made)
        assert evil.log(made) == made.log, "it holds the right bytes; it sends others"
        victim = await swarm.add(evil, good)
        child = await swarm.add(victim)
        await swarm.all_have(made)
        assert victim.node.pieces_corrupt == 1
        assert child.node.pieces_corrupt == 0, "it was never passed on"
        assert victim.parents == [evil.number, good.number]
        (why,) = victim.lost
        assert why is not None
        assert why.wire_code == "integrity"
        assert "piece 3 of 0.1 does not match its hash" in str(why)
        for member in (victim, child):
            assert member.log(made) == made.log
            assert member.sent_twice == 0

    swarm(play)


def test_abort_removes_it_everywhere(swarm, maker):
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
            assert member.lost == [], "the links go on"
            assert not member.upstream.active

    swarm(play, stripes=4)


def test_opened_and_aborted_before_a_slow_child_saw_any_of_it(swarm, maker):
    """Its OPEN never went out: then neither may an ABORT for a handle that nobody knows."""
    big = maker.make(MEGABYTES, step=1)
    made, other = maker.make([5000] * 3, step=2), maker.make([5000], step=3)

    async def play(swarm: Swarm) -> None:
        first, second = await swarm.chain(2)
        second.upstream.link.pause_reading()
        (child,) = first.downstream.children.values()
        for n in range(200):
            # Until the socket is full: then nothing more goes out on stripe 0 but control messages.
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


def test_a_slow_child_slows_nobody_and_costs_no_memory(swarm, maker):
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
    """Three at once, from a parent whose memory holds a piece and a half."""
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


def test_a_slow_disk_pauses_reading_and_loses_nobody(swarm, maker, monkeypatch):
    """Verified and not yet written is bounded; when the disk has caught up, reading goes on, on the same link."""
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


def test_a_loop_is_refused(swarm, maker):
    async def play(swarm: Swarm) -> None:
        first, _, third = await swarm.chain(3)
        upstream = Upstream(first.node, live=True)
        link = await dial(upstream, *third.listener.address, first.identity, purpose="data", role="child", stripes=1)
        upstream.start(link)
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
        assert "was closed while it was still needed" in str(error)

    swarm(play)


def test_over_tls(swarm, maker, papers):
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
        first.store = Store(first.store.root, maker.key.public)
        again = await swarm.add()
        for stored in first.store.artifacts.values():
            holding = again.node.add_stored(stored.assembly, first.store.open_log(stored))
            assert holding.finished
            assert holding.stored.ranges() == PieceSet(holding.assembly.pieces).ranges()
        late = await swarm.add(again)
        await swarm.until(lambda: all(late.has(one) for one in made))
        assert all(late.log(one) == one.log for one in made)

    swarm(play)
