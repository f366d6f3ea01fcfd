"""Fetches artifacts that this hub's disk has lost from peers, if the newest version cannot be reached without them.

Guarantees:

- The hub accepts only artifacts that it asked for, that the run's key signed, and that the hub once confirmed. Their
  state has the digest that the hub knows for their version.
- An artifact is in the store only once all of it is verified and durable.
- Peers that lie, or send nothing, delay the hub by ``LONGEST_S`` at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence

from p2pcast.artifact.signed_records import DELTA, Open
from p2pcast.codec.layout import Layout
from p2pcast.ground import limits
from p2pcast.ground.addresses import Address
from p2pcast.ground.errors import IntegrityError, P2PCastError, RemoteError
from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.relay.artifact_path import Edge, cheapest_path
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import Node, Parent
from p2pcast.relay.pull_schedule import CancelPieces, LeaveParent, PullSchedule
from p2pcast.relay.pull_source import PullSource
from p2pcast.store.artifact_log import ArtifactLog
from p2pcast.store.artifact_store import ArtifactStore, Stored
from p2pcast.transport.dial import dial_any
from p2pcast.transport.link import QuietOwner
from p2pcast.wire.connection import Identity
from trainer_node.membership.membership import Membership

logger = logging.getLogger("p2pcast.hub")

ASKED = 8
"""Most peers that are asked at the same time."""
ATTACH_S = 5.0
LONGEST_S = 120.0
"""Time limit for all lost artifacts together, in seconds; after it, the hub makes an anchor instead."""
TICK_S = 0.05
STRANGER = b"hub that has lost artifacts"
"""The node's id. With the hub's own id, a path would look like a loop."""

Contact = tuple[bytes, Sequence[Address]]
"""A peer's node id, and its addresses."""


def contacts(membership: Membership) -> list[Contact]:
    """Joined peers that may be dialled; those that have reported artifacts unknown to the hub come first."""
    found = []
    for peer in sorted(membership.peers.values(), key=lambda peer: not peer.holds_more):
        if not membership.blame.quarantined(peer.ident):
            addresses = [a for a, answers in membership.reach.answers(peer.ident) if answers is not False]
            found.append((bytes.fromhex(peer.ident), addresses))
    return [contact for contact in found if contact[1]]


class _Intake:
    """Owner of a node that only receives. ``wanted``: artifact → its base and version."""

    def __init__(self, store: ArtifactStore) -> None:
        self.wanted: dict[bytes, tuple[Version | None, Version]] = {}
        self.news = Wakeup()
        self._store = store

    def make_log(self, open_: Open, layout: Layout, *, excerpt: bool) -> ArtifactLog:
        if self.wanted.get(open_.artifact) != (open_.base, open_.version):
            raise RemoteError(f"an artifact of {open_.version} came that this hub did not ask for")
        return self._store.begin(open_, layout)

    def on_opened(self, holding: Holding) -> None: ...
    def on_complete(self, holding: Holding) -> None:
        self.news.notify()

    def on_aborted(self, holding: Holding) -> None: ...
    def on_offered(self, upstream: Parent) -> None: ...
    def on_upstream_lost(self, upstream: Parent, error: P2PCastError | None) -> None: ...


class _Pull:
    """A ``Puller``."""

    def __init__(self, news: Wakeup) -> None:
        self.schedule = PullSchedule()
        self._news = news

    def held(self, source: PullSource, artifact: bytes, pieces: Sequence[int], *, sealed: bool) -> None:
        self.schedule.holds(source.link.remote, artifact, pieces, sealed=sealed)
        self._news.notify()

    def gone(self, source: PullSource, artifact: bytes) -> None:
        self.schedule.refused(source.link.remote, artifact, [0, limits.MAX_PIECES])

    def cancelled(self, source: PullSource, artifact: bytes, pieces: Sequence[int]) -> None:
        self.schedule.cancelled(source.link.remote, artifact, pieces)

    def expects(self, source: PullSource, artifact: bytes, piece: int) -> bool:
        return self.schedule.expects(source.link.remote, artifact, piece)

    def came(self, source: PullSource, artifact: bytes, piece: int) -> None:
        self.schedule.got(source.link.remote, artifact, piece)
        self._news.notify()

    def received(self, source: PullSource, size: int) -> None:
        self.schedule.received(source.link.remote, size, asyncio.get_running_loop().time())

    def owed(self, source: PullSource) -> bool:
        return self.schedule.owes(source.link.remote)


