"""A peer that stages versions, without bytes, engines and a network."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

from fake_holding import FakeCatalog, FakeHolding, FakeNode, FakeParentFailover
from recorder import Recorder, blocking

from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from p2pcast.relay.artifact_path import Edge
from rollout_node.shadow.shadow_state import ShadowState, ShadowWriter
from rollout_node.stage import engine_handover, saved_shadow, shadow_updater
from rollout_node.stage.engine_handover import EngineHandover
from rollout_node.stage.first_shadow import BaseShadow, FirstShadow, ShadowStart
from rollout_node.stage.identity_check import IdentityCheck
from rollout_node.stage.saved_shadow import SavedShadow
from rollout_node.stage.shadow_check import ShadowCheck
from rollout_node.stage.shadow_updater import RefusedVersions, ShadowUpdater
from rollout_node.stage.version_stager import VersionStager
from rollout_node.sync.mirror_catalog import NoMirror
from rollout_node.sync.version_path import VersionPlanner
from tests.support.until import until

V = [Version(0, n) for n in range(40)]
LAYOUT = SimpleNamespace(layout_id=b"layout", nbytes=1000)
FOLDER = Path("shadow")


class Shadow(Recorder):
    def __init__(self, version: int, digest: int | None = None) -> None:
        super().__init__(version=V[version], layout=LAYOUT, path=FOLDER, patches=[], corrupt=[], closed=False)
        self.state_digest = version if digest is None else digest

    def verify(self, workers):
        return list(self.corrupt)

    def close(self) -> None:
        self.closed = True


class Planner(VersionPlanner):
    """The run's versions have their step as digest. ``ahead``: holdings, the next one first."""

    def __init__(self, **parts) -> None:
        super().__init__(**parts)
        self.ahead: list[FakeHolding] = []

    def path(self) -> list[Edge]:
        staged = self.state.staged
        ahead = [h for h in self.ahead if staged is None or h.open.version > staged]
        return [Edge(h.id, h.open.base, h.open.version, 0) for h in ahead]

    def gap(self) -> None:
        return None

    def states(self):
        return {v: v.step for v in V}

    def whole(self):
        return [(V[0], (b"layout", 0))]


