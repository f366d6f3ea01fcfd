"""The way of a version at a peer: which artifacts lead to the newest, how the shadow goes there, and what is done about one that does not fit.

Promises: the shadow is always at a version that the run's key has sealed, or there is none; it moves only while nobody reads it; what goes wrong with one
version costs that version alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from p2pcast import limits
from p2pcast.bell import Bell
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.layout import Cell, Layout
from p2pcast.errors import IntegrityError, LocalError, RetryableError
from p2pcast.offline import state_digest
from p2pcast.parallel import cores
from p2pcast.progress import Meter
from p2pcast.relay.catchup import Edge
from p2pcast.relay.node import Holding
from p2pcast.relay.upstream import Upstream
from p2pcast.state.replay import WordsOf
from p2pcast.state.shadow import Shadow, layout_in
from p2pcast.version import Version
from rollout_node.catalog import Entry
from rollout_node.catching_up import CatchingUp
from rollout_node.healing import Healing
from rollout_node.marks import Marks

if TYPE_CHECKING:
    from rollout_node.peer import Peer

logger = logging.getLogger("p2pcast.peer")

PATIENCE_S = 2.0
"""How long a parent may take to open an artifact that the hub has sealed, before it is pulled."""
SMALL_BYTES = 256 * limits.KIB
"""What is no larger comes from the parent, if it has it: that takes no longer than looking for others, and disturbs a version that is on its way by no more than
20 ms at 100 Mbit/s."""
KEPT_PATCHES = 16
"""Patches kept for an engine that lags behind; one further back is filled densely."""
DOUBT_S = 30.0
"""Between two passes over the shadow because of engines that were found wrong: it may be their own fault."""
REFUSED_S = 0.5
REFUSED_MAX_S = 60.0
"""Before an artifact that was refused is tried again; twice as long each time."""


class Following:
    """``fetch`` and ``stage`` run until cancelled, once the peer has joined. ``news`` rings for whatever may have changed the way."""

    def __init__(self, peer: Peer) -> None:
        self.shadow: Shadow | None = None
        self.staged: Version | None = None
        self.busy = "joining"
        self.error: str | None = None
        self.base: tuple[Checkpoint, int] | None = None
        """The folder that the run began from, and its digest."""
        self.begun = asyncio.Event()
        """It is known what has to come over the wire."""
        self.news = Bell()
        self.squashes = CatchingUp(peer.config.squashes, cores())
        self.hold: Version | None = None
        """The shadow goes no further than this, by the hub's word."""
        self._peer = peer
        self._still = asyncio.Condition()
        self._readers = 0
        self._healing = Healing(peer)
        self._doubted = False
        self._read_through_s = -DOUBT_S
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

    # -- which way

    def path(self) -> list[Edge]:
        """From the version staged to the newest that the shadow may go to."""
        hold = self.hold
        way = self.squashes.way(self.staged, [e for e in self._edges() if hold is None or e.version <= hold], self._state_bytes())
        return [] if self._leads_back(way) else way

    def _leads_back(self, way: list[Edge]) -> bool:
        """A mirror may show less than it did. Where a shadow was lost meanwhile, that would take engines back: then nothing is done until it shows more, or a hub
        says otherwise."""
        mirrored, newest = self._peer.mirrored, self._peer.memory["newest"]
        return bool(
            way and mirrored is not None and mirrored.in_use and newest is not None and way[-1].version < Version.parse(newest)
        )

    def needed(self) -> frozenset[bytes]:
        """Artifacts that must not be let go: what leads on, past where the shadow is held, too."""
        return frozenset(e.artifact for e in (*self.path(), *self.squashes.way(self.staged, self._edges(), self._state_bytes())))

    def _state_bytes(self) -> int:
        layouts = self._peer.node.layouts.values() if self.shadow is None else [self.shadow.layout]
        return max((layout.nbytes for layout in layouts), default=0)

    def _edges(self) -> Collection[Edge]:
        edges = {e.artifact: e for e in self.listed()} | {
            h.id: Edge(h.id, h.open.base, h.open.version, self._bytes_left(h))
            for h in self._peer.node.holdings.values()
            if self._may_complete(h)
        }
        return edges.values()

    def listed(self) -> Collection[Edge]:
        """What others hold whole, by the word of the hub or of a mirror."""
        peer, mirrored = self._peer, self._peer.mirrored
        use = mirrored is not None and mirrored.in_use
        # What a hub that is gone has listed can be had of nobody, unless there is a parent.
        listed = peer.catalog.edges() if not use or peer.attachment.feeding is not None else {}
        return (listed | (mirrored.edges() if mirrored is not None and use else {})).values()

    def layout_of(self, artifact: bytes) -> bytes | None:
        """Of one that is listed."""
        mirrored = self._peer.mirrored
        entry = self._peer.catalog.get(artifact) or (None if mirrored is None else mirrored.entries.get(artifact))
        return None if entry is None else entry.layout

    def _bytes_left(self, holding: Holding) -> int:
        """What has still to come; of one that is still being made, nobody knows: it is taken for the cheapest."""
        manifest, entry = holding.assembly.manifest, self._peer.catalog.get(holding.id)
        whole = manifest.log if manifest is not None else entry.size if entry is not None else 0
        return max(0, whole - holding.artifact.held.count * holding.open.piece)

    def states(self) -> dict[Version, int]:
        """Digests of the versions that are known: by the hub; without one, by what is signed on the mirror and in the store here."""
        mirrored = self._peer.mirrored
        if mirrored is None or not mirrored.in_use:
            return self._peer.catalog.states()
        stored = {s.version: s.manifest.state for s in self._peer.store.artifacts.values()}
        return stored | {e.version: e.state for e in mirrored.entries.values()} | self._peer.catalog.states()

    def _whole(self) -> list[tuple[Version, tuple[bytes, int]]]:
        mirrored = [] if self._peer.mirrored is None else self._peer.mirrored.entries.values()
        return self._peer.catalog.whole() + [(e.version, (e.layout, e.state)) for e in mirrored]

    def _may_complete(self, holding: Holding) -> bool:
        """What a hub was making when it died is on nobody's list: once nobody sends it any more, it leads nowhere."""
        mirrored = self._peer.mirrored
        return not holding.excerpt and (
            holding.completed_at is not None
            or holding.source is not None
            or self._peer.catalog.get(holding.id) is not None
            or (mirrored is not None and mirrored.in_use and holding.id in mirrored.entries)
        )

    async def fetch(self) -> None:
        """Ask for what the way to the newest version needs and nobody sends."""
        await self.begun.wait()
        while True:
            waiting = self._ask()
            await self.news.wait(PATIENCE_S / 4 if waiting else None)

    def _ask(self) -> bool:
        """True when something is missing that may have to be asked for later."""
        peer, waiting = self._peer, False
        live, now = peer.attachment.feeding, asyncio.get_running_loop().time()
        path = self.path()
        if self._awaits_squash(path, now):
            return True
        self._give_up_needless()
        mirrored = peer.mirrored.entries if peer.mirrored is not None and peer.mirrored.in_use else {}
        for artifact in peer.pulling.hopeless:
            if live is not None and artifact in live.offers:
                peer.pulling.drop(artifact)
                live.want(artifact)
            elif artifact in mirrored:
                peer.pulling.drop(artifact)
        # What follows a whole state may be less by the time that it is here.
        later = self.squashes.asks and len(path) > 2 and path[0].base is None and self._incomplete(path[0])
        for edge in path:
            holding, entry = peer.node.holdings.get(edge.artifact), peer.catalog.get(edge.artifact)
            if later and edge is not path[0] and holding is None and entry is not None and entry.sealed:
                waiting = True
                continue
            if holding is not None and (holding.completed_at is not None or holding.source is not None):
                continue
            if holding is not None:
                holding.idle = False
            if peer.pulling.fetches(edge.artifact):
                waiting = True
            elif live is not None and edge.artifact in live.offers:
                if entry is None or not entry.sealed or entry.size <= SMALL_BYTES:
                    live.want(edge.artifact)
                else:
                    peer.pulling.fetch(edge.artifact, anchor=edge.base is None)
                    waiting = True
            else:
                waiting = True
                if entry is not None and entry.sealed and edge.artifact not in mirrored and self._forsaken(entry, live, now):
                    peer.pulling.fetch(edge.artifact, anchor=edge.base is None)
        return waiting

    def _awaits_squash(self, path: list[Edge], now: float) -> bool:
        """Whether one from exactly here is on its way, or has just been asked for; then the way there is is not begun.

        Where the way begins with a whole state, it is asked for from there, and made while that comes in."""
        peer, state_bytes = self._peer, self._state_bytes()
        held, behind = self.staged, path
        if path and path[0].base is None:
            held, behind = path[0].version, path[1:]
        missing = [e for e in behind if not peer.pulling.fetches(e.artifact) and self._lacking(e)]
        base = self.squashes.should_ask(held, missing, state_bytes, now)
        if base is not None and peer.control.ask_squash(base):
            logger.info("%d artifacts behind version %s: asking for one in their place", len(missing), path[-1].version)
            self.squashes.asked(base, now)
        waits = bool(missing) and self.squashes.waits(held, self._edges(), state_bytes, now)
        return waits and not (path[0].base is None and self._incomplete(path[0]))

    def _lacking(self, edge: Edge) -> bool:
        """Nothing of it is on its way."""
        holding = self._peer.node.holdings.get(edge.artifact)
        return holding is None or self._stands(holding)

    @staticmethod
    def _stands(holding: Holding) -> bool:
        return holding.completed_at is None and holding.source is None

    def _incomplete(self, edge: Edge) -> bool:
        holding = self._peer.node.holdings.get(edge.artifact)
        return holding is None or holding.completed_at is None

    def _give_up_needless(self) -> None:
        """What was half received and nobody sends, and lies on no way any more: who has begun to decode it would wait for ever."""
        peer = self._peer
        needed: frozenset[bytes] | None = None
        for holding in [
            h
            for h in peer.node.holdings.values()
            if not h.excerpt and (h.idle or (self._stands(h) and not peer.pulling.fetches(h.id)))
        ]:
            entry = self._peer.catalog.get(holding.id)
            needed = self.needed() if needed is None else needed
            if entry is not None and entry.sealed and holding.id not in needed:
                self._peer.give_up(holding)

    def _forsaken(self, entry: Entry, live: Upstream | None, now: float) -> bool:
        """Whether the parent will not push what it does not have yet. One that is lost is replaced in a moment; one that is still sending an earlier version
        will come to it."""
        attachment = self._peer.attachment
        coming = attachment.receiving
        if coming is not None and coming < entry.version:
            return False
        if live is not None and live.attached.is_set() and entry.sealed_at < attachment.moved_at:
            return True
        return now - max(entry.sealed_at, attachment.moved_at) > PATIENCE_S

    # -- from version to version

    async def stage(self) -> None:
        """For as long as the peer lives."""
        await self._begin()
        while True:
            await self._settle_doubts()
            path = self.path()
            holding = self._peer.node.holdings.get(path[0].artifact) if path else None
            if holding is None:
                self.say_busy(self._idle(way_ahead=bool(path)))
                await self.news.wait()
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
        self.news.ring()

    async def _settle_doubts(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._doubted and self.shadow is not None and now - self._read_through_s > DOUBT_S:
            self._doubted, self._read_through_s = False, now
            await self._look_through(self.shadow)

    def _idle(self, way_ahead: bool) -> str:
        if self.staged is None or way_ahead:
            return "waiting"
        return "held" if self.staged == self.hold != self._peer.target else "current"

    async def _begin(self) -> None:
        """The shadow of an earlier process if it is good, else the base folder, else nothing: then an anchor comes over the wire."""
        catalog = self._peer.catalog
        await catalog.complete.wait()
        self.shadow = await self._reopened()
        if self.shadow is None and self.base is not None:
            # A hub that has just started is still making that very version.
            while not self._whole():
                self.say_busy("waiting")
                await self.news.wait()
            self.shadow = await self._from_base(*self.base)
        if self.shadow is not None:
            await self._healing.complete(self.shadow.version, self.shadow.layout, deep=True)
        # Only now is it known what has to come over the wire.
        self.staged = None if self.shadow is None else self.shadow.version
        self.begun.set()
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
        return self.states().get(version) if manifest is None else manifest.state

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
            self.shadow = self.staged = None

    def base_at(self) -> tuple[Version, WordsOf] | None:
        """The base folder and the version that it is, as far as that is known."""
        if self.base is None:
            return None
        checkpoint, state = self.base
        same = [v for v, known in self._whole() if known == (checkpoint.layout().layout_id, state)]
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
        match = [v for v, known in self._whole() if known == (layout.layout_id, state)]
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
        return await peer.staging.new_shadow(peer.config.shadow, layout, version, checkpoint.words, state)

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
            patch = await staging.patch(holding, shadow)
            await holding.durable.wait()
            await self._healing.complete(version, shadow.layout)
            async with self._moving():
                await staging.apply(shadow, patch)
        await self._at(version)

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
        await holding.durable.wait()
        await self._healing.complete(holding.open.version, layout)
        async with self._moving():
            if self.shadow is not None:
                self.shadow.close()
                self.shadow = self.staged = None
            self.shadow = await self._peer.staging.fill(holding, self._peer.config.shadow)

    async def _at(self, version: Version) -> None:
        """The shadow holds ``version`` now: have it installed, unless the next is there already."""
        self.staged = version
        if self._peer.mirrored is not None:
            await self._peer.staging.run(lambda: self._peer.memory.update(newest=str(version)))
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
        following = self.path()
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
            self.news.ring()
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
