"""``POST /lease`` and ``POST /release``: a program on this machine reads a whole version from the shadow.

Guarantees: the shadow stays at the leased version until the lease is released or expires, and the release reports which
of the two came first. A new lease lasts FIRST_S and has to be renewed, so a caller that dies before it gets the answer
blocks nothing for longer. Leases wait for a version that is about to be staged, so that many readers do not keep the
shadow at an old one. Relaying continues meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from p2pcast.daemon.command_body import check_keys
from p2pcast.ground.errors import RefusedError, RetryableError, UsageError
from p2pcast.ground.version import Version
from rollout_node.shadow.shadow_state import ShadowState

logger = logging.getLogger("p2pcast.peer")

Document = dict[str, Any]

FIRST_S = 10.0
"""Duration of a new lease, in seconds."""
MAX_LEASE_S = 3600.0
"""Longest time in seconds for which a lease can be renewed at once."""
WAIT_S = 60.0
MAX_WAIT_S = 3600.0
MAX_LEASES = 16


class Spawner(Protocol):
    def later(self, work: Coroutine[Any, Any, None], name: str) -> object: ...


@dataclass(slots=True)
class _Lease:
    held: asyncio.Future[tuple[Version, Path] | None]
    """The version and the shadow's file; None if no version is staged."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    """Ends the lease; it runs from the moment the shadow is held still."""

    @property
    def left_s(self) -> float:
        ends_s = self.limit.when()
        return 0.0 if ends_s is None else max(0.0, ends_s - asyncio.get_running_loop().time())

    def prolong(self, hold_s: float) -> None:
        self.limit.reschedule(asyncio.get_running_loop().time() + hold_s)


class ShadowLeases:
    """Grants leases. ``spawner`` runs the task that holds the shadow still for a lease."""

    def __init__(self, shadow: ShadowState, spawner: Spawner) -> None:
        self._shadow = shadow
        self._spawner = spawner
        self._leases: dict[str, _Lease] = {}

    @property
    def rows(self) -> list[Document]:
        """The current leases, for /status."""
        return [
            {"id": ident[:8], "version": str(held[0]), "left_s": round(lease.left_s, 1)}
            for ident, lease in self._leases.items()
            if (held := _held(lease)) is not None
        ]

    async def lease(self, body: Document) -> Document:
        """Handle ``{"wait_s": 60}``, which takes a new lease of FIRST_S, or ``{"lease": id, "hold_s": 120}``, which
        renews a lease for that time from now.

        Raises UsageError, RefusedError (no version is staged, or the lease has ended) and RetryableError (MAX_LEASES
        are in force, or the shadow did not become free within ``wait_s``).
        """
        if "lease" in body:
            return self._prolonged(body)
        check_keys(body, "wait_s")
        wait_s = _seconds(body, "wait_s", WAIT_S, MAX_WAIT_S)
        if len(self._leases) >= MAX_LEASES:
            raise RetryableError(f"{MAX_LEASES} leases of the shadow are in force; try again once one has ended")
        ident, lease = secrets.token_hex(16), _Lease(asyncio.get_running_loop().create_future())
        self._leases[ident] = lease
        self._spawner.later(self._hold(ident, lease), "shadow lease")
        try:
            async with asyncio.timeout(wait_s):
                held = await asyncio.shield(lease.held)
        except (TimeoutError, asyncio.CancelledError) as error:
            lease.released.set()
            if isinstance(error, TimeoutError):
                raise RetryableError(
                    f"a version was being staged for {wait_s:g} s; try again, or wait longer"
                ) from None
            raise
        if held is None:
            raise RefusedError("no version is staged here yet")
        version, path = held
        return {"lease": ident, "version": str(version), "path": str(path.absolute()), "left_s": lease.left_s}

    def _prolonged(self, body: Document) -> Document:
        check_keys(body, "lease", "hold_s")
        hold_s = _seconds(body, "hold_s", FIRST_S, MAX_LEASE_S)
        lease = self._leases.get(_ident(body))
        if lease is None or (held := _held(lease)) is None:
            raise RefusedError("this lease has ended")
        lease.prolong(hold_s)
        return {
            "lease": body["lease"],
            "version": str(held[0]),
            "path": str(held[1].absolute()),
            "left_s": lease.left_s,
        }

    async def release(self, body: Document) -> Document:
        """Release ``{"lease": id}``. Returns ``{"held": whether the lease was still in force}``. Raises UsageError."""
        check_keys(body, "lease")
        lease = self._leases.pop(_ident(body), None)
        if lease is not None:
            lease.released.set()
        return {"held": lease is not None}

    def end(self) -> None:
        """End all leases, so that none delays the daemon's shutdown."""
        for lease in self._leases.values():
            lease.released.set()
            if not lease.held.done():
                lease.held.set_exception(RetryableError("the peer ends"))
                lease.held.exception()  # seen: the caller may be gone
        self._leases.clear()

    async def _hold(self, ident: str, lease: _Lease) -> None:
        try:
            async with self._shadow.held_still(gives_way=True) as held:
                if not lease.held.done():
                    lease.held.set_result(held)
                if held is not None and not lease.released.is_set():
                    logger.info("the shadow stays at version %s for lease %s", held[0], ident[:8])
                    await self._until_ended(ident, lease)
        finally:
            self._leases.pop(ident, None)
            lease.held.cancel()

    async def _until_ended(self, ident: str, lease: _Lease) -> None:
        try:
            async with lease.limit:
                lease.prolong(FIRST_S)
                await lease.released.wait()
        except TimeoutError:
            # Remove it before the shadow may move: any release from now on is too late.
            self._leases.pop(ident, None)
            logger.warning("lease %s of the shadow has ended by its time limit", ident[:8])


def _held(lease: _Lease) -> tuple[Version, Path] | None:
    """The version and file of a lease, if it is in force."""
    done = lease.held.done() and not lease.held.cancelled() and lease.held.exception() is None
    return lease.held.result() if done and not lease.limit.expired() else None


def _ident(body: Document) -> str:
    if not isinstance(ident := body.get("lease"), str):
        raise UsageError('name the lease: {"lease": ID}')
    return ident


def _seconds(body: Document, name: str, otherwise: float, most: float) -> float:
    given = body.get(name, otherwise)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= most:
        raise UsageError(f"{name}: {str(given)[:40]!r} is not a number of seconds above 0, up to {most:g}")
    return float(given)
