"""An installer that fails, hangs or is away on a test's command, and the owner of the shadow that it reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import numpy as np

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import LocalError, RetryableError
from p2pcast.ground.version import Version
from rollout_node.engine.runner import Runner
from rollout_node.installers.installer import Abilities, Audit, CommitReport
from rollout_node.shadow.version_digests import VersionDigests

ONE, TWO, THREE = (Version(0, n) for n in (1, 2, 3))
NOWHERE = Path("shadow")
LAYOUT = Layout([Tensor("a", "U8", (3,))])


class Target:
    """An installer in memory that keeps an installer's rules, and fails on command."""

    def __init__(self, name: str = "target") -> None:
        self.name, self.abilities = name, Abilities()
        self.calls: list[tuple[str, Version | None]] = []
        self.faults: list[tuple[str, BaseException]] = []
        """(call, error): the next such call fails."""
        self.hang: str | None = None
        self.holding: Version | None = None
        """The version really held; ``committed`` is the recorded version."""
        self.needs_shadow = False
        self.away = False
        self.unready_while_committing = False
        self.switches_while_staging = False
        """As an engine that can't hold two whole states."""
        self.on_call: Callable[[str], None] = lambda what: None
        self.released = asyncio.Event()
        self.dense = False
        self.wrong: list[str] = []
        """Tensors that the next audit finds wrong."""
        self.committed: Version | None = None
        self.ready = False
        self._staged: Version | None = None

    async def start(self) -> None:
        await self._call("start", None)

    @property
    def commit_needs_shadow(self) -> bool:
        return self.needs_shadow

    async def check(self) -> None:
        await self._call("check", None)
        if self.committed is not None and self.holding != self.committed:
            self.committed, self.ready = None, False

    async def audit(self, layout: Layout, digests: Mapping[int, int]) -> Audit:
        assert self.committed is not None
        await self._call("audit", self.committed)
        assert (layout, digests) == (LAYOUT, {0: self.committed.step})
        version, wrong, self.wrong = self.committed, self.wrong, []
        if wrong:
            self.committed, self.ready = None, False
        return Audit(version, wrong, [])

    async def stage(self, version: Version, shadow: Path) -> None:
        assert shadow == NOWHERE
        self._staged = None
        await self._call("stage", version)
        self._staged = version
        if self.switches_while_staging:
            self.committed, self.holding, self.ready = version, version, False

    async def commit(self, version: Version) -> CommitReport:
        if version != self._staged:
            self.ready = False
            raise LocalError(f"{version} is not staged")
        await self._call("commit", version)
        self._staged, self.committed, self.holding, self.ready = None, version, version, True
        return CommitReport(0.0, dense=self.dense)

    @property
    def done(self) -> list[tuple[str, Version | None]]:
        """Without the looks that it got meanwhile."""
        return [c for c in self.calls if c[0] != "check"]

    async def close(self) -> None:
        self.calls.append(("close", None))

    async def _call(self, what: str, version: Version | None) -> None:
        self.calls.append((what, version))
        if self.away:
            raise RetryableError("no answer")
        if what == "commit" and self.unready_while_committing:
            self.ready = False
            await asyncio.sleep(0)
        self.on_call(what)
        if self.hang == what:
            await self.released.wait()
        fault = next((f for f in self.faults if f[0] == what), None)
        if fault is not None:
            self.faults.remove(fault)
            self.ready = False
            raise fault[1]


class Owner:
    """A shadow that moves on a test's command."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self.target: Version | None = None
        self.manual = False
        self.readers = 0
        self.installed = 0
        self.doubts = 0
        self.far_back: set[Version] = set()
        self.runners: list[Runner] = []

    @contextlib.asynccontextmanager
    async def held_still(self) -> AsyncIterator[tuple[Version, Path] | None]:
        self.readers += 1
        try:
            yield None if self.version is None else (self.version, NOWHERE)
        finally:
            self.readers -= 1

    def digests(self) -> VersionDigests:
        assert self.readers
        assert self.version is not None
        return VersionDigests(LAYOUT, np.array([self.version.step], np.uint64))

    def is_dense(self, base: Version | None, to: Version) -> bool:
        return base is None or base in self.far_back

    def may_commit(self, version: Version) -> bool:
        return not self.manual or version == self.target

    def on_changed(self) -> None:
        self.installed += 1

    def on_wrong_weights(self) -> None:
        self.doubts += 1

    def move_on(self, target: Target) -> None:
        """Let a hanging call continue."""
        target.released.set()

    def move(self, version: Version) -> None:
        assert not self.readers, "an installer reads the shadow"
        self.version = version
        for each in self.runners:
            each.wake()