class Peer:
    """A peer's parts that stage, beside fakes of all others. ``kept``: the shadow of an earlier process, or the error
    of opening it.
    """

    def __init__(self, monkeypatch, *, kept=None, base=None, resumed=False, listed=True) -> None:
        monkeypatch.setattr(shadow_updater, "REFUSED_S", 1e-6)
        monkeypatch.setattr(shadow_updater, "REFUSED_MAX_S", 1e-5)
        monkeypatch.setattr(engine_handover, "SETTLE_S", 0.0)
        monkeypatch.setattr(saved_shadow, "layout_in", lambda folder: LAYOUT)
        monkeypatch.setattr(saved_shadow.Shadow, "open", lambda folder, layout: self._open(kept))
        self.state, self.orders = ShadowState(), SimpleNamespace(hold=None, target=None)
        self.catalog, self.node, self.store = FakeCatalog(), FakeNode(), Recorder(artifacts={})
        if listed:
            self.catalog.complete.set()
        self.planner = Planner(
            state=self.state, orders=self.orders, catalog=self.catalog, mirror=NoMirror(), node=self.node,
            parent_failover=FakeParentFailover(), store=self.store, saved=None, squashes=None,
        )  # fmt: skip
        self.path = self.planner.ahead
        self.repair, self.removal, self.engines = Repair(), ArtifactRemoval(), Recorder(oldest=None)
        self.engines.answers["settled"] = True
        self.timeline, self.activity = Recorder(), Activity()
        self.staging = Staging(self)
        self.remembered, self.regression = [], False
        self.refused, self.left = [], []
        self.writer = ShadowWriter(self.state, lambda version: True)
        self.check = ShadowCheck(self.writer, self.staging, self.repair, self.planner.replan)
        self.identities = IdentityCheck(
            self.writer, self.store, self.removal, self.planner.replan, lambda *why: self.left.append(why)
        )
        first = FirstShadow(
            SavedShadow(FOLDER, self.store, self.staging, self.check, base and base.layout),
            None if base is None else BaseShadow(base, FOLDER, self.node, self.store, self.staging),
            self.planner,
            self.catalog,
            self.activity,
            resumed=resumed,
        )
        self.updater = ShadowUpdater(
            start=ShadowStart(first, self.writer, self.identities, self.repair, self.planner),
            check=self.check,
            identities=self.identities,
            stager=VersionStager(self.writer, FOLDER, self.staging, self.repair, self.identities, self.activity),
            handover=EngineHandover(
                self.writer,
                self.engines,
                self.planner,
                self.timeline,
                self.activity,
                lambda version: self.regression,
                self._remember,
            ),
            refused=RefusedVersions(self.writer, self.check, self.planner, self.removal, self._refuse),
            planner=self.planner,
            activity=self.activity,
        )

    @staticmethod
    def _open(kept):
        if isinstance(kept, Shadow):
            return kept
        raise kept or LocalError("there is none")

    def _refuse(self, *why) -> None:
        self.refused.append(why)
        self.activity.error = why[1]

    async def _remember(self, version) -> None:
        self.remembered.append(version)

    def add(self, *holdings) -> None:
        self.path += holdings
        self.node.holdings |= {h.id: h for h in holdings}
        self.planner.replan()

    def stored(self, version: int, identity: bytes):
        made = SimpleNamespace(
            id=b"stored", version=V[version], manifest=SimpleNamespace(identity=identity, state=version),
            assembly=SimpleNamespace(layout=LAYOUT),
        )  # fmt: skip
        self.store.artifacts[made.id] = made

    async def __aenter__(self) -> Peer:
        self.task = asyncio.create_task(self.updater.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    async def until(self, condition) -> None:
        await until(condition, check=lambda: self.task.done() and self.task.result())

    async def staged(self, version: int) -> None:
        await self.until(lambda: self.state.staged == V[version] and V[version] in self.engines.named("on_staged"))


class Activity:
    def __init__(self) -> None:
        self.state, self.states, self.error = "joining", [], None

    def enter(self, state) -> None:
        self.state = state
        self.states.append(state)


class Repair:
    def __init__(self) -> None:
        self.repaired, self.completed, self.able = [], [], True

    async def repair_cells(self, shadow, corrupt, still):
        async with still():
            self.repaired.append(corrupt)
            if self.able:
                shadow.corrupt = []
        return self.able

    async def complete(self, version, layout, *, deep=False) -> None:
        self.completed.append((version, deep))


class ArtifactRemoval:
    def __init__(self) -> None:
        self.discarded = []
        self.on_discard = lambda ident: None

    async def discard(self, ident, *, contradicted=False) -> None:
        self.discarded.append((ident, contradicted))
        self.on_discard(ident)


class Staging:
    """``faults``: by version, the error of its next staging."""

    workers = 2

    def __init__(self, peer) -> None:
        self.peer, self.faults = peer, {}
        self.run = blocking

    async def patch(self, holding, shadow):
        if (fault := self.faults.pop(holding.open.version, None)) is not None:
            raise fault
        return SimpleNamespace(holding=holding, unlink=lambda missing_ok: None)

    async def apply(self, shadow, patch) -> None:
        shadow.version, shadow.state_digest = patch.holding.open.version, patch.holding.open.version.step

    async def fill(self, holding, folder):
        return Shadow(holding.open.version.step)

    async def new_shadow(self, folder, layout, version, words_of, digest):
        return Shadow(version.step, digest)


def delta(base, version, **options):
    made = FakeHolding(base, version, complete=True, **options)
    made.durable.set()
    return made
