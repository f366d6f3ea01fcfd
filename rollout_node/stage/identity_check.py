"""Compares the versions that this peer holds with the run's versions of the same numbers, by their manifests' hashes.

Promise: a stored or staged version that the run knows by another hash is let go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from p2pcast.ground.version import Version
from p2pcast.store.artifact_store import ArtifactStore, Stored
from rollout_node.shadow.shadow_state import ShadowWriter
from rollout_node.sync.artifact_removal import ArtifactRemoval

logger = logging.getLogger("p2pcast.peer")


class IdentityCheck:
    """``replan`` wakes the updater, which calls ``settle``. ``on_left`` is called with the version of a shadow that
    belongs to no version of the run, and the reason.
    """

    def __init__(
        self,
        writer: ShadowWriter,
        store: ArtifactStore,
        removal: ArtifactRemoval,
        replan: Callable[[], None],
        on_left: Callable[[Version, str], None],
    ) -> None:
        self._writer = writer
        self._store = store
        self._removal = removal
        self._replan = replan
        self._on_left = on_left
        self._identities: Mapping[Version, bytes] = {}
        """The hashes of the run's versions, as the hub said."""

    def contradict(self, identities: Mapping[Version, bytes]) -> None:
        """The hub names the hashes of the run's versions. Versions that this peer holds under the same numbers with
        other hashes are let go.
        """
        self._identities = identities
        if self._contradicted_artifacts() or self._is_off_the_chain():
            self._replan()

    def identity_of(self, version: Version) -> bytes | None:
        """The hash of a version's manifest, in the store or as the hub said."""
        return self._store.identity(version) or self._identities.get(version)

    async def settle(self) -> None:
        """Let go of all that the hub has contradicted."""
        for stored in self._contradicted_artifacts():
            logger.error(
                "version %s as stored here is not the run's version of this number: the stored copy is discarded",
                stored.version,
            )
            await self._removal.discard(stored.id, contradicted=True)
            self._replan()
        staged = self._writer.staged
        if self._is_off_the_chain() and staged is not None:
            await self._leave_chain(staged)

    async def follows(self, base_hash: bytes | None, version: Version) -> bool:
        """Whether ``version``, whose base has this hash, begins at the staged version. Otherwise the shadow is given
        up. An unknown hash on either side counts as a match.
        """
        if base_hash is None or self._writer.identity in (None, base_hash):
            return True
        await self._leave_chain(version)
        return False

    def _contradicted_artifacts(self) -> list[Stored]:
        """Stored artifacts of versions that the run knows by other hashes."""
        stored = self._store.artifacts.values()
        return [
            s
            for s in stored
            if (own := s.manifest.identity) is not None and self._identities.get(s.version, own) != own
        ]

    def _is_off_the_chain(self) -> bool:
        """Whether the run knows the staged version by another hash: this peer's state is not the run's."""
        staged, own = self._writer.staged, self._writer.identity
        return staged is not None and own is not None and self._identities.get(staged, own) != own

    async def _leave_chain(self, version: Version) -> None:
        """The state here belongs to no version of the run."""
        why = f"the version {version} held here is not the run's version {version}; the state is fetched anew"
        self._on_left(version, why)
        await self._writer.drop()
