"""Nodes over loopback sockets, each with the smallest possible owner, in a swarm that signals every change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from p2pcast.artifact.assembly import Assembly
from p2pcast.ground.errors import P2PCastError
from p2pcast.relay.node import Node
from p2pcast.relay.upstream import Upstream
from p2pcast.store.artifact_store import ArtifactStore
from p2pcast.transport.dial import dial
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire.connection import Identity

TOKEN = JoinToken(bytes(16), bytes(20))
LIMIT_S = 600.0
"""Seconds after which a hanging test ends."""
MEGABYTES = [128_000] * 30


class Watched(Node):
    """A node that reports each new piece to its owner."""

    owner: Any

    def add_piece(self, holding, index, payload):
        super().add_piece(holding, index, payload)
        self.owner.on_piece(holding, index)

    def seal(self, holding, signed):
        super().seal(holding, signed)
        Swarm.changed.set()

    def confirm(self, holding, signed):
        super().confirm(holding, signed)
        Swarm.changed.set()

    def set_path(self, path):
        super().set_path(path)
        Swarm.changed.set()


class Corrupting(Node):
    """A parent that corrupts one piece as it sends."""

    wrong = 3

    def payload(self, holding, index):
        found = super().payload(holding, index)
        if found is None or index != self.wrong:
            return found
        return bytes([found[0] ^ 1]) + bytes(found[1:])


class Member(QuietOwner):
    """The smallest owner of a node: stores every artifact, wants every artifact that its parent offers, and attaches to
    the next candidate when the parent is lost.
    """

    def __init__(self, maker, root: Path, number: int, *, stripes=1, tls=None, kind: type[Node] = Watched, bare=False):
        self.maker, self.number, self.stripes = maker, number, stripes
        self.ident = bytes([number]) * 16
        self.identity = Identity(self.ident, f"n{number}", TOKEN)
        papers = None if tls is None else tls.tls(self.ident)
        self.server_tls, self.client_tls = (None, None) if papers is None else (papers.server, papers.client)
        self.store = ArtifactStore(root / str(number), maker.key.public)
        self.node = kind(self, self.ident, maker.key.public)
        if not bare:
            self.node.add_layout(maker.layout)  # as one that holds an anchor already
        self.downstream = self.node.downstream
        self.listener = Listener(self, self.identity, self.server_tls)
        self.upstream: Upstream | None = None
        self.lost: list[P2PCastError | None] = []
        self.aborted: list[bytes] = []
        self.parents: list[int] = []
        self.piece_hook: Callable[[], None] | None = None
        self.tasks: list[asyncio.Task[object]] = []
        self.alive = True
        self.beside = False
        """All candidates are neighbours that have lost the hub as well."""

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
            try:
                link = await dial(
                    QuietOwner(), *parent.listener.address, self.identity, purpose="data", role="child",
                    stripes=self.stripes, expect=parent.ident, tls=self.client_tls,
                )  # fmt: skip
            except P2PCastError as error:
                self.lost.append(error)
                continue
            upstream = Upstream(self.node, link, live=True, beside=self.beside)
            upstream.start()
            self.upstream = upstream
            self.parents.append(parent.number)
            self.lost.append(await upstream.run())

    async def stop(self) -> None:
        """As when the process dies: no message goes out."""
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

    def make_log(self, open_, layout, *, excerpt):
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

    # -- publishing, and the result

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
        """A chain of nodes; each node's backups are its ancestors, nearest first."""
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
            raise AssertionError(f"the condition never held: {self.members}") from None

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
