"""The installers' view of a shadow through a quantiser: the peer's engines get the quantised state of each version.

Guarantee: while an installer holds the shadow still, the quantised copy is at the same version. A version that cannot
be quantised reaches no engine, and the error names the tensor. Nothing more has to be received: the copy is computed
from the version that the hub has signed.
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
"""The copy's folder, inside the shadow's."""


class QuantisedReader(HeldShadow):
    """``HeldShadow`` for the quantised copy. ``kind``: see ``p2pcast.quantised.quantisation_kinds``."""

    def __init__(self, state: ShadowState, node: ArtifactHolder, folder: Path, kind: str) -> None:
        super().__init__(state, node)
        self._folder, self._kind = folder / FOLDER, kind_named(kind)
        self._copy: Any = None
        """A ``QuantisedShadow``, whose module imports torch; None before the first copy."""
        self._made: QuantisedLayout | None = None
        self._following = asyncio.Lock()
        self._doubtful = False

    def held_still(self) -> contextlib.AbstractAsyncContextManager[tuple[Version, Path] | None]:
        """Like ``HeldShadow.held_still``. Raises IntegrityError if the version cannot be quantised."""
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
        """Rebuild the copy, because an engine got wrong weights or the shadow had corrupt cells."""
        self._doubtful = True

    def digests(self) -> VersionDigests:
        shadow, plain = self._quantised().shadow, self._existing()
        return VersionDigests(shadow.layout, shadow.digests, signed=plain.state_digest)

    def layout_document(self) -> bytes:
        """Like ``HeldShadow.layout_document``. An engine asks for it before the first copy, because an installer starts
        while the shadow may move. Raises IntegrityError if no tensor can be quantised.
        """
        return self._form().layout.document

    def patches(self, base: Version | None, to: Version) -> list[Path] | Path:
        copy = self._quantised()
        if self.staged != to or copy.version != to:
            raise RetryableError(f"version {to} is not staged here")
        found: list[Path] | Path = copy.patches(base, to)
        return found

    def files(self, small: dict[str, bytes]) -> dict[str, bytes]:
        """The small files of the quantised folder."""
        return self._form().files(small)

    def close(self) -> None:
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def _form(self) -> QuantisedLayout:
        """The quantised layout of the current shadow, whether or not a copy has been made."""
        plain = self._existing().layout
        if self._made is None or self._made.plain is not plain:
            self._made = QuantisedLayout(plain, self._kind)
        return self._made

    def _quantised(self) -> Any:
        if self._copy is None:
            raise RetryableError(f"this peer has quantised no version as {self._kind.name} yet")
        return self._copy

    def _is_sound(self) -> bool:
        """Whether the copy was made from the current shadow. A different shadow may have a different state under the
        same version, and a different layout.
        """
        return self._copy is not None and not self._doubtful and self._copy.plain is self._existing()

    async def _move_to(self, version: Version) -> None:
        """Keep a thread busy for a pass over the changed rows, or over the whole state to rebuild the copy."""
        sound = self._is_sound()
        # Ask here, because the table of holdings changes only in this thread.
        at = self._copy.version if sound else None
        changes = None if at is None else super().patches(at, version)
        # Set before the work: a doubt raised meanwhile concerns its result.
        self._doubtful = False
        try:
            await _to_its_end(lambda: self._follow(None if isinstance(changes, Path) else changes, anew=not sound))
        except BaseException:
            self._doubtful |= not sound
            raise

    def _follow(self, changes: list[Path] | None, *, anew: bool) -> None:
        from p2pcast.quantised.quantised_shadow import QuantisedShadow

        if anew:
            # A copy in doubt means that its memory may be faulty.
            self.close()
            self._copy = QuantisedShadow(self._existing(), self._folder, self._kind)
        self._copy.follow(changes)


async def _to_its_end(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread and wait for it even if the caller is cancelled: the shadow must not move meanwhile."""
    done = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait([done])
        raise
