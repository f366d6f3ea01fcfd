"""Weights that no peer names, for plays that are not handed in. Pure."""

from __future__ import annotations

from p2pcast.ground.version import Version
from p2pcast.rollouts.result import Span

NO_MANIFEST = bytes(32)


class UnnamedWeights:
    """Every label is version 0.0."""

    salt: str | None = None

    async def span(self, label: str) -> Span:
        return Span(Version(0, 0), 0, 0, NO_MANIFEST, "recompute")
