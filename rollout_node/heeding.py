"""What the hub says to a peer, and what the peer does about it.

Promises: a hub whose key the token does not pin is refused; what comes before the peer can act on it is kept in order until it can.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Any

from p2pcast.artifact.records import run_id
from p2pcast.errors import P2PCastError, RefusedError, RetryableError, UntrustedError
from p2pcast.store.files import atomic_write
from p2pcast.trust import bearer
from p2pcast.trust.evictions import unsigned
from p2pcast.version import Version
from p2pcast.wire.messages import Body, Type
from rollout_node.companions import Lead
from rollout_node.control import RETRY_MAX_S, RETRY_MIN_S
from rollout_node.papers import Papers
from rollout_node.remembering import row

if TYPE_CHECKING:
    from rollout_node.peer import Peer

logger = logging.getLogger("p2pcast.peer")

WELCOME_S = 10.0
"""For the hub's first answer, once it has accepted the connection."""
START_S = 3.0
"""The same, dialling included, for a peer that can go on without: its engines wait for it."""


class Heeding:
    """A ``ControlOwner``: ``key``, and once all of the peer is there ``begin``."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._welcome: asyncio.Future[Body] | None = None
        self._early: list[tuple[Type, Body]] | None = []
        """What the hub said while we were still getting ready."""
        self._hub_key = b""
        """The run's, as the hub has said it."""
        self.alone = False
        """This process began from its state, while the hub was out of reach."""

    def begin(self) -> None:
        early, self._early = self._early or [], None
        for kind, body in early:
            self.on_hub_message(kind, body)

    async def key(self) -> bytes:
        """The run's public key, and that the token names it. A peer that knows it from before needs no hub. Raises RetryableError, RefusedError, LocalError."""
        peer, kept = self._peer, self._peer.remembering.key
        if peer.config.hub is not None:
            key = await self._of_hub(kept)
        else:
            assert peer.mirrored is not None
            try:
                key = await peer.mirrored.key()
            except RetryableError as error:
                if kept is None:
                    raise
                key = self._go_on_alone(kept, error)
        await peer.remembering.keep_key(key)
        return key

    async def _of_hub(self, kept: bytes | None) -> bytes:
        """Tries for ``join_timeout_s``, unless there is a key from before or a mirror."""
        peer, loop, wait_s = self._peer, asyncio.get_running_loop(), RETRY_MIN_S
        timeout_s, began = peer.config.join_timeout_s, loop.time()
        said = False
        while True:
            try:
                return await self._welcomed(None if kept is None else START_S)
            except RetryableError as error:
                failed: P2PCastError = error
            except UntrustedError as error:
                if kept is None:
                    raise
                failed = error
            self._welcome = None
            if kept is not None:
                return self._go_on_alone(kept, failed)
            if peer.mirrored is not None:
                logger.warning("%s; going on with the mirror", failed)
                return await peer.mirrored.key()
            left_s = began + timeout_s - loop.time() if timeout_s else RETRY_MAX_S
            if left_s <= 0:
                raise failed
            if not said:
                said = True
                logger.warning("%s; trying %s", failed, f"for {timeout_s:g} s" if timeout_s else "until it answers")
            await asyncio.sleep(min(left_s, wait_s * random.uniform(0.5, 1.5)))
            wait_s = min(RETRY_MAX_S, wait_s * 2)

    async def _welcomed(self, within_s: float | None) -> bytes:
        """The key as the hub says it. ``within_s``: for all of it; None: as long as each step may take."""
        peer = self._peer
        self._welcome = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(within_s):
                await peer.control.connect()
                async with asyncio.timeout(WELCOME_S):
                    welcome = await self._welcome
        except TimeoutError:
            peer.control.hang_up()
            raise RetryableError("the hub does not answer") from None
        key: bytes = welcome["key"]
        if run_id(key) != peer.config.token.run:
            raise RefusedError("the hub's key is not this run's: the token pins another")
        return key

    def _go_on_alone(self, key: bytes, error: P2PCastError) -> bytes:
        logger.warning("%s; going on from this peer's state", error)
        self.alone = True
        if self._peer.mirrored is not None:
            self._peer.mirrored.hasten()
        return key

    def on_hub_message(self, kind: Type, body: Body) -> None:
        peer = self._peer
        if kind is Type.WELCOME:
            self._bear(body.get("bearer", peer.bearer))
            self._hub_key = body["key"]
            peer.evictions.connected()
            self._called(body.get("name", peer.config.name))
            peer.commits = body["commit"]
            peer.target = None if body["target"] is None else Version.of(body["target"])
            peer.catalog.begin()
            if peer.commits != "barrier":
                peer.wayfinding.hold = None
            self._keep_orders()
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
            self._cut(body)
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
            lead = None if body["lead"] is None else (body["lead"][0], body["lead"][1], body["lead"][2])
            peer.member.lead_is(lead)
            if lead is not None:
                peer.remembering.keep(lead=row(lead))
        elif kind is Type.SQUASHING:
            peer.wayfinding.squashes.answered(body, asyncio.get_running_loop().time())
            peer.wayfinding.news.ring()
        elif kind is Type.HOLD:
            peer.wayfinding.hold = Version.of(body["version"])
            self._keep_orders()
            peer.wayfinding.news.ring()
        elif kind is Type.COMMIT:
            peer.target = Version.of(body["version"])
            self._keep_orders()
            peer.wayfinding.news.ring()
            self._target_moved()

    def _keep_orders(self) -> None:
        peer = self._peer
        target, hold = peer.target, peer.wayfinding.hold
        peer.remembering.keep(
            commit=peer.commits, target=None if target is None else str(target), hold=None if hold is None else str(hold)
        )

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
        lead.members_are(nodes)
        self._peer.remembering.keep(members=[lead.name, [node.hex() for node in nodes]])

    async def _renewed(self, papers: Papers, certificate: bytes) -> None:
        try:
            await papers.take(certificate)
        except P2PCastError as error:
            logger.warning("certificate: %s", error)

    def _called(self, name: str) -> None:
        """What the hub calls this peer."""
        config = self._peer.config
        if name != config.name:
            logger.warning(
                "another node of the run has the name %s: the hub calls this peer %s. Choose another --name, or evict the other node if that node is gone",
                config.name, name,
            )  # fmt: skip

    def untold(self) -> list[bytes]:
        """Evictions that the hub should know of and has not spoken of: it may have lost them."""
        return self._peer.evictions.untold(self._hub_key)

    def _cut(self, body: Body) -> None:
        """The hub's list of evicted nodes. Kept for ever: a hub whose list is shorter has lost its files. Raises RefusedError, IntegrityError."""
        peer, evictions = self._peer, self._peer.evictions
        if "signed" not in body:
            news = [s for s in map(unsigned, body["nodes"]) if evictions.take(s)]
        elif run_id(self._hub_key) != peer.config.token.run:
            raise RefusedError("the hub's key is not this run's: the token pins another")
        else:
            news = evictions.accept(body["signed"], self._hub_key)
            evictions.heard(body["signed"])
        if not news:
            return
        nodes = {s.node for s in news if s.evicted}
        error = RefusedError("this node was evicted from the run")
        peer.listener.drop(nodes, error)
        if hasattr(peer, "downstream"):
            links = [*peer.downstream.children, *(u.link for u in peer.node.upstreams)]
            for link in links:
                if link.remote in nodes:
                    link.close(error)
        peer.later(peer.staging.run(peer.eviction_log.save), "evicted")

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
