"""How a starting peer obtains the run's public key: from the hub, from the mirror, or from its own state.

Guarantees:

- Only the key pinned by the token is used.
- A peer that already knows the key needs no hub.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from p2pcast.ground.backoff import REDIAL_MAX_S, REDIAL_MIN_S, Backoff
from p2pcast.ground.errors import P2PCastError, RetryableError, UntrustedError
from p2pcast.ground.private_random import uniform
from rollout_node.control.hub_session import HubSession
from rollout_node.control.saved_hub_state import SavedHubState
from rollout_node.control.welcome import HubWelcome

logger = logging.getLogger("p2pcast.peer")

WELCOME_S = 10.0
"""Seconds to wait for the hub's WELCOME after it has accepted the connection."""
START_S = 3.0
"""The same, including dialling, for a peer that can start without the hub, because its engines are waiting."""


@dataclass(frozen=True, slots=True)
class KnownRunKey:
    """The run's public key. ``resumed``: whether the key comes from the peer's state because the hub is unreachable.
    ``mirror_now``: whether the peer uses the mirror without waiting for the hub.
    """

    key: bytes
    resumed: bool = False
    mirror_now: bool = False


class RunKeySource:
    """``session``: None if the run has no hub. ``read_mirror``: None if the run has no mirror. ``join_timeout_s``: time
    limit for a first join, in seconds; 0 means no limit.
    """

    def __init__(
        self,
        saved: SavedHubState,
        session: HubSession | None,
        welcome: HubWelcome,
        read_mirror: Callable[[], Awaitable[bytes]] | None,
        join_timeout_s: float,
    ) -> None:
        self._saved = saved
        self._session = session
        self._welcome = welcome
        self._read_mirror = read_mirror
        self._join_timeout_s = join_timeout_s

    async def obtain(self) -> KnownRunKey:
        """Return the key, which is durable by then. Raises RetryableError, RefusedError, LocalError."""
        kept = self._saved.key
        if self._session is not None:
            found = await self._from_hub(self._session, kept)
        else:
            try:
                found = await self._from_mirror()
            except RetryableError as error:
                if kept is None:
                    raise
                found = self._resume(kept, error)
        await self._saved.keep_key(found.key)
        return found

    async def _from_mirror(self) -> KnownRunKey:
        assert self._read_mirror is not None, "a run without hub and mirror"
        return KnownRunKey(await self._read_mirror(), mirror_now=True)

    async def _from_hub(self, session: HubSession, kept: bytes | None) -> KnownRunKey:
        """Ask the hub, retrying for ``join_timeout_s`` unless the state has a key or the run has a mirror."""
        loop, backoff = asyncio.get_running_loop(), Backoff(REDIAL_MIN_S, REDIAL_MAX_S, uniform)
        timeout_s, began = self._join_timeout_s, loop.time()
        while True:
            try:
                return KnownRunKey(await self._ask(session, None if kept is None else START_S))
            except RetryableError as error:
                failed: P2PCastError = error
            except UntrustedError as error:
                if kept is None:
                    raise
                failed = error
            self._welcome.stop_expecting()
            if kept is not None:
                return self._resume(kept, failed)
            if self._read_mirror is not None:
                logger.warning("%s; going on with the mirror", failed)
                return await self._from_mirror()
            left_s = began + timeout_s - loop.time() if timeout_s else REDIAL_MAX_S
            if left_s <= 0:
                raise failed
            if not backoff.attempts:
                logger.warning("%s; trying %s", failed, f"for {timeout_s:g} s" if timeout_s else "until it answers")
            await asyncio.sleep(min(left_s, backoff.next_s()))

    async def _ask(self, session: HubSession, within_s: float | None) -> bytes:
        """Return the key sent by the hub. ``within_s``: limit for all steps together; None: each has its own limit."""
        expected = self._welcome.expect()
        try:
            async with asyncio.timeout(within_s):
                await session.connect()
                async with asyncio.timeout(WELCOME_S):
                    key = (await expected).key
        except TimeoutError:
            session.hang_up()
            raise RetryableError("the hub does not answer") from None
        self._welcome.check_key(key)
        return key

    def _resume(self, key: bytes, error: P2PCastError) -> KnownRunKey:
        logger.warning("%s; going on from this peer's state", error)
        return KnownRunKey(key, resumed=True, mirror_now=self._read_mirror is not None)
