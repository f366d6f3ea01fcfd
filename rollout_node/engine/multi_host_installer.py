"""The lead's installer for an engine on several hosts. It keeps the members at the same version.

Guarantee: the inner installer reads the shadow only while every member holds its own shadow still at the same version.
If a member with required ranks is gone, an engine that serves a good version is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import P2PCastError
from p2pcast.ground.version import Version
from rollout_node.engine.multi_host_leader import MultiHostLeader
from rollout_node.installers.installer import Audit, CommitReport, Installer


class MultiHostInstaller:
    def __init__(self, inner: Installer, lead: MultiHostLeader) -> None:
        self.name = inner.name
        self.abilities = replace(inner.abilities, pulse=None)  # processes on other hosts send no signs of life here
        self._inner, self._lead = inner, lead

    @property
    def committed(self) -> Version | None:
        return self._inner.committed

    @property
    def ready(self) -> bool:
        return self._inner.ready

    @property
    def commit_needs_shadow(self) -> bool:
        return self._inner.commit_needs_shadow

    async def start(self) -> None:
        self._lead.loosen()
        await self._inner.start()
        self._lead.begin()

    async def check(self) -> None:
        try:
            await self._inner.check()
        except P2PCastError:
            self._lead.loosen()
            raise

    async def stage(self, version: Version, shadow: Path) -> None:
        if self._inner.ready:
            self._lead.require()
        else:
            self._lead.loosen()
        await self._lead.meet(version)
        await self._inner.stage(version, shadow)

    async def commit(self, version: Version) -> CommitReport:
        if self._inner.commit_needs_shadow:
            await self._lead.meet(version)
        return await self._inner.commit(version)

    async def audit(self, layout: Layout, digests: Mapping[int, int]) -> Audit:
        return await self._inner.audit(layout, digests)

    async def close(self) -> None:
        await self._inner.close()
