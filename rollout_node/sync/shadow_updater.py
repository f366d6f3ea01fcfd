"""Moves the shadow from version to version along the path of ``rollout_node.sync.version_path``, and handles versions
that do not fit.

Promises:

- The shadow is always at a version that the run's key has sealed, or there is none.
- It moves only while it has no reader.
- A fault of one version costs that version alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

from p2pcast.backoff import Backoff
from p2pcast.codec.layout import Cell, Layout
from p2pcast.errors import IntegrityError, LocalError, RetryableError
from p2pcast.progress_bar import Meter
from p2pcast.relay.holding import ArtifactHolder, Holding
from p2pcast.state.shadow import Shadow, layout_in
from p2pcast.state.staging import Staging
from p2pcast.store.artifact_store import Store, Stored
from p2pcast.version import Version
from rollout_node.control.activity import Activity
from rollout_node.control.hub_orders import HubOrders
from rollout_node.control.timeline import Timeline
from rollout_node.engine.engines import Engines
from rollout_node.sync.artifact_catalog import Catalog
from rollout_node.sync.base_folder import BaseFolder
from rollout_node.sync.disposal import Disposal
from rollout_node.sync.shadow_repair import ShadowRepair
from rollout_node.sync.shadow_state import ShadowState
from rollout_node.sync.version_path import VersionPlanner

logger = logging.getLogger("p2pcast.peer")

KEPT_PATCHES = 16
"""Patches kept for an engine that lags behind; an engine further back gets the whole state."""
REREAD_S = 30.0
"""Between two passes over the shadow because of engines with wrong weights, in seconds: the fault may be theirs."""
REFUSED_S = 0.5
REFUSED_MAX_S = 60.0
"""Before a refused artifact is tried again, in seconds; twice as long each time."""
SETTLE_S = 0.5
"""Between two checks whether the engines let the shadow move on, in seconds."""


class StagingNode(ArtifactHolder, Protocol):
    def add_layout(self, layout: Layout) -> None: ...


class ShadowUpdater:
    """``run`` until cancelled, once the peer has joined. ``folder``: where the shadow lies. ``resumed``: the peer
    started from its own state while the hub was out of reach. ``may_leave``: whether the shadow may go on from a
    version. ``remember`` saves the newest version that was staged, unless ``is_regression`` says that there was a newer
    one.
    """

    def __init__(
        self,
        *,
        state: ShadowState,
        folder: Path,
        base: BaseFolder | None,
        resumed: bool,
        planner: VersionPlanner,
        catalog: Catalog,
        repair: ShadowRepair,
        node: StagingNode,
        store: Store,
        staging: Staging,
        disposal: Disposal,
        engines: Engines,
        orders: HubOrders,
        timeline: Timeline,
        activity: Activity,
        may_leave: Callable[[Version | None], bool],
        is_regression: Callable[[Version], bool],
        remember: Callable[[Version], Awaitable[None]],
    ) -> None:
        self._state = state
        self._folder = folder
        self._base = base
        self._resumed = resumed
        self._planner = planner
        self._catalog = catalog
        self._repair = repair
        self._node = node
        self._store = store
        self._staging = staging
        self._disposal = disposal
        self._engines = engines
        self._orders = orders
        self._timeline = timeline
        self._activity = activity
        self._may_leave = may_leave
        self._is_regression = is_regression
        self._remember = remember
        self._suspected = False
        """An engine got wrong weights from the shadow, and the shadow was not read since."""
        self._reread_s = -REREAD_S
        self._identity: bytes | None = None
        """The hash of the version staged, if it has one."""
        self._identities: Mapping[Version, bytes] = {}
        """The hashes of the run's versions, as the hub said."""
        self._refusals: dict[bytes, Backoff] = {}
        """Artifact → the time before it is tried again."""

    # -- from version to version

    async def run(self) -> None:
        await self._begin()
        while True:
            await self._reread_if_suspected()
            await self._settle_contradictions()
            path = self._planner.path()
            holding = self._node.holdings.get(path[0].artifact) if path else None
            if holding is None:
                self._activity.enter(self._idle_state(waits=bool(path)))
                await self._planner.news.wait()
                continue
            try:
                await self._advance(holding)
                self._activity.error = None
            except RetryableError as error:
                logger.info("%s", error)
            except IntegrityError as error:
                await self._refuse(holding, error)

    def suspect(self) -> None:
        """An engine got wrong weights from the shadow: the shadow is read and compared with its digests."""
        self._suspected = True
        self._planner.replan()

    def contradict(self, identities: Mapping[Version, bytes]) -> None:
        """The hub names the hashes of the run's versions. Versions that this peer holds under the same numbers with
        other hashes are let go.
        """
        self._identities = identities
        if self._contradicted_artifacts() or self._is_off_the_chain():
            self._planner.replan()

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
        staged, own = self._state.staged, self._identity
        return staged is not None and own is not None and self._identities.get(staged, own) != own

    async def _settle_contradictions(self) -> None:
        for stored in self._contradicted_artifacts():
            logger.error(
                "version %s as stored here is not the run's version of this number: the stored copy is discarded",
                stored.version,
            )
            await self._disposal.discard(stored.id, contradicted=True)
            self._planner.replan()
        shadow, staged = self._state.shadow, self._state.staged
        if self._is_off_the_chain() and shadow is not None and staged is not None:
            await self._leave_chain(shadow, staged)

    async def _leave_chain(self, shadow: Shadow, version: Version) -> None:
        """The state here belongs to no version of the run."""
        why = f"the version {version} held here is not the run's version {version}; the state is fetched anew"
        self._activity.error = why
        self._timeline.refused(version, why)
        self._engines.distrust()
        await self._drop_shadow(shadow)

    async def _reread_if_suspected(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._suspected and self._state.shadow is not None and now - self._reread_s > REREAD_S:
            self._suspected, self._reread_s = False, now
            await self._reread(self._state.shadow)

    def _idle_state(self, waits: bool) -> str:
        """``waits``: the path leads on, and its first artifact is not here."""
        staged = self._state.staged
        if staged is None or waits:
            return "waiting"
        return "held" if staged == self._orders.hold != self._orders.target else "current"

    async def _begin(self) -> None:
        """Take the shadow of an earlier process if correct, else the base folder. Without both, an anchor is
        fetched.
        """
        if not self._resumed or self._store.newest() is None:
            self._activity.enter("waiting" if self._resumed else "joining")
            await self._catalog.complete.wait()
        await self._settle_contradictions()
        shadow = self._state.shadow = await self._reopened()
        if shadow is None and self._base is not None:
            # A hub that has just started is still making the base's version.
            while not self._planner.whole():
                self._activity.enter("waiting")
                await self._planner.news.wait()
            shadow = self._state.shadow = await self._from_base(self._base)
        if shadow is not None:
            await self._repair.complete(shadow.version, shadow.layout, deep=True)
        self._state.staged = None if shadow is None else shadow.version
        self._planner.begun.set()
        if shadow is not None:
            await self._on_staged(shadow.version)

    async def _reopened(self) -> Shadow | None:
        for layout in self._layouts():
            try:
                shadow: Shadow = await self._staging.run(Shadow.open, self._folder, layout)
            except IntegrityError:
                continue
            except LocalError:
                return None
            known = self._signed_digest(shadow.version)
            if known is None and not self._catalog.complete.is_set():
                # No signed digest lies here. Only the hub's digest can tell whether the shadow is correct.
                self._activity.enter("waiting")
                await self._catalog.complete.wait()
                known = self._signed_digest(shadow.version)
            sound = known is not None and known == shadow.state_digest
            if sound and (rotten := await self._rotten(shadow)):
                sound = await self._repair.mend(shadow, rotten, contextlib.nullcontext)
            if not sound:
                shadow.close()
                return None
            logger.info("the shadow of an earlier process is good: version %s", shadow.version)
            return shadow
        return None

    def _signed_digest(self, version: Version) -> int | None:
        """The digest of a version's state: from a manifest in the store, or as the hub said."""
        manifest = self._store.manifest(version)
        return self._planner.states().get(version) if manifest is None else manifest.state

    async def _rotten(self, shadow: Shadow) -> list[Cell]:
        return await self._staging.run(shadow.verify, self._staging.workers)

    async def _reread(self, shadow: Shadow) -> bool:
        """Whether any cell was corrupt. The shadow is right afterwards, or there is none any more."""
        rotten = await self._rotten(shadow)
        if rotten and not await self._repair.mend(shadow, rotten, self._moving):
            await self._drop_shadow(shadow)
        return bool(rotten)

    async def _drop_shadow(self, shadow: Shadow) -> None:
        async with self._moving():
            logger.error("the shadow is made anew")
            shadow.close()
            self._state.shadow = self._state.staged = self._identity = None

    def _layouts(self) -> Collection[Layout]:
        seen = {s.assembly.layout.layout_id: s.assembly.layout for s in self._store.artifacts.values()}
        own: Iterable[Layout | None] = (None if self._base is None else self._base.layout, layout_in(self._folder))
        for layout in own:
            if layout is not None:
                seen.setdefault(layout.layout_id, layout)
        return seen.values()

    async def _from_base(self, base: BaseFolder) -> Shadow:
        """Raises IntegrityError for a folder that is no version of the run."""
        version, folder = base.version_among(self._planner.whole()), base.checkpoint.folder
        if version is None:
            raise IntegrityError(
                f"wrong base: {folder} (digest {base.digest:016x}) is not a version that this run keeps whole; "
                "give the folder that the hub was started from, or leave --base out to fetch it"
            )
        self._node.add_layout(base.layout)
        await self._staging.run(self._store.keep_files, await self._staging.run(base.small_files))
        logger.info("base %s is version %s: nothing to download", folder, version)
        self._log_memory(base.layout)
        return await self._staging.new_shadow(self._folder, base.layout, version, base.checkpoint.lent, base.digest)

    def _log_memory(self, layout: Layout) -> None:
        logger.info(
            "the state takes %.2f GB of memory in %s, and each version's changes beside it",
            layout.nbytes / 1e9,
            self._folder,
        )

    async def _advance(self, holding: Holding) -> None:
        version, staging = holding.open.version, self._staging
        self._activity.enter("receiving")
        if holding.open.base is None:
            await self._fill(holding)
        else:
            shadow = self._state.shadow
            assert shadow is not None
            if holding.open.base_hash is not None and self._identity not in (None, holding.open.base_hash):
                await self._leave_chain(shadow, version)
                return
            patch = await staging.patch(holding, shadow)
            try:
                await holding.until_durable()
            except RetryableError:
                await staging.run(partial(patch.unlink, missing_ok=True))
                raise
            await self._repair.complete(version, shadow.layout)
            async with self._moving():
                await staging.apply(shadow, patch)
        await self._on_staged(version)

    async def _fill(self, holding: Holding) -> None:
        layout, seen = holding.assembly.layout, 0
        self._log_memory(layout)
        with Meter(f"version {holding.open.version}") as meter:
            while not holding.finished:
                holding.progress.clear()
                if holding.aborted:
                    raise RetryableError(f"version {holding.open.version} was aborted, or comes another way now")
                await holding.progress.wait()
                held = holding.artifact.held.count * holding.open.piece
                meter(held - seen, max(held, layout.nbytes))
                seen = held
        await holding.until_durable()
        await self._repair.complete(holding.open.version, layout)
        async with self._moving():
            if self._state.shadow is not None:
                self._state.shadow.close()
                self._state.shadow = self._state.staged = None
            self._state.shadow = await self._staging.fill(holding, self._folder)

    async def _on_staged(self, version: Version) -> None:
        """The shadow holds ``version`` now: have it installed, unless the next version is here already."""
        self._state.staged = version
        self._identity = self._store.identity(version) or self._identities.get(version)
        if not self._is_regression(version):
            await self._remember(version)
        self._activity.enter("staged")
        logger.info("version %s staged", version)
        self._drop_patches()
        self._timeline.staged(version, asyncio.get_running_loop().time())
        self._engines.on_staged(version)
        while not (self._superseded(version) or self._engines.settled(version)):
            await self._state.wait(SETTLE_S)

    def _superseded(self, version: Version) -> bool:
        """Whether the next version is here already: then the shadow waits for no engine, not even one that hangs."""
        path = self._planner.path()
        ahead = self._node.holdings.get(path[0].artifact) if path else None
        return ahead is not None and ahead.finished and version != self._orders.target

    async def _refuse(self, holding: Holding, error: IntegrityError) -> None:
        """A version that does not fit the shadow, or a corrupt shadow: then its cells are repaired."""
        self._activity.error = str(error)
        logger.error("version %s refused: %s", holding.open.version, error)
        self._timeline.refused(holding.open.version, str(error))
        refusals = self._refusals.setdefault(holding.id, Backoff(REFUSED_S, REFUSED_MAX_S, None))
        rotten, shadow = False, self._state.shadow
        if shadow is not None and holding.open.base == self._state.staged:
            rotten = await self._reread(shadow)
            if not rotten and (refusals.attempts or self._signed_digest(shadow.version) != shadow.state_digest):
                # Every cell matches its digest, and yet versions do not fit: so the digests are wrong.
                await self._drop_shadow(shadow)
        if not rotten and holding.finished:
            # The artifact was whole when it came in: it was damaged on this peer's disk.
            await self._disposal.discard(holding.id)
            self._planner.replan()
        await asyncio.sleep(refusals.next_s())

    def _drop_patches(self) -> None:
        """Patches that every engine has behind it, and those beyond ``KEPT_PATCHES``."""
        shadow = self._state.shadow
        if shadow is not None:
            behind, every = self._engines.oldest or shadow.version, shadow.patches
            if len(every) > KEPT_PATCHES:
                behind = max(behind, every[-KEPT_PATCHES - 1])
            shadow.drop_patches(behind)

    def _moving(self) -> AbstractAsyncContextManager[None]:
        return self._state.moving(self._may_leave)
