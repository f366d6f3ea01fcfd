"""What the hub says to a peer, and what the peer does about it.

Promises: a hub whose key the token does not pin is refused; what comes before the peer can act on it is kept in order until it can.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from p2pcast.artifact.records import run_id
from p2pcast.errors import P2PCastError, RefusedError, RetryableError
from p2pcast.store.files import atomic_write
from p2pcast.trust import bearer
from p2pcast.version import Version
from p2pcast.wire.messages import Body, Type
from rollout_node.companions import Lead
from rollout_node.papers import Papers

if TYPE_CHECKING:
    from rollout_node.peer import Peer

logger = logging.getLogger("p2pcast.peer")


class Heeding:
    """A ``ControlOwner``: ``key``, and once all of the peer is there ``begin``."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._welcome: asyncio.Future[Body] | None = None
        self._early: list[tuple[Type, Body]] | None = []
        """What the hub said while we were still getting ready."""

    def begin(self) -> None:
        early, self._early = self._early or [], None
        for kind, body in early:
            self.on_hub_message(kind, body)

    async def key(self) -> bytes:
        """The run's public key, and that the token names it. Raises RetryableError, RefusedError."""
        peer = self._peer
        if peer.config.hub is None and peer.mirrored is not None:
            return await peer.mirrored.key()
        self._welcome = asyncio.get_running_loop().create_future()
        try:
            await peer.control.connect()
            async with asyncio.timeout(10):
                welcome = await self._welcome
        except (TimeoutError, RetryableError) as error:
            if peer.mirrored is not None:
                self._welcome = None
                logger.warning(
                    "%s; going on with the mirror", error if isinstance(error, RetryableError) else "the hub does not answer"
                )
                return await peer.mirrored.key()
            if isinstance(error, TimeoutError):
                raise RetryableError("the hub accepted the connection but did not answer") from None
            raise
        key: bytes = welcome["key"]
        if run_id(key) != peer.config.token.run:
            raise RefusedError("the hub's key is not this run's: the token pins another")
        return key

    def on_hub_message(self, kind: Type, body: Body) -> None:
        peer = self._peer
        if kind is Type.WELCOME:
            self._bear(body.get("bearer", peer.bearer))
            peer.commits = body["commit"]
            peer.target = None if body["target"] is None else Version.of(body["target"])
            peer.catalog.begin()
            if peer.commits != "barrier":
                peer.wayfinding.hold = None
            if self._welcome is not None and not self._welcome.done():
                self._welcome.set_result(body)
            elif run_id(body["key"]) != peer.config.token.run:
                raise RefusedError("the hub's key is not this run's: the token pins another")
            else:
                peer.chronicle.hub(reachable=True)
            self._target_moved()
        elif kind is Type.ISSUED and peer.papers is not None:
            peer.later(self._renewed(peer.papers, body["certificate"]), "certificate")
        elif kind is Type.EVICTED:
            self._cut({*body["nodes"]})
        elif self._early is not None:
            self._early.append((kind, body))
        elif kind is Type.PLAN:
            parent = None if body["parent"] is None else (body["parent"], body["host"], body["port"])
            peer.attachment.order((body["epoch"][0], body["epoch"][1]), parent, [(n, h, p) for n, h, p in body["backups"]])
        elif kind is Type.WAYS:
            peer.dialling.told(body)
        elif kind is Type.UNREACHED:
            peer.dialling.unreached(body)
        elif kind is Type.CALLED:
            peer.dialling.called(body, peer.downstream)
        elif kind is Type.NEIGHBOURS:
            peer.attachment.introduce([(n, h, p) for n, h, p in body["peers"]])
        elif kind is Type.SOURCES:
            peer.pulling.told(body["artifact"], [(n, h, p) for n, h, p in body["peers"]])
        elif kind is Type.CATALOG:
            whole = peer.catalog.update(body, asyncio.get_running_loop().time())
            dropped = body["dropped"]
            if whole and peer.lead is not None:
                peer.lead.hub_has_told()
            if whole:
                # A hub that died forgets what it had not sealed. What opened since we dialled it may be newer than its list.
                since = peer.control.joined_at
                unlisted = [h for h in peer.node.holdings.values() if peer.catalog.get(h.id) is None]
                dropped = [h.id for h in unlisted if h.idle or h.opened_at < since]
            for artifact in dropped:
                self._dropped(artifact)
            if not whole and (live := peer.attachment.live) is not None:
                for artifact, *_, sealed, _, _ in body["artifacts"]:
                    if not sealed:
                        live.expect(artifact)
            self._confirmed(body["artifacts"])
            peer.following.contradict(peer.catalog.identities())
            peer.wayfinding.news.ring()
        elif kind is Type.ENGINE and peer.lead is not None:
            self._members_are(peer.lead, body.get("members", []))
        elif kind is Type.ENGINE and peer.member is not None:
            peer.member.lead_is(None if (lead := body["lead"]) is None else (lead[0], lead[1], lead[2]))
        elif kind is Type.SQUASHING:
            peer.wayfinding.squashes.answered(body, asyncio.get_running_loop().time())
            peer.wayfinding.news.ring()
        elif kind is Type.HOLD:
            peer.wayfinding.hold = Version.of(body["version"])
            peer.wayfinding.news.ring()
        elif kind is Type.COMMIT:
            peer.target = Version.of(body["version"])
            peer.wayfinding.news.ring()
            self._target_moved()

    def _bear(self, token: str) -> None:
        """What opens this peer's HTTP side off loopback."""
        peer = self._peer
        if token != peer.bearer:
            peer.bearer = token
            if hasattr(peer, "http"):
                peer.http.bearer = token
                peer.later(
                    peer.staging.run(atomic_write, peer.config.state / bearer.FILE, f"{token}\n".encode(), 0o600), "bearer"
                )

    def _members_are(self, lead: Lead, nodes: list[bytes]) -> None:
        """Kept, for as long as the hub may be away."""
        peer = self._peer
        lead.members_are(nodes)
        named = [lead.name, [node.hex() for node in nodes]]
        if named != peer.memory["members"]:
            peer.later(peer.staging.run(peer.memory.update, members=named), "members")

    async def _renewed(self, papers: Papers, certificate: bytes) -> None:
        try:
            await papers.take(certificate)
        except P2PCastError as error:
            logger.warning("certificate: %s", error)

    def _cut(self, nodes: set[bytes]) -> None:
        """The hub says whom nobody is to deal with any more. Kept, for as long as the hub may be away."""
        peer = self._peer
        if nodes == peer.evicted:
            return
        peer.evicted.clear()
        peer.evicted.update(nodes)
        error = RefusedError("this node was evicted from the run")
        peer.listener.drop(peer.evicted, error)
        if hasattr(peer, "downstream"):
            links = [*peer.downstream.children, *(u.link for u in peer.node.upstreams)]
            for link in links:
                if link.remote in nodes:
                    link.close(error)
        peer.later(peer.staging.run(peer.memory.update, evicted=sorted(n.hex() for n in nodes)), "evicted")

    def on_hub_lost(self) -> None:
        peer = self._peer
        peer.chronicle.hub(reachable=False)
        logger.warning("the hub is out of reach; going on with what the swarm has")

    def on_hub_refused(self, error: RefusedError) -> None:
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(error)

    def _dropped(self, artifact: bytes) -> None:
        peer = self._peer
        peer.pulling.drop(artifact)
        holding = peer.node.holdings.get(artifact)
        if holding is not None and not (holding.completed_at is not None and holding.confirmed.is_set()):
            peer.node.abort(holding)

    def _confirmed(self, artifacts: list[list[Any]]) -> None:
        """What the hub says to be on its disk, with its signature."""
        node = self._peer.node
        for artifact, *_, durable in artifacts:
            holding = node.holdings.get(artifact)
            if durable and holding is not None and holding.assembly.sealed:
                node.confirm(holding, durable)

    def _target_moved(self) -> None:
        peer = self._peer
        for runner in peer.runners:
            runner.wake()
        # With a barrier, who is not at the target is unready from now on.
        peer.look()
