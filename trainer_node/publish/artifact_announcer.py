"""Informs all peers which artifacts the hub has (CATALOG)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from p2pcast.relay.holding import Holding
from p2pcast.wire import messages
from topology.pull_sources import PullSources


class ArtifactAnnouncer:
    """``is_sealed``: whether the artifact with this id is sealed in the hub's store."""

    def __init__(
        self, is_sealed: Callable[[bytes], bool], sources: PullSources, send_all: Callable[[messages.Record], None]
    ) -> None:
        self._is_sealed = is_sealed
        self._sources = sources
        self._send_all = send_all

    def catalog(self, holdings: Iterable[Holding]) -> messages.Catalog:
        """Return a CATALOG with these artifacts."""
        return messages.Catalog([self._entry(h) for h in holdings], dropped=[])

    def announce(self, holdings: Iterable[Holding]) -> None:
        """Announce artifacts that are new, or of which more is now known."""
        catalog = self.catalog(holdings)
        if catalog.artifacts:
            self._send_all(catalog)

    def withdraw(self, artifacts: list[bytes]) -> None:
        """Announce that the hub no longer has the artifacts with these ids."""
        for artifact in artifacts:
            self._sources.gone(artifact)
        self._send_all(messages.Catalog([], dropped=artifacts))

    def _entry(self, holding: Holding) -> messages.Listed:
        open_, manifest = holding.open, holding.assembly.manifest
        sealed = self._is_sealed(holding.id)
        size, state, identity = (0, 0, None) if manifest is None else (manifest.log, manifest.state, manifest.identity)
        durable = (holding.assembly.durable_signed or b"") if sealed else b""
        return messages.Listed(
            artifact=holding.id,
            kind=open_.kind,
            base=open_.base,
            version=open_.version,
            size=size,
            layout=open_.layout,
            state=state,
            sealed=sealed,
            identity=identity,
            durable=durable,
        )
