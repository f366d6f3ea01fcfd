"""The installers' view of a shadow through a quantiser: the engines of a peer take the quantised state of each version.

Promise: while an installer holds the shadow still, its quantised copy is at the same version. A version that cannot be
quantised reaches no engine, and the error names the tensor. Nothing more is received for it: the copy is computed from
the version that the hub has signed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from p2pcast.quantised.quantisation_kinds import kind_named
from p2pcast.quantised.quantised_layout import QuantisedLayout
from p2pcast.relay.holding import ArtifactHolder
from rollout_node.shadow.shadow_state import HeldShadow, ShadowState
from rollout_node.shadow.version_digests import VersionDigests

FOLDER = "quantised"
"""Of the copy, below the folder of the shadow."""


class QuantisedReader(HeldShadow):
    """``HeldShadow`` of the quantised copy. ``kind``: ``p2pcast.quantised.quantisation_kinds``."""

    def __init__(self, state: ShadowState, node: ArtifactHolder, folder: Path, kind: str) -> None:
        super().__init__(state, node)
        self._folder, self._kind = folder / FOLDER, kind_named(kind)
        self._copy: Any = None
        """``QuantisedShadow``, whose module needs torch."""
        self._made: QuantisedLayout | None = None
        self._following = asyncio.Lock()
        self._doubtful = False

    def held_still(self) -> contextlib.AbstractAsyncContextManager[tuple[Version, Path] | None]:
        """As ``HeldShadow.held_still``. Raises IntegrityError where the version cannot be quantised."""
        return self._held_still()

    @contextlib.asynccontextmanager
    async def _held_still(self) -> AsyncIterator[tuple[Version, Path] | None]:
        async with super().held_still() as held:
            if held is None:
                yield None
                return
            async with self._following:
                if not self._is_sound() or self._copy.version != held[0]:
                    await self._move_to(held[0])
            yield held[0], self._copy.shadow.path

    def distrust(self) -> None:
        """An engine got wrong weights, or the shadow had corrupt cells: the copy is made anew."""
        self._doubtful = True

    def digests(self) -> VersionDigests:
        shadow, plain = self._quantised().shadow, self._existing()
        return VersionDigests(shadow.layout, shadow.digests, signed=plain.state_digest)

    def layout_document(self) -> bytes:
        """As ``HeldShadow.layout_document``. An engine asks for it before the first copy: an installer starts while
        the shadow may move. Raises IntegrityError where nothing can be quantised.
        """
        return self._form().layout.document

    def patches(self, base: Version | None, to: Version) -> list[Path] | Path:
        copy = self._quantised()
        if self.staged != to or copy.version != to:
            raise RetryableError(f"version {to} is not staged here")
        found: list[Path] | Path = copy.patches(base, to)
        return found

    def files(self, small: dict[str, bytes]) -> dict[str, bytes]:
        """The small files of a quantised folder."""
        return self._form().files(small)

    def close(self) -> None:
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def _form(self) -> QuantisedLayout:
        """Of the present shadow, whether or not a copy was made."""
        plain = self._existing().layout
        if self._made is None or self._made.plain is not plain:
            self._made = QuantisedLayout(plain, self._kind)
        return self._made

    def _quantised(self) -> Any:
        if self._copy is None:
            raise RetryableError(f"this peer has quantised no version as {self._kind.name} yet")
        return self._copy

    def _is_sound(self) -> bool:
        """Whether the copy is one of the present shadow. Another shadow may hold another state under the same version,
        and another layout.
        """
        return self._copy is not None and not self._doubtful and self._copy.plain is self._existing()

    async def _move_to(self, version: Version) -> None:
        """Blocks a thread for a pass over the changed rows; at first and after a doubt, over the whole state."""
        sound = self._is_sound()
        # Asked here: the table of holdings changes in this thread alone.
        at = self._copy.version if sound else None
        changes = None if at is None else super().patches(at, version)
        # Before the work: a doubt that comes meanwhile is about its result.
        self._doubtful = False
        try:
            await _to_its_end(lambda: self._follow(None if isinstance(changes, Path) else changes, anew=not sound))
        except BaseException:
            self._doubtful |= not sound
            raise

    def _follow(self, changes: list[Path] | None, *, anew: bool) -> None:
        from p2pcast.quantised.quantised_shadow import QuantisedShadow

        if anew:
            # A copy in doubt shows that its memory failed.
            self.close()
            self._copy = QuantisedShadow(self._existing(), self._folder, self._kind)
        self._copy.follow(changes)


async def _to_its_end(work: Callable[[], None]) -> None:
    """In a thread, to its end even when the caller is cancelled: the shadow must not move under it."""
    done = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait([done])
        raise
