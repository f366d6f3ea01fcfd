"""A member of an engine on several hosts: the peer on a host without the engine's server. Its lead:
``rollout_node.engine.multi_host_leader``.

Guarantees:

- Ranks get the shadow only while it is held still for the lead.
- After the lead is lost, the shadow is held still for as long as a rank may be reading it.

Ranks' reports still reach a lead that comes back within a minute. A lost lead delays this peer's other work only for a
bounded time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgpack

from p2pcast.ground import limits
from p2pcast.ground.addresses import show_address
from p2pcast.ground.backoff import REDIAL_MAX_S, REDIAL_MIN_S, Backoff
from p2pcast.ground.errors import P2PCastError, RetryableError
from p2pcast.ground.private_random import uniform
from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.transport.dial import dial
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.wire import messages
from p2pcast.wire.connection import Event, Identity, Message
from p2pcast.wire.dispatch import Handlers, dispatch
from rollout_node.engine.multi_host_leader import SILENCE_S, MemberStanding
from rollout_node.shadow.shadow_state import ShadowState

logger = logging.getLogger("p2pcast.peer")

STAND_S = 10.0
"""Seconds for which a member holds still after losing its lead: longer than ``multi_host_leader.LOST_S``."""
READ_S = 1800.0
"""The same, if a rank may be reading the shadow: the longest time for a dense install."""
KEPT_S = 60.0
"""Reports older than this many seconds are dropped, because the lead has given up on them."""
CHECK_S = 1.0
"""Seconds between checks for a silent lead."""


class MultiHostMember:
    """One host's part of the engine ``name``. ``serves`` is the engine's version as the lead last reported it.
    ``on_changed`` is called when the engine's version or its readiness may have changed.
    """

    def __init__(
        self,
        name: str,
        shadow: ShadowState,
        identity: Identity,
        tls: ssl.SSLContext | None,
        on_changed: Callable[[], None],
    ) -> None:
        self.name = name
        self.serves: Version | None = None
        self._ready = False
        self._shadow = shadow
        self._on_changed = on_changed
        self._identity = identity
        self._tls = tls
        self._incarnation = secrets.token_bytes(16)
        self._lead: tuple[bytes, str, int] | None = None
        self._link: Link | None = None
        self._last_received_at = 0.0
        self._error: str | None = None
        self._order: Version | None = None
        self._orders = 0
        """Number of changes of the order, including its withdrawal."""
        self._lost_at: float | None = None
        """When the lead was lost; None again after the next FREEZE."""
        self._standing: Version | None = None
        self._given = False
        """Whether a rank has been given the shadow since it has been held still."""
        self._round = 0
        self._sent: tuple[MemberStanding, int] | None = None
        self._welcomed = False
        """Whether the lead has accepted this connection."""
        self._kept: deque[tuple[float, bytes]] = deque()
        """Reports not yet sent to the lead, with the times at which they were made."""
        self._news = Wakeup()
        self._handlers: Handlers = {
            messages.Ping: self._on_ping,
            messages.Freeze: self._on_freeze,
            messages.Serving: self._on_serving,
        }

    @property
    def connected(self) -> bool:
        return self._link is not None and not self._link.closed

    @property
    def ready(self) -> bool:
        """Whether the engine is ready for requests, according to the lead's last message."""
        return self._ready and self.connected

    async def run(self) -> None:
        """Stay connected to the lead and hold the shadow still on its orders, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._attend(), name=f"lead of {self.name}")
                group.create_task(self._stand(), name=f"standing for {self.name}")
        finally:
            if self._link is not None:
                self._link.close()

    def set_lead(self, place: tuple[bytes, str, int] | None) -> None:
        """Set the lead named by the hub. None keeps the known lead."""
        if place is not None and place != self._lead:
            self._lead = place
            if self._link is not None:
                self._link.close()
            self._news.notify()

    def moved(self) -> None:
        """Called when the shadow's version has changed."""
        self._send_standing()
        self._news.notify()

    def may_leave(self, version: Version | None) -> bool:
        """Whether the shadow may move on from ``version``; it never passes the lead's shadow."""
        self._forget_late_orders()
        return self._order is None or version is None or version < self._order

    def give_shadow(self, version: Version) -> None:
        """Called before a rank gets the shadow. Raises RetryableError unless it is held still at ``version``."""
        if self._standing != version:
            raise RetryableError(f"this host's shadow is not held still at {version} for the engine {self.name}")
        self._given = True

    def report(self, report: Mapping[str, Any]) -> None:
        """Queue a rank's report for the lead."""
        now = asyncio.get_running_loop().time()
        self._kept.append((now, msgpack.packb(dict(report))))
        self._forward(now)
        while self._kept and (
            now - self._kept[0][0] > KEPT_S or sum(len(r) for _, r in self._kept) > limits.MAX_KEPT_REPORTS_BYTES
        ):
            self._kept.popleft()

    def status(self) -> dict[str, Any]:
        """Return the member's part of /status."""
        lead = self._lead
        return {
            "name": self.name,
            "role": "member",
            "lead": None if lead is None else {"node": lead[0].hex(), "address": show_address(lead[1], lead[2])},
            "connected": self.connected,
            "still": None if self._standing is None else str(self._standing),
            "serves": None if self.serves is None else str(self.serves),
            "ready": self.ready,
            "error": self._error,
        }

    # -- the connection

    async def _attend(self) -> None:
        loop, backoff = asyncio.get_running_loop(), Backoff(REDIAL_MIN_S, REDIAL_MAX_S, uniform)
        while True:
            lead = self._lead
            if lead is None:
                await self._news.wait()
                continue
            node, host, port = lead
            try:
                link = await dial(
                    self, host, port, self._identity, purpose="engine", role="member", expect=node, tls=self._tls
                )
            except P2PCastError as error:
                self._error = f"lead of {self.name}: {error}"
                logger.debug("%s", self._error)
            else:
                if not link.closed and lead == self._lead:
                    self._greet(link)
                    await self._listen(link)
                    if self._welcomed:
                        backoff.reset()
                else:
                    link.close()
            until = loop.time() + backoff.next_s()
            while lead == self._lead and (left := until - loop.time()) > 0:
                await self._news.wait(left)
            if lead != self._lead:
                backoff.reset()

    def _greet(self, link: Link) -> None:
        self._link, self._sent, self._round, self._welcomed = link, None, 0, False
        now = self._last_received_at = asyncio.get_running_loop().time()
        link.send(messages.Member(self.name, self._incarnation))
        self._send_standing()
        self._forward(now)

    async def _listen(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        while not link.closed:
            if loop.time() - self._last_received_at > SILENCE_S:
                link.abort(RetryableError(f"the lead of {self.name} has been silent for {SILENCE_S:.0f} s"))
            else:
                await self._news.wait(CHECK_S)

    def _send_standing(self) -> None:
        standing = MemberStanding(self._standing or self._shadow.staged, self._standing is not None), self._round
        if self._link is not None and not self._link.closed and standing != self._sent:
            self._sent = standing
            self._link.send(messages.Held(version=standing[0].version, still=standing[0].still, round=self._round))

    def _forward(self, now: float) -> None:
        while self._kept and self._link is not None and not self._link.closed:
            made_at, report = self._kept.popleft()
            if now - made_at <= KEPT_S:
                self._link.send(messages.WorkerReport(report, int((now - made_at) * 1e6)))

    # -- standing still

    async def _stand(self) -> None:
        while True:
            orders = self._orders
            if self.may_leave(self._shadow.staged):
                await self._shadow.recheck()
                if orders == self._orders and self.may_leave(self._shadow.staged):
                    await self._news.wait(self._remaining())
                continue
            async with self._shadow.held_still() as shadow:
                version = None if shadow is None else shadow[0]
                if version is None or self.may_leave(version):
                    continue
                self._standing, self._given = version, False
                while not self.may_leave(version):
                    self._send_standing()
                    await self._news.wait(self._remaining())
                self._standing, self._given = None, False
            self._send_standing()

    def _forget_late_orders(self) -> None:
        remaining = self._remaining()
        if remaining is not None and remaining <= 0:
            self._order = self._lost_at = None

    def _remaining(self) -> float | None:
        """Seconds for which a lost lead's order remains valid; None while the lead is connected."""
        if self._lost_at is None:
            return None
        return self._lost_at + (READ_S if self._given else STAND_S) - asyncio.get_running_loop().time()

    # -- LinkOwner

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        # Messages on an earlier connection are ignored.
        if isinstance(event, Message) and link is self._link:
            dispatch(self._handlers, event)

    def _on_ping(self, body: messages.Ping) -> None:
        if self._link is not None:
            self._link.send(messages.Pong(body.t))
        self._send_standing()

    def _on_freeze(self, body: messages.Freeze) -> None:
        self._order = body.version
        self._round, self._lost_at = body.round, None
        self._orders += 1
        self._news.notify()

    def _on_serving(self, body: messages.Serving) -> None:
        self._error, self._welcomed = None, True
        self.serves, self._ready = body.version, body.ready
        self._on_changed()

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        self._last_received_at = asyncio.get_running_loop().time()

    def on_link_writable(self, link: Link, stripe: Stripe) -> None: ...

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        if link is self._link:
            if error is not None:
                self._error = f"lead of {self.name}: {error}"
            if self._lost_at is None:
                self._lost_at = asyncio.get_running_loop().time()
                self._orders += 1
            logger.warning("engine %s: its lead is out of reach%s", self.name, f": {error}" if error else "")
            self._news.notify()
            self._on_changed()
