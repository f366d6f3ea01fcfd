"""``POST /lease`` and ``POST /release``: a program on this machine reads a whole version from the shadow.

Promises: the shadow stays at the leased version until the lease is released or its time is up, and the release tells
which of the two came first. Relaying goes on meanwhile; later versions are staged afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from p2pcast.errors import RefusedError, RetryableError, UsageError
from p2pcast.version import Version
from rollout_node.stage.shadow_state import ShadowState

logger = logging.getLogger("p2pcast.peer")

Document = dict[str, Any]

LEASE_S = 60.0
MAX_LEASE_S = 3600.0
MAX_LEASES = 16


class Spawner(Protocol):
    def later(self, work: Coroutine[Any, Any, None], name: str) -> object: ...


@dataclass(slots=True)
class _Lease:
    hold_s: float
    held: asyncio.Future[tuple[Version, Path] | None]
    """The version and the shadow's file; None where no version is staged."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    ends_s: float = math.inf
    """By the loop's clock; hold_s after the shadow is held still."""


class ShadowLeases:
    """``spawner`` runs the task that holds the shadow still for a lease."""

    def __init__(self, shadow: ShadowState, spawner: Spawner) -> None:
        self._shadow = shadow
        self._spawner = spawner
        self._leases: dict[str, _Lease] = {}

    @property
    def rows(self) -> list[Document]:
        """For /status: the leases in force."""
        now = asyncio.get_running_loop().time()
        return [
            {"id": ident[:8], "version": str(held[0]), "left_s": round(max(0.0, lease.ends_s - now), 1)}
            for ident, lease in self._leases.items()
            if lease.held.done() and not lease.held.cancelled() and (held := lease.held.result()) is not None
        ]

    async def lease(self, body: Document) -> Document:
        """``{"hold_s": 60}``. Raises UsageError, RefusedError (no version is staged) and RetryableError (MAX_LEASES are
        in force).
        """
        hold_s = _seconds(body.get("hold_s", LEASE_S))
        if len(self._leases) >= MAX_LEASES:
            raise RetryableError(f"{MAX_LEASES} leases of the shadow are in force; try again once one has ended")
        loop = asyncio.get_running_loop()
        ident = secrets.token_hex(16)
        lease = self._leases[ident] = _Lease(hold_s, loop.create_future())
        self._spawner.later(self._hold(ident, lease), "shadow lease")
        try:
            held = await asyncio.shield(lease.held)
        except asyncio.CancelledError:
            lease.released.set()  # the caller has disconnected
            raise
        if held is None:
            raise RefusedError("no version is staged here yet")
        version, path = held
        return {
            "lease": ident,
            "version": str(version),
            "path": str(path),
            "left_s": max(0.0, lease.ends_s - loop.time()),
        }

    async def release(self, body: Document) -> Document:
        """``{"lease": id}`` → ``{"held": whether the lease was in force until now}``. Raises UsageError."""
        ident = body.get("lease")
        if not isinstance(ident, str):
            raise UsageError('name the lease: {"lease": ID}')
        lease = self._leases.pop(ident, None)
        if lease is not None:
            lease.released.set()
        return {"held": lease is not None}

    async def _hold(self, ident: str, lease: _Lease) -> None:
        try:
            async with self._shadow.held_still() as held:
                if held is not None:
                    logger.info("the shadow stays at version %s for lease %s", held[0], ident[:8])
                    lease.ends_s = asyncio.get_running_loop().time() + lease.hold_s
                lease.held.set_result(held)
                if held is not None:
                    await self._until_ended(ident, lease)
        finally:
            self._leases.pop(ident, None)
            lease.held.cancel()

    async def _until_ended(self, ident: str, lease: _Lease) -> None:
        try:
            async with asyncio.timeout_at(lease.ends_s):
                await lease.released.wait()
        except TimeoutError:
            # Before the shadow may move: a release that comes from now on is too late.
            self._leases.pop(ident, None)
            logger.warning("lease %s of the shadow has ended by its time limit", ident[:8])


def _seconds(given: Any) -> float:
    if (
        isinstance(given, bool)
        or not isinstance(given, int | float)
        or not math.isfinite(given)
        or not 0 < given <= MAX_LEASE_S
    ):
        raise UsageError(f"hold_s: {str(given)[:40]!r} is not a number of seconds above 0, up to {MAX_LEASE_S:g}")
    return float(given)
