"""The shadow at a peer: how it goes from version to version along the way (``rollout_node.wayfinding``), and what is done about one that does not fit.

Promises: the shadow is always at a version that the run's key has sealed, or there is none; it moves only while nobody reads it; what goes wrong with one
version costs that version alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.layout import Cell, Layout
from p2pcast.errors import IntegrityError, LocalError, RetryableError
from p2pcast.offline import state_digest
from p2pcast.progress import Meter
from p2pcast.relay.holding import Holding
from p2pcast.state.replay import WordsOf
from p2pcast.state.shadow import Shadow, layout_in
from p2pcast.store.store import Stored
from p2pcast.version import Version
from rollout_node.healing import Healing
from rollout_node.marks import Marks

if TYPE_CHECKING:
    from rollout_node.peer import Peer

logger = logging.getLogger("p2pcast.peer")

KEPT_PATCHES = 16
"""Patches kept for an engine that lags behind; one further back is filled densely."""
DOUBT_S = 30.0
"""Between two passes over the shadow because of engines that were found wrong: it may be their own fault."""
REFUSED_S = 0.5
REFUSED_MAX_S = 60.0
"""Before an artifact that was refused is tried again; twice as long each time."""


class Following:
    """``stage`` runs until cancelled, once the peer has joined."""

    def __init__(self, peer: Peer) -> None:
        self.shadow: Shadow | None = None
        self.staged: Version | None = None
        self.busy = "joining"
        self.error: str | None = None
        self.base: tuple[Checkpoint, int] | None = None
        """The folder that the run began from, and its digest."""
        self._peer = peer
        self._wayfinding = peer.wayfinding
        self._still = asyncio.Condition()
        self._readers = 0
        self._healing = Healing(peer)
        self._doubted = False
        self._read_through_s = -DOUBT_S
        self._identity: bytes | None = None
        """The hash of the version staged, as far as it has one."""
        self._identities: Mapping[Version, bytes] = {}
        """The hashes of the run's versions, by the hub's word."""
        self._refusals: Counter[bytes] = Counter()
        """Artifact → how often it was refused."""

    def close(self) -> None:
        if self.shadow is not None:
            self.shadow.close()

    async def read_base(self, folder: Path) -> None:
        """Raises LocalError, IntegrityError."""
        run = self._peer.staging.run
        checkpoint = await run(Checkpoint.open, folder)
        self.base = checkpoint, await run(state_digest, checkpoint, checkpoint.layout())

    # -- from version to version

    async def stage(self) -> None:
        """For as long as the peer lives."""
        await self._begin()
        while True:
            await self._settle_doubts()
            await self._settle_contradictions()
            path = self._wayfinding.path()
            holding = self._peer.node.holdings.get(path[0].artifact) if path else None
            if holding is None:
                self.say_busy(self._idle(way_ahead=bool(path)))
                await self._wayfinding.news.wait()
                continue
            try:
                await self._advance(holding)
                self.error = None
            except RetryableError as error:
                logger.info("%s", error)
            except IntegrityError as error:
                await self._refused(holding, error)

    def doubt(self) -> None:
        """Somebody was given the state as it is here, and it was wrong: the shadow is to be read through."""
        self._doubted = True
        self._wayfinding.news.ring()

    def contradict(self, identities: Mapping[Version, bytes]) -> None:
        """The hub says by which hashes the run knows its versions: what is held here under the same numbers with other hashes is let go."""
        self._identities = identities
        if self._unlike() or self._off_the_chain():
            self._wayfinding.news.ring()

    def _unlike(self) -> list[Stored]:
        """Stored artifacts of versions that the run knows by other hashes."""
        stored = self._peer.store.artifacts.values()
        return [s for s in stored if (own := s.manifest.identity) is not None and self._identities.get(s.version, own) != own]

    def _off_the_chain(self) -> bool:
        """Whether the run knows the version staged by another hash: there were two states under one number, and ours is not the run's."""
        staged, own = self.staged, self._identity
        return staged is not None and own is not None and self._identities.get(staged, own) != own

    async def _settle_contradictions(self) -> None:
        peer = self._peer
        for stored in self._unlike():
            logger.error(
                "version %s as stored here is not the run's version of this number: the stored copy is discarded", stored.version
            )
            peer.node.forget(stored.id)
            await peer.staging.run(partial(peer.store.discard, stored.id, contradicted=True))
            self._wayfinding.news.ring()
        if self._off_the_chain() and self.shadow is not None and self.staged is not None:
            await self._leave_chain(self.shadow, self.staged)

    async def _leave_chain(self, shadow: Shadow, version: Version) -> None:
        """The state here belongs to no version of the run: engines that have it are unready until they have another."""
        self.error = f"the version {version} held here is not the run's version {version}; the state is fetched anew"
        self._peer.chronicle.refused(version, self.error)
        for runner in self._peer.runners:
            runner.distrust()
        await self._begin_anew(shadow)

    async def _settle_doubts(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._doubted and self.shadow is not None and now - self._read_through_s > DOUBT_S:
            self._doubted, self._read_through_s = False, now
            await self._look_through(self.shadow)

    def _idle(self, way_ahead: bool) -> str:
        if self.staged is None or way_ahead:
            return "waiting"
        return "held" if self.staged == self._wayfinding.hold != self._peer.target else "current"

    async def _begin(self) -> None:
        """The shadow of an earlier process if it is good, else the base folder, else nothing: then an anchor comes over the wire."""
        peer, catalog = self._peer, self._peer.catalog
        if not peer.heeding.alone or peer.store.newest() is None:
            self.say_busy("waiting" if peer.heeding.alone else "joining")
            await catalog.complete.wait()
        await self._settle_contradictions()
        self.shadow = await self._reopened()
        if self.shadow is None and self.base is not None:
            # A hub that has just started is still making that very version.
            while not self._wayfinding.whole():
                self.say_busy("waiting")
                await self._wayfinding.news.wait()
            self.shadow = await self._from_base(*self.base)
        if self.shadow is not None:
            await self._healing.complete(self.shadow.version, self.shadow.layout, deep=True)
        # Only now is it known what has to come over the wire.
        self.staged = None if self.shadow is None else self.shadow.version
        self._wayfinding.begun.set()
        if self.shadow is not None:
            await self._at(self.shadow.version)

    async def _reopened(self) -> Shadow | None:
        for layout in self._layouts():
            try:
                shadow = await self._peer.staging.run(Shadow.open, self._peer.config.shadow, layout)
            except IntegrityError:
                continue
            except LocalError:
                return None
            known = self._signed(shadow.version)
            if known is None and not self._peer.catalog.complete.is_set():
                # Nothing signed lies here for it; without the hub's word it can be neither used nor called wrong.
                self.say_busy("waiting")
                await self._peer.catalog.complete.wait()
                known = self._signed(shadow.version)
            sound = known is not None and known == shadow.state_digest
            if sound and (rotten := await self._rotten(shadow)):
                sound = await self._healing.mend(shadow, rotten, contextlib.nullcontext)
            if not sound:
                shadow.close()
                return None
            logger.info("the shadow of an earlier process is good: version %s", shadow.version)
            return shadow
        return None

    def _signed(self, version: Version) -> int | None:
        """The digest of a version's state: by the hub's word, or by a manifest that lies here."""
        manifest = self._peer.store.manifest(version)
        return self._wayfinding.states().get(version) if manifest is None else manifest.state

    async def _rotten(self, shadow: Shadow) -> list[Cell]:
        return await self._peer.staging.run(shadow.verify, self._peer.staging.workers)

    async def _look_through(self, shadow: Shadow) -> bool:
        """Whether any cell had rotted. The shadow is right afterwards, or there is none any more."""
        rotten = await self._rotten(shadow)
        if rotten and not await self._healing.mend(shadow, rotten, self._moving):
            await self._begin_anew(shadow)
        return bool(rotten)

    async def _begin_anew(self, shadow: Shadow) -> None:
        async with self._moving():
            logger.error("the shadow is made anew")
            shadow.close()
            self.shadow = self.staged = self._identity = None

    def base_at(self) -> tuple[Version, WordsOf] | None:
        """The base folder and the version that it is, as far as that is known."""
        if self.base is None:
            return None
        checkpoint, state = self.base
        same = [v for v, known in self._wayfinding.whole() if known == (checkpoint.layout().layout_id, state)]
        return (max(same), checkpoint.words) if same else None

    def _layouts(self) -> Iterable[Layout]:
        seen = {s.assembly.layout.layout_id: s.assembly.layout for s in self._peer.store.artifacts.values()}
        if self.base is not None:
            layout = self.base[0].layout()
            seen.setdefault(layout.layout_id, layout)
        if (own := layout_in(self._peer.config.shadow)) is not None:
            seen.setdefault(own.layout_id, own)
        return seen.values()

    async def _from_base(self, checkpoint: Checkpoint, state: int) -> Shadow:
        peer, layout = self._peer, checkpoint.layout()
        match = [v for v, known in self._wayfinding.whole() if known == (layout.layout_id, state)]
        if not match:
            raise IntegrityError(
                f"wrong base: {checkpoint.folder} (digest {state:016x}) is not a version that this run keeps whole; "
                "give the folder that the hub was started from, or leave --base out to fetch it"
            )
        version = max(match)
        peer.node.add_layout(layout)
        await peer.staging.run(peer.store.keep_files, await peer.staging.run(checkpoint.small_files))
        logger.info("base %s is version %s: nothing to download", checkpoint.folder, version)
        self._say_room(layout)
        return await peer.staging.new_shadow(peer.config.shadow, layout, version, checkpoint.lent, state)

    def _say_room(self, layout: Layout) -> None:
        logger.info(
            "the state takes %.2f GB of memory in %s, and each version's changes beside it",
            layout.nbytes / 1e9,
            self._peer.config.shadow,
        )

    async def _advance(self, holding: Holding) -> None:
        version, staging = holding.open.version, self._peer.staging
        self.say_busy("receiving")
        if holding.open.base is None:
            await self._fill(holding)
        else:
            shadow = self.shadow
            assert shadow is not None
            if holding.open.base_hash is not None and self._identity not in (None, holding.open.base_hash):
                await self._leave_chain(shadow, version)
                return
            patch = await staging.patch(holding, shadow)
            try:
                await self._durable(holding)
            except RetryableError:
                await staging.run(patch.unlink, missing_ok=True)
                raise
            await self._healing.complete(version, shadow.layout)
            async with self._moving():
                await staging.apply(shadow, patch)
        await self._at(version)

    @staticmethod
    async def _durable(holding: Holding) -> None:
        """Sealed in the store here, which follows its being durable at the hub. Raises RetryableError when it comes to nothing."""
        await holding.durable.wait()
        if holding.aborted:
            raise RetryableError(f"version {holding.open.version} was aborted by the hub, or now comes from another source")

    async def _fill(self, holding: Holding) -> None:
        layout, seen = holding.assembly.layout, 0
        self._say_room(layout)
        with Meter(f"version {holding.open.version}") as meter:
            while not holding.finished:
                holding.progress.clear()
                if holding.aborted:
                    raise RetryableError(f"version {holding.open.version} was aborted, or comes another way now")
                await holding.progress.wait()
                held = holding.artifact.held.count * holding.open.piece
                meter(held - seen, max(held, layout.nbytes))
                seen = held
        await self._durable(holding)
        await self._healing.complete(holding.open.version, layout)
        async with self._moving():
            if self.shadow is not None:
                self.shadow.close()
                self.shadow = self.staged = None
            self.shadow = await self._peer.staging.fill(holding, self._peer.config.shadow)

    async def _at(self, version: Version) -> None:
        """The shadow holds ``version`` now: have it installed, unless the next is there already."""
        self.staged = version
        self._identity = self._peer.store.identity(version) or self._identities.get(version)
        if not self._peer.leads_back(version):
            if self._peer.mirrored is not None:
                await self._peer.staging.run(lambda: self._peer.memory.update(newest=str(version)))
            else:
                self._peer.remembering.keep(newest=str(version))
        self.say_busy("staged")
        logger.info("version %s staged", version)
        self._drop_patches()
        self._peer.chronicle.staged(version, asyncio.get_running_loop().time())
        self._peer.on_staged(version)
        runners = self._peer.runners
        for runner in runners:
            runner.wake()
        while not (self._superseded(version) or all(r.settled(version) for r in runners)):
            async with self._still:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await self._still.wait()

    def _superseded(self, version: Version) -> bool:
        """Whether the next version is here already: then no engine, and be it one that hangs, is waited for."""
        following = self._wayfinding.path()
        ahead = self._peer.node.holdings.get(following[0].artifact) if following else None
        return ahead is not None and ahead.finished and version != self._peer.target

    async def _refused(self, holding: Holding, error: IntegrityError) -> None:
        """A version that does not fit what we hold, or a shadow that rotted: that is healed, a cell at a time."""
        self.error = str(error)
        logger.error("version %s refused: %s", holding.open.version, error)
        self._peer.chronicle.refused(holding.open.version, self.error)
        rotten = False
        if self.shadow is not None and holding.open.base == self.staged:
            rotten = await self._look_through(self.shadow)
            if not rotten and (self._refusals[holding.id] or self._signed(self.shadow.version) != self.shadow.state_digest):
                # Every cell is what its mark says, and yet versions do not fit: then it is the marks.
                await self._begin_anew(self.shadow)
        if not rotten and holding.finished:
            # It was whole when it came in: then it has been damaged on our disk.
            self._peer.node.forget(holding.id)
            await self._peer.staging.run(self._peer.store.discard, holding.id)
            self._wayfinding.news.ring()
        self._refusals[holding.id] += 1
        await asyncio.sleep(min(REFUSED_MAX_S, REFUSED_S * 2 ** (self._refusals[holding.id] - 1)))

    def _drop_patches(self) -> None:
        """Those that every engine has behind it, and those too far back."""
        shadow = self.shadow
        if shadow is not None:
            known = [v for r in self._peer.runners if (v := r.installer.committed) is not None]
            if (member := self._peer.member) is not None:
                known += [member.serves or Version(0, 0)]
            behind, every = min(known, default=shadow.version), shadow.patches
            if len(every) > KEPT_PATCHES:
                behind = max(behind, every[-KEPT_PATCHES - 1])
            shadow.drop_patches(behind)

    def say_busy(self, what: str) -> None:
        if what != self.busy:
            self.busy = what
            self._peer.control.changed()

    # -- for those who read the shadow

    @contextlib.asynccontextmanager
    async def held_still(self) -> AsyncIterator[tuple[Version, Path] | None]:
        """Keeps the shadow at its version; None where there is none yet."""
        async with self._still:
            self._readers += 1
        try:
            shadow = self.shadow
            yield None if shadow is None or self.staged is None else (self.staged, shadow.path)
        finally:
            async with self._still:
                self._readers -= 1
                self._still.notify_all()

    @contextlib.asynccontextmanager
    async def _moving(self) -> AsyncIterator[None]:
        async with self._still:
            await self._still.wait_for(lambda: self._readers == 0 and self._may_leave())
            yield

    def _may_leave(self) -> bool:
        member = self._peer.member
        return member is None or member.may_leave(self.staged)

    async def look_again(self) -> None:
        """Whoever waits to move the shadow is to ask again whether it may."""
        async with self._still:
            self._still.notify_all()

    def marks(self) -> Marks:
        """Of the version staged, for one who holds it still. Raises RetryableError."""
        if self.shadow is None:
            raise RetryableError("this peer holds no version yet")
        return Marks(self.shadow.layout, self.shadow.digests)

    def patches(self, base: Version | None, to: Version) -> list[Path] | Path:
        """The patch files from ``base`` to ``to``, which is staged, in order; or the shadow's file where they do not lead there. Raises RetryableError."""
        shadow = self.shadow
        if shadow is None or self.staged != to:
            raise RetryableError(f"version {to} is not staged here")
        chain: list[Path] = []
        at = to
        while base is not None and at != base:
            holdings = self._peer.node.holdings.values()
            holding = next((h for h in holdings if h.open.version == at and h.open.base is not None), None)
            if holding is None or holding.open.base is None or at not in shadow.patches:
                return shadow.path
            chain.append(shadow.patch_path(at))
            at = holding.open.base
        return chain[::-1] if base is not None else shadow.path
