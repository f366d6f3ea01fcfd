"""Artifacts in the hub's node: made durable, announced to peers, let go.

Promises: a version is announced as sealed only once it is durable here; retention takes nothing that a live peer needs to get to the newest version, or that is just
being sent.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from p2pcast import limits
from p2pcast.artifact.records import Durable, Open
from p2pcast.artifact.run_key import RunKey
from p2pcast.codec.layout import Layout
from p2pcast.errors import LocalError, P2PCastError, RemoteError
from p2pcast.events import Events
from p2pcast.relay.catchup import Edge, cheapest_path
from p2pcast.relay.downstream import Downstream
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import Node
from p2pcast.relay.upstream import Upstream
from p2pcast.state.staging import Staging
from p2pcast.store.log import Log
from p2pcast.store.store import Store, Stored
from p2pcast.version import Version
from p2pcast.wire.messages import Body, Type
from trainer_node.barrier import Aborted, Opened, Sealed
from trainer_node.commits import Commits
from trainer_node.membership import Membership

logger = logging.getLogger("p2pcast.hub")


class SealingOwner(Protocol):
    key: RunKey
    node: Node
    downstream: Downstream
    store: Store
    staging: Staging
    events: Events
    membership: Membership
    commits: Commits

    def send_all(self, kind: Type, body: Body) -> None:
        """To every joined peer."""

    def later(self, work: Coroutine[Any, Any, None], name: str) -> None: ...

    def stored(self) -> None:
        """What the store holds has changed."""

    def dropped(self, artifacts: list[bytes]) -> None:
        """They are no longer here, and peers are to know."""


class Sealing:
    """A ``NodeOwner``."""

    def __init__(self, owner: SealingOwner) -> None:
        self._owner = owner

    # -- NodeOwner

    def make_log(self, open_: Open, layout: Layout) -> Log:
        raise RemoteError("a hub takes no artifacts from others")

    def on_opened(self, holding: Holding) -> None:
        self._owner.commits.happened(Opened(holding.open.version))
        self.announce([holding])

    def on_complete(self, holding: Holding) -> None:
        self._owner.later(self._seal(holding), f"seal {holding.open.version}")

    async def _seal(self, holding: Holding) -> None:
        owner = self._owner
        if holding.proof is not None and not await holding.proof:
            return
        manifest = holding.assembly.manifest
        assert manifest is not None
        durable = Durable(holding.id, manifest.body_hash, manifest.run, manifest.version).to_signed(owner.key)
        try:
            await owner.staging.run(owner.store.seal, holding.log, holding.assembly, durable)
        except P2PCastError as error:
            if not owner.node.error.done():
                owner.node.error.set_exception(error)
            holding.not_sealed(error)
            return
        except Exception as error:
            holding.not_sealed(LocalError(f"version {holding.open.version} could not be sealed: {type(error).__name__}"))
            raise
        owner.node.confirm(holding, durable)
        holding.durable.set()
        owner.stored()
        size_bytes = manifest.log
        if owner.membership.sizes.published(size_bytes):
            logger.info("plans are made for versions of about %.3g MiB now", owner.membership.sizes.bytes / limits.MIB)
        self.announce([holding])
        self.sealed(holding.open.version, size_bytes)

    def sealed(self, version: Version, size_bytes: int) -> None:
        """It is durable here."""
        owner = self._owner
        owner.events.emit("sealed", version=str(version), bytes=size_bytes)
        owner.commits.happened(Sealed(version))

    def on_aborted(self, holding: Holding) -> None:
        owner = self._owner
        owner.events.emit("aborted", version=str(holding.open.version))
        owner.commits.happened(Aborted(holding.open.version))
        owner.later(owner.staging.run(owner.store.abandon, holding.log, holding.id), f"abandon {holding.open.version}")
        owner.dropped([holding.id])

    def on_offered(self, upstream: Upstream) -> None: ...

    def on_upstream_lost(self, upstream: Upstream, error: P2PCastError | None) -> None: ...

    # -- telling of them

    def catalog(self) -> Body:
        """All that is here, as peers are told."""
        return {"artifacts": [self._entry(h) for h in self._owner.node.holdings.values()], "dropped": []}

    def announce(self, holdings: Iterable[Holding]) -> None:
        entries = [self._entry(h) for h in holdings]
        if entries:
            self._owner.send_all(Type.CATALOG, {"artifacts": entries, "dropped": []})

    def _entry(self, holding: Holding) -> list[Any]:
        open_, manifest, sealed = holding.open, holding.assembly.manifest, holding.id in self._owner.store.artifacts
        base = None if open_.base is None else list(open_.base)
        size, state, identity = (manifest.log, manifest.state, manifest.identity) if manifest is not None else (0, 0, None)
        durable = (holding.assembly.durable_signed or b"") if sealed else b""
        return [holding.id, open_.kind, base, list(open_.version), size, open_.layout, state, sealed, identity, durable]

    # -- what lies in the store

    def add(self, stored: Stored) -> None:
        """One that was made beside live traffic."""
        owner = self._owner
        self.announce([owner.node.add_stored(stored.assembly, owner.store.open_log(stored))])
        owner.later(self.retain(), f"retention after {stored.version}")

    async def retain(self) -> None:
        owner = self._owner
        gone = await owner.staging.run(owner.store.retain, self.needed())
        for stored in gone:
            owner.node.forget(stored.id)
        if gone:
            owner.dropped([s.id for s in gone])
        owner.stored()

    def needed(self) -> frozenset[bytes]:
        """What live peers need to get to the newest version, and what is just being sent."""
        owner = self._owner
        edges = [Edge(s.id, s.base, s.version, s.manifest.log) for s in owner.store.artifacts.values()]
        ways = [cheapest_path(held, edges) for held in {p.staged for p in owner.membership.peers.values()}]
        sent = (feed.artifact.id for child in owner.downstream.children.values() for feed in child.feeds)
        return frozenset(edge.artifact for way in ways for edge in way) | frozenset(sent)