class LostArtifacts:
    """``known`` returns a version's layout and state, as from ``Pipeline.mark_of``; None if they are not remembered."""

    def __init__(
        self,
        store: ArtifactStore,
        identity: Identity,
        tls: ssl.SSLContext | None,
        membership: Membership,
        known: Callable[[Version], str | None],
    ) -> None:
        self._store = store
        self._identity = identity
        self._tls = tls
        self._membership = membership
        self._known = known

    async def fetch(self, *, anchors: bool) -> list[Stored]:
        """Fetch the lost artifacts on the path from nothing to the newest version, and return those that came.
        ``anchors``: whether to fetch whole states too, which cost as much as one that the hub makes.
        """
        asked = contacts(self._membership)[:ASKED]
        if not asked:
            return []
        intake = _Intake(self._store)
        node, pull = Node(intake, STRANGER, self._store.run_key), _Pull(intake.news)
        found: list[Stored] = []
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(LONGEST_S), asyncio.TaskGroup() as group:
                writing = group.create_task(node.run(), name="disk of lost artifacts")
                dials = [group.create_task(self._attach(node, pull, one), name="ask a peer") for one in asked]
                await asyncio.wait(dials)
                sources = {s.link.remote: s for s in (dial.result() for dial in dials) if s is not None}
                links = [group.create_task(source.run(), name="lost artifacts") for source in sources.values()]
                intake.wanted = self._choose(sources.values(), anchors=anchors)
                for artifact in intake.wanted:
                    node.pulled.add(artifact)
                    pull.schedule.want(artifact)
                for source in sources.values():
                    pull.schedule.found(source.link.remote, loop.time())
                    for artifact in intake.wanted:
                        source.request(artifact, [], seal=False)
                while len(found) < len(intake.wanted) and not all(link.done() for link in links):
                    await intake.news.wait(TICK_S)
                    found += await self._seal(node, {stored.id for stored in found})
                    self._decide(node, pull, sources)
                for task in (writing, *links):
                    task.cancel()
        except* (P2PCastError, TimeoutError) as errors:
            logger.warning("lost artifacts did not come back from peers: %s", errors.exceptions[0])
        finally:
            for holding in node.holdings.values():
                if not holding.durable:
                    self._store.abandon(holding.log, holding.id)
            node.close()
        return found

    async def _attach(self, node: Node, pull: _Pull, contact: Contact) -> PullSource | None:
        """Connect to a peer. Returns None if it cannot be reached."""
        ident, addresses = contact
        made: list[PullSource] = []
        try:
            await dial_any(
                QuietOwner(), addresses, self._identity, purpose="data", role="child", stripes=1, expect=ident,
                tls=self._tls, made=lambda link: made.append(PullSource(node, pull, link)),
            )  # fmt: skip
        except P2PCastError as error:
            logger.info("a peer that may hold lost artifacts is out of reach: %s", error)
            return None
        [source] = made
        source.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ATTACH_S):
                await source.attached.wait()
        return source

    def _choose(self, sources: Iterable[PullSource], *, anchors: bool) -> dict[bytes, tuple[Version | None, Version]]:
        """Return the fewest offered artifacts that, with the stored ones, lead from nothing to the newest version."""
        offers = {a: o for s in sources for a, o in s.offers.items() if o[3] and (anchors or o[0] == DELTA)}
        edges = [Edge(s.id, s.base, s.version, 0) for s in self._store.artifacts.values()]
        edges += [Edge(a, base, version, 1) for a, (_, base, version, _) in offers.items() if not self._store.holds(a)]
        path = cheapest_path(None, edges, target=self._store.newest())
        return {edge.artifact: (edge.base, edge.version) for edge in path if not self._store.holds(edge.artifact)}

    def _decide(self, node: Node, pull: _Pull, sources: Mapping[bytes, PullSource]) -> None:
        for holding in node.holdings.values():
            if holding.incomplete and holding.assembly.complete_directory:
                held = holding.artifact.held
                pull.schedule.directory(
                    holding.id, holding.assembly.pieces, holding.open.piece,
                    [i for i in range(holding.assembly.pieces) if i in held],
                )  # fmt: skip
        for instruction in pull.schedule.decide(asyncio.get_running_loop().time()):
            source = sources[instruction.source]
            if isinstance(instruction, LeaveParent):
                source.link.close(RemoteError(f"{source.link.name} {instruction.why}"))
            elif isinstance(instruction, CancelPieces):
                source.cancel(instruction.artifact, instruction.pieces)
            else:
                source.request(instruction.artifact, instruction.pieces, seal=instruction.seal)

    async def _seal(self, node: Node, done: set[bytes]) -> list[Stored]:
        """Put complete and confirmed artifacts into the store. Raises IntegrityError or LocalError."""
        out = []
        for holding in [h for h in node.holdings.values() if h.finished and h.confirmed and h.id not in done]:
            manifest = holding.assembly.manifest
            assert manifest is not None
            known = self._known(manifest.version)
            if known not in (None, f"{manifest.layout.hex()} {manifest.state:016x}"):
                raise IntegrityError(f"a peer's {manifest.version} is not the version that this hub published")
            out.append(await asyncio.to_thread(self._store.seal, holding.log, holding.assembly))
            holding.seal()
            logger.info("version %s came back from a peer", manifest.version)
        return out
