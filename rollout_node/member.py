"""One host's part of an engine that spans several: the peer there as the engine's member. Its lead: ``rollout_node.companions``.

Promises: workers are given the shadow only while it stands still for the lead, and it goes on standing when the lead is lost, for as long as a worker may be
reading; what workers report reaches the lead, if it comes back within a minute; the lead's absence holds up nothing else here for long.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import ssl
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import msgpack

from p2pcast import limits
from p2pcast.addresses import show_address
from p2pcast.bell import Bell
from p2pcast.errors import P2PCastError, RetryableError
from p2pcast.transport.dial import dial
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.version import Version
from p2pcast.wire.connection import Event, Identity, Message
from p2pcast.wire.messages import Type
from rollout_node.companions import SILENCE_S, Standing, plain

logger = logging.getLogger("p2pcast.peer")

STAND_S = 10.0
"""How long a member goes on standing still when its lead is gone: longer than the lead waits for it (``companions.LOST_S``)."""
READ_S = 1800.0
"""The same when a worker has the shadow: the longest that a dense install may take, for the worker may be in the middle of one."""
KEPT_S = 60.0
"""A report that the lead could not be told within this time is about something that was given up long ago."""
LOOK_S = 1.0
"""Between looks at how long the lead has been silent."""
RETRY_MIN_S = 0.2
RETRY_MAX_S = 5.0


class MemberOwner(Protocol):
    @property
    def staged(self) -> Version | None: ...
    def held_still(self) -> AbstractAsyncContextManager[tuple[Version, Path] | None]: ...
    async def look_again(self) -> None:
        """``may_leave`` may have changed."""

    def on_installed(self) -> None:
        """Something worth telling the hub."""


class Member:
    """One host's part of the engine ``name``. ``serves`` is what the lead last said of the engine."""

    def __init__(self, name: str, owner: MemberOwner, identity: Identity, tls: ssl.SSLContext | None) -> None:
        self.name = name
        self.serves: Version | None = None
        self._ready = False
        self._owner = owner
        self._identity = identity
        self._tls = tls
        self._incarnation = secrets.token_bytes(16)
        self._lead: tuple[bytes, str, int] | None = None
        self._link: Link | None = None
        self._heard_at = 0.0
        self._error: str | None = None
        self._order: Version | None = None
        self._orders = 0
        """How often the order, or its end, has changed."""
        self._lost_at: float | None = None
        """When the lead was lost, until it says STILL again."""
        self._standing: Version | None = None
        self._given = False
        """A worker was given the shadow since we stand."""
        self._round = 0
        self._said: tuple[Standing, int] | None = None
        self._welcomed = False
        """The lead has taken this connection."""
        self._kept: deque[tuple[float, bytes]] = deque()
        """Reports that the lead has not been told, and when they were made."""
        self._news = Bell()

    @property
    def connected(self) -> bool:
        return self._link is not None and not self._link.closed

    @property
    def ready(self) -> bool:
        """Whether the engine is fit for traffic, as far as is known here."""
        return self._ready and self.connected

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._attend(), name=f"lead of {self.name}")
                group.create_task(self._stand(), name=f"standing for {self.name}")
        finally:
            if self._link is not None:
                self._link.close()

    def lead_is(self, place: tuple[bytes, str, int] | None) -> None:
        """What the hub says. None is no reason to leave a lead that is known."""
        if place is not None and place != self._lead:
            self._lead = place
            if self._link is not None:
                self._link.close()
            self._news.ring()

    def moved(self) -> None:
        """The shadow is at another version."""
        self._say()
        self._news.ring()

    def may_leave(self, version: Version | None) -> bool:
        """Whether the shadow may go on from ``version``: it goes no further than the lead's."""
        self._forget_late_orders()
        return self._order is None or version is None or version < self._order

    def give_shadow(self, version: Version) -> None:
        """Before a worker is given the shadow. Raises RetryableError when it might not stay at ``version``."""
        if self._standing != version:
            raise RetryableError(f"this host's shadow is not held still at {version} for the engine {self.name}")
        self._given = True

    def report(self, report: Mapping[str, Any]) -> None:
        """A worker's report, for the lead."""
        now = asyncio.get_running_loop().time()
        self._kept.append((now, msgpack.packb(dict(report))))
        self._forward(now)
        while self._kept and (
            now - self._kept[0][0] > KEPT_S or sum(len(r) for _, r in self._kept) > limits.MAX_KEPT_REPORTS_BYTES
        ):
            self._kept.popleft()

    def status(self) -> dict[str, Any]:
        """For /status."""
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
        loop, wait_s = asyncio.get_running_loop(), RETRY_MIN_S
        while True:
            lead = self._lead
            if lead is None:
                await self._news.wait()
                continue
            node, host, port = lead
            try:
                link = await dial(self, host, port, self._identity, purpose="engine", role="member", expect=node, tls=self._tls)
            except P2PCastError as error:
                self._error = f"lead of {self.name}: {error}"
                logger.debug("%s", self._error)
            else:
                if not link.closed and lead == self._lead:
                    self._greet(link)
                    await self._listen(link)
                    if self._welcomed:
                        wait_s = RETRY_MIN_S
                else:
                    link.close()
            until = loop.time() + wait_s * random.uniform(0.5, 1.5)
            while lead == self._lead and (left := until - loop.time()) > 0:
                await self._news.wait(left)
            wait_s = min(RETRY_MAX_S, wait_s * 2) if lead == self._lead else RETRY_MIN_S

    def _greet(self, link: Link) -> None:
        self._link, self._said, self._round, self._welcomed = link, None, 0, False
        now = self._heard_at = asyncio.get_running_loop().time()
        link.send(Type.MEMBER, {"engine": self.name, "incarnation": self._incarnation})
        self._say()
        self._forward(now)

    async def _listen(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        while not link.closed:
            if loop.time() - self._heard_at > SILENCE_S:
                link.abort(RetryableError(f"the lead of {self.name} has been silent for {SILENCE_S:.0f} s"))
            else:
                await self._news.wait(LOOK_S)

    def _say(self) -> None:
        said = Standing(self._standing or self._owner.staged, self._standing is not None), self._round
        if self._link is not None and not self._link.closed and said != self._said:
            self._said = said
            self._link.send(Type.HELD, {"version": plain(said[0].version), "still": said[0].still, "round": self._round})

    def _forward(self, now: float) -> None:
        while self._kept and self._link is not None and not self._link.closed:
            made_at, report = self._kept.popleft()
            if now - made_at <= KEPT_S:
                self._link.send(Type.REPORTED, {"report": report, "age_us": int((now - made_at) * 1e6)})

    # -- standing still

    async def _stand(self) -> None:
        while True:
            orders = self._orders
            if self.may_leave(self._owner.staged):
                await self._owner.look_again()
                if orders == self._orders and self.may_leave(self._owner.staged):
                    await self._news.wait(self._remaining())
                continue
            async with self._owner.held_still() as shadow:
                version = None if shadow is None else shadow[0]
                if version is None or self.may_leave(version):
                    continue
                self._standing, self._given = version, False
                while not self.may_leave(version):
                    self._say()
                    await self._news.wait(self._remaining())
                self._standing, self._given = None, False
            self._say()

    def _forget_late_orders(self) -> None:
        remaining = self._remaining()
        if remaining is not None and remaining <= 0:
            self._order = self._lost_at = None

    def _remaining(self) -> float | None:
        """Seconds for which the order of a lead that is gone still holds; None: no end is known."""
        if self._lost_at is None:
            return None
        return self._lost_at + (READ_S if self._given else STAND_S) - asyncio.get_running_loop().time()

    # -- LinkOwner

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        if not isinstance(event, Message) or event.type is Type.PONG:
            return
        if link is not self._link:
            return  # it was left for another
        if event.type is Type.PING:
            link.send(Type.PONG, {"t": event.body["t"]})
            self._say()
        elif event.type is Type.STILL:
            self._order = None if event.body["version"] is None else Version.of(event.body["version"])
            self._round, self._lost_at = event.body["round"], None
            self._orders += 1
            self._news.ring()
        elif event.type is Type.SERVES:
            self._error, self._welcomed = None, True
            self.serves = None if event.body["version"] is None else Version.of(event.body["version"])
            self._ready = event.body["ready"]
            self._owner.on_installed()

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        self._heard_at = asyncio.get_running_loop().time()

    def on_link_writable(self, link: Link, stripe: Stripe) -> None: ...

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        if link is self._link:
            if error is not None:
                self._error = f"lead of {self.name}: {error}"
            if self._lost_at is None:
                self._lost_at = asyncio.get_running_loop().time()
                self._orders += 1
            logger.warning("engine %s: its lead is out of reach%s", self.name, f": {error}" if error else "")
            self._news.ring()
            self._owner.on_installed()
