"""Compares the versions that this peer holds with the run's versions of the same numbers, by their manifests' hashes.

Guarantee: a stored or staged version whose hash differs from the run's is discarded.
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
    """``replan`` wakes the updater, which calls ``settle``. ``on_left`` is called with the version of a shadow whose
    state is none of the run's, and the reason.
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
        """The hashes of the run's versions, as the hub sent them."""

    def contradict(self, identities: Mapping[Version, bytes]) -> None:
        """Accept the hub's hashes of the run's versions. Versions held here with the same numbers but different hashes
        are discarded.
        """
        self._identities = identities
        if self._contradicted_artifacts() or self._is_off_the_chain():
            self._replan()

    def identity_of(self, version: Version) -> bytes | None:
        """The hash of a version's manifest, from the store or the hub."""
        return self._store.identity(version) or self._identities.get(version)

    async def settle(self) -> None:
        """Discard everything that the hub has contradicted."""
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
        """Whether ``version``, whose base has this hash, builds on the staged version. If not, discard the shadow. If
        either hash is unknown, they count as equal.
        """
        if base_hash is None or self._writer.identity in (None, base_hash):
            return True
        await self._leave_chain(version)
        return False

    def _contradicted_artifacts(self) -> list[Stored]:
        """Stored artifacts whose version's hash differs from the run's."""
        stored = self._store.artifacts.values()
        return [
            s
            for s in stored
            if (own := s.manifest.identity) is not None and self._identities.get(s.version, own) != own
        ]

    def _is_off_the_chain(self) -> bool:
        """Whether the run has a different hash for the staged version, so that this peer's state is not the run's."""
        staged, own = self._writer.staged, self._writer.identity
        return staged is not None and own is not None and self._identities.get(staged, own) != own

    async def _leave_chain(self, version: Version) -> None:
        """Discard the state here, which is no version of the run."""
        why = f"the version {version} held here is not the run's version {version}; the state is fetched anew"
        self._on_left(version, why)
        await self._writer.drop()
