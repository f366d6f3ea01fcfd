"""An engine that spans several hosts, seen from its lead: its installer, with the members in step.

Promise: the inner installer reads the shadow only while every member stands still at the same version; and while a member is gone whose workers the engine
needs, an engine that serves a good version is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from p2pcast.codec.layout import Layout
from p2pcast.errors import P2PCastError
from p2pcast.version import Version
from rollout_node.companions import Lead
from rollout_node.installers.base import Audit, CommitReport, Installer


class LedInstaller:
    def __init__(self, inner: Installer, lead: Lead) -> None:
        self.name = inner.name
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
