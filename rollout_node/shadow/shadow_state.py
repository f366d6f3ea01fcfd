"""The shadow at its current version, and the lock between its readers and its only writer.

Guarantee: the shadow moves only while no reader holds it still.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from p2pcast.relay.holding import ArtifactHolder
from p2pcast.state.shadow import Shadow
from rollout_node.shadow.version_digests import VersionDigests

logger = logging.getLogger("p2pcast.peer")


def log_size(layout: Layout, folder: Path) -> None:
    """Log how much memory a new shadow takes."""
    logger.info(
        "the state takes %.2f GB of memory in %s, and each version's changes beside it", layout.nbytes / 1e9, folder
    )


class ShadowState:
    """Only ``ShadowWriter`` sets ``shadow`` and ``staged``."""

    def __init__(self) -> None:
        self.shadow: Shadow | None = None
        self.staged: Version | None = None
        """The shadow's version; None until the shadow is known to be correct."""
        self._lock = asyncio.Condition()
        self._readers = 0
        self._movers: list[Callable[[Version | None], bool]] = []
        """``may_leave`` of each waiting writer."""

    def close(self) -> None:
        if self.shadow is not None:
            self.shadow.close()

    @contextlib.asynccontextmanager
    async def held_still(self, *, gives_way: bool = False) -> AsyncIterator[tuple[Version, Path] | None]:
        """Context manager that keeps the shadow at its version; yields None if there is none. ``gives_way``: let a
        writer that is only waiting for readers go first.
        """
        async with self._lock:
            await self._lock.wait_for(
                lambda: not gives_way or not any(may_leave(self.staged) for may_leave in self._movers)
            )
            self._readers += 1
        try:
            shadow = self.shadow
            yield None if shadow is None or self.staged is None else (self.staged, shadow.path)
        finally:
            async with self._lock:
                self._readers -= 1
                self._lock.notify_all()

    @contextlib.asynccontextmanager
    async def moving(self, may_leave: Callable[[Version | None], bool]) -> AsyncIterator[None]:
        """Context manager for the writer. Waits for ``may_leave`` and the last reader, then excludes readers."""
        async with self._lock:
            self._movers.append(may_leave)
            try:
                await self._lock.wait_for(lambda: self._readers == 0 and may_leave(self.staged))
                yield
            finally:
                self._movers.remove(may_leave)
                self._lock.notify_all()

    async def recheck(self) -> None:
        """Called when the result of ``may_leave`` may have changed, so that ``moving`` calls it again."""
        async with self._lock:
            self._lock.notify_all()

    async def wait(self, timeout_s: float) -> None:
        """Wait until a reader releases the shadow, or ``timeout_s`` have passed."""
        async with self._lock:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._lock.wait()


class ShadowWriter:
    """The only writer of the shadow's state. ``may_leave``: whether the shadow may move on from a version."""

    def __init__(self, state: ShadowState, may_leave: Callable[[Version | None], bool]) -> None:
        self.identity: bytes | None = None
        """The hash of the staged version, if known."""
        self._state = state
        self._may_leave = may_leave

    @property
    def shadow(self) -> Shadow | None:
        return self._state.shadow

    @property
    def staged(self) -> Version | None:
        return self._state.staged

    def moving(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Context manager that excludes readers while the shadow changes."""
        return self._state.moving(self._may_leave)

    def open(self, shadow: Shadow | None) -> None:
        """Use this shadow. Call ``stage`` once everything belonging to its version is here."""
        self._state.shadow = shadow

    def stage(self, version: Version, identity: bytes | None) -> None:
        """Declare that the shadow is at ``version`` and correct."""
        self._state.staged, self.identity = version, identity

    def close(self) -> None:
        """Close the shadow, which must have no readers, and forget its version."""
        self._state.close()
        self._state.shadow = self._state.staged = self.identity = None

    async def drop(self) -> None:
        """Discard the shadow; a whole state is then fetched."""
        async with self.moving():
            logger.error("the shadow is made anew")
            self.close()

    async def until_released(self, timeout_s: float) -> None:
        """Wait until a reader releases the shadow, or ``timeout_s`` have passed."""
        await self._state.wait(timeout_s)


class HeldShadow:
    """The installers' view of the shadow while they hold it still."""

    def __init__(self, state: ShadowState, node: ArtifactHolder) -> None:
        self._state = state
        self._node = node

    @property
    def staged(self) -> Version | None:
        return self._state.staged

    def held_still(self) -> contextlib.AbstractAsyncContextManager[tuple[Version, Path] | None]:
        """Context manager that keeps the shadow at its version; yields None if there is none."""
        return self._state.held_still()

    def digests(self) -> VersionDigests:
        """The digests of the version that is held still. Raises RetryableError."""
        shadow = self._existing()
        return VersionDigests(shadow.layout, shadow.digests)

    def layout_document(self) -> bytes:
        """The layout's document. Raises RetryableError."""
        return self._existing().layout.document

    def files(self, small: dict[str, bytes]) -> dict[str, bytes]:
        """Return a version's small files in the form for engines."""
        return small

    def is_dense(self, base: Version | None, to: Version) -> bool:
        """Whether an engine at ``base`` needs the whole state to get to ``to``. Raises RetryableError."""
        return isinstance(self.patches(base, to), Path)

    def patches(self, base: Version | None, to: Version) -> list[Path] | Path:
        """Return the patch files from ``base`` to ``to``, in order, or the shadow's file if no patches lead there.
        Raises RetryableError unless ``to`` is staged.
        """
        shadow = self._state.shadow
        if shadow is None or self._state.staged != to:
            raise RetryableError(f"version {to} is not staged here")
        chain: list[Path] = []
        at = to
        while base is not None and at != base:
            holdings = self._node.holdings.values()
            holding = next((h for h in holdings if h.open.version == at and h.open.base is not None), None)
            if holding is None or holding.open.base is None or at not in shadow.patches:
                return shadow.path
            chain.append(shadow.patch_path(at))
            at = holding.open.base
        return chain[::-1] if base is not None else shadow.path

    def _existing(self) -> Shadow:
        if self._state.shadow is None:
            raise RetryableError("this peer holds no version yet")
        return self._state.shadow
