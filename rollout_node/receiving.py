"""What comes in at a peer's node: where it is put, how it becomes durable, and what is made of it when it ends early.

Promises: an artifact counts as durable once it is sealed in the store, and not before; it is sealed there only once the hub is known to hold its version on its own disk, so what a
store holds may be served by engines; retention takes nothing that the way to the newest version needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pcast import limits
from p2pcast.artifact.records import Open
from p2pcast.codec.layout import Layout
from p2pcast.errors import P2PCastError
from p2pcast.relay.holding import Holding
from p2pcast.relay.upstream import Upstream
from p2pcast.store.log import Log

if TYPE_CHECKING:
    from rollout_node.peer import Peer

SPEAKING_BYTES = limits.MIB
"""A transfer below that is over before its rate is known."""


class Receiving:
    """A ``NodeOwner``."""

    def __init__(self, peer: Peer) -> None:
        self.transfer: list[int] | None = None
        """[bytes, microseconds] of the last one, until somebody takes it from here."""
        self.fastest_bps = 0.0
        """Of a transfer that was long enough to say something."""
        self._peer = peer

    def make_log(self, open_: Open, layout: Layout) -> Log:
        peer = self._peer
        if open_.artifact in peer.node.excerpts:
            return peer.store.begin_excerpt(open_)
        return peer.store.begin(open_, layout, resumable=True)

    def on_opened(self, holding: Holding) -> None:
        peer = self._peer
        if holding.excerpt:
            return
        peer.freshness.saw(holding.open.version, holding.opened_at)
        peer.lacking.opened(holding)
        peer.chronicle.receiving(holding.open.version, holding.open.base, holding.opened_at)
        peer.wayfinding.news.ring()

    def on_complete(self, holding: Holding) -> None:
        peer = self._peer
        took = (holding.completed_at or 0.0) - holding.opened_at
        peer.chronicle.received(holding.open.version, took)
        if holding.assembly.manifest is not None and took > 0:
            came = max(0, holding.assembly.manifest.log - holding.had_bytes)
            peer.wayfinding.squashes.transferred(came, took)
            self.transfer = [came, int(took * 1e6)]
            self.fastest_bps = max(self.fastest_bps, 8 * came / took if came > SPEAKING_BYTES else 0.0)
        entry = peer.catalog.get(holding.id)
        if entry is not None and entry.durable is not None:
            # The hub has said so before the seal came; a parent that withholds its record holds up nobody.
            peer.node.confirm(holding, entry.durable)
        peer.later(self._seal(holding), f"seal {holding.open.version}")

    async def _seal(self, holding: Holding) -> None:
        peer = self._peer
        try:
            await holding.confirmed.wait()
            if holding.aborted:
                return
            stored = await peer.staging.run(peer.store.seal, holding.log, holding.assembly)
            holding.durable.set()
            needed = peer.wayfinding.needed() | {stored.id}
            for gone in await peer.staging.run(peer.store.retain, needed):
                peer.node.forget(gone.id)
        except P2PCastError as error:
            if not peer.node.error.done():
                peer.node.error.set_exception(error)
        peer.wayfinding.news.ring()

    def on_aborted(self, holding: Holding) -> None:
        peer = self._peer
        if holding.excerpt:
            peer.later(peer.staging.run(peer.store.end_excerpt, holding.log, holding.id), f"end {holding.open.version}")
            return
        peer.chronicle.aborted(holding.open.version)
        peer.later(peer.staging.run(peer.store.abandon, holding.log, holding.id), f"abandon {holding.open.version}")
        peer.wayfinding.news.ring()

    def on_offered(self, upstream: Upstream) -> None:
        if upstream.live and not upstream.beside and not self._peer.control.connected:
            # No catalog names what was published meanwhile; what it offers is signed all the same.
            upstream.want_newer()
        self._peer.wayfinding.news.ring()

    def on_upstream_lost(self, upstream: Upstream, error: P2PCastError | None) -> None:
        self._peer.wayfinding.news.ring()

    def give_up(self, holding: Holding) -> None:
        """What was received of it is of no use any more."""
        peer = self._peer
        peer.node.give_up(holding)
        peer.later(peer.staging.run(peer.store.abandon, holding.log, holding.id), f"give up {holding.open.version}")
