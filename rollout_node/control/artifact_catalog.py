"""The run's artifacts, as the hub lists them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from p2pcast.ground.version import Version
from p2pcast.relay.artifact_path import Edge
from p2pcast.wire import messages


@dataclass(frozen=True, slots=True)
class Entry:
    kind: str
    base: Version | None
    version: Version
    size: int
    layout: bytes
    state: int
    sealed: bool
    sealed_at: float
    """When this peer learnt that the artifact is sealed, by the loop's clock."""
    identity: bytes | None = None
    """The version's hash; None for artifacts of release 0.1."""
    durable: bytes | None = None
    """The hub's signed durable record; None until the hub has stored the version."""


class ArtifactCatalog:
    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._edges: dict[bytes, Edge] | None = None
        """The entries as edges; None after a change."""
        self.complete = asyncio.Event()
        """Set by the first CATALOG, or by the first listing of a mirror."""
        self.listed = False
        """Whether the hub has listed its artifacts to this process."""
        self._anew = True

    def begin(self) -> None:
        """Called for a new connection to the hub: the next CATALOG is complete, and replaces what is known."""
        self._anew = True

    def update(self, body: messages.Catalog, now: float) -> bool:
        """Apply a CATALOG, and return whether it was the complete list."""
        anew, self._anew = self._anew, False
        if anew:
            listed = {artifact for artifact, *_ in body.artifacts}
            self._entries = {a: e for a, e in self._entries.items() if a in listed}
        for artifact, kind, base, version, size, layout, state, sealed, identity, durable in body.artifacts:
            old = self._entries.get(artifact)
            since = old.sealed_at if old is not None and old.sealed else now
            self._entries[artifact] = Entry(
                kind,
                base,
                version,
                size,
                layout,
                state,
                sealed,
                since,
                identity,
                durable or (None if old is None else old.durable),
            )
        self._edges = None
        for artifact in body.dropped:
            self._entries.pop(artifact, None)
        self.complete.set()
        self.listed = True
        return anew

    def get(self, artifact: bytes) -> Entry | None:
        return self._entries.get(artifact)

    def is_sealed(self, artifact: bytes) -> bool:
        """Whether the hub has sealed the artifact."""
        entry = self._entries.get(artifact)
        return entry is not None and entry.sealed

    def edges(self) -> dict[bytes, Edge]:
        """Sealed artifacts as edges from version to version. Do not change the result."""
        if self._edges is None:
            self._edges = {a: Edge(a, e.base, e.version, e.size) for a, e in self._entries.items() if e.sealed}
        return self._edges

    def states(self) -> dict[Version, int]:
        return {e.version: e.state for e in self._entries.values() if e.sealed}

    def identities(self) -> dict[Version, bytes]:
        """The hashes of the sealed versions that have one."""
        return {e.version: e.identity for e in self._entries.values() if e.sealed and e.identity is not None}

    def whole(self) -> list[tuple[Version, tuple[bytes, int]]]:
        """Every version with its layout and the digest of its state."""
        return [(e.version, (e.layout, e.state)) for e in self._entries.values() if e.sealed]
