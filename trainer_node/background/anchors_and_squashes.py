"""Artifacts that a hub makes next to the newest version, off the hot path: anchors at intervals, the ladder of
squashes, and squashes for late peers on request.

Guarantees: publishing never waits for any of them. One thread makes one artifact at a time, while there is no live
traffic, and otherwise for a twentieth of the time (``trainer_node.background.background_throttle``). Anchors are made
from a frozen view of the shadow. If an artifact fails, that is logged, and only that artifact is lost. Each artifact is
signed, sealed in the store, announced, and never pushed: peers that need it ask for it. Squashes are made only if they
leave space for the next versions and a whole state; they are removed to make space for anchors.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from p2pcast.artifact.run_key import RunKey
from p2pcast.codec.layout import Cell
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, P2PCastError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.process.events import Events
from p2pcast.relay.artifact_path import Edge, Gap, cheapest_path, expected_bytes, find_gap, fitted_exponent
from p2pcast.relay.holding import Holding
from p2pcast.state.shadow import Shadow
from p2pcast.state.squash_artifact import make_squash
from p2pcast.state.version_reader import Words, replay_to
from p2pcast.store.artifact_store import ArtifactStore, Stored
from p2pcast.store.retention import ANCHOR_EVERY
from p2pcast.store.squash_ladder import RUNGS, Span, missing_rungs
from topology.version_sizes import room_for_next
from trainer_node.background.background_throttle import BackgroundThrottle
from trainer_node.membership.peer_session import Promise
from trainer_node.publish.hub_shadow import HubShadow

logger = logging.getLogger("p2pcast.hub")

T = TypeVar("T")

MAX_WAITING = 16
"""Most requested squashes that are yet to be made; later requests use the ladder."""
SQUASH_BYTES_S = 0.5e9
"""Assumed speed of one core, in bytes of state per second and link, until the first squash has been made here."""
RETRY_S = 5.0


def _bytes(parts: Sequence[Holding]) -> int:
    return sum(part.assembly.manifest.log for part in parts if part.assembly.manifest is not None)


class AnchorsAndSquashes:
    """Makes artifacts until ``run`` is cancelled. If ``rungs`` is empty, no squashes are made. ``anchor_every``: number
    of versions between anchors; None for ANCHOR_EVERY.
    """

    def __init__(
        self,
        store: ArtifactStore,
        holdings: Mapping[bytes, Holding],
        key: RunKey,
        source: HubShadow,
        events: Events,
        *,
        live_traffic: Callable[[], bool],
        add: Callable[[Stored], None],
        recover: Callable[[bool], Awaitable[Sequence[Stored]]],
        catch_up: Callable[[], Awaitable[None]],
        make_room: Callable[[float], Awaitable[None]],
        rungs: Sequence[int] = RUNGS,
        anchor_every: int | None = None,
    ) -> None:
        """``holdings``: the node's artifacts, by id. ``live_traffic``: whether a version is being made or sent. ``add``
        is called with each artifact that is in the store. ``recover`` fetches lost artifacts from peers; with True,
        also whole states. ``catch_up`` then brings the shadow to the newest version. ``make_room`` removes squashes
        until the given number of bytes is free.
        """
        self.made_bytes = 0
        """Size of the squashes and anchors that this process has made, in bytes."""
        self.busy: str | None = None
        self._store = store
        self._holdings = holdings
        self._events = events
        self._add = add
        self._recover = recover
        self._catch_up = catch_up
        self._make_room = make_room
        self._free_bytes = math.inf
        """Free space when last measured."""
        self._short = False
        """Something was not started for lack of space, and will be checked again."""
        self._told: Gap | None = None
        """The last gap that was reported."""
        self._key = key
        self._source = source
        self._rungs = rungs
        self._anchor_every = anchor_every
        self._wakeup = Wakeup()
        self._asked: dict[Version, Promise] = {}
        self._askers: dict[Version, bytes] = {}
        """Base → the node that asked first."""
        self._speed_bytes_s = SQUASH_BYTES_S
        self._failed: set[Span] = set()
        self._stopped = threading.Event()
        self._throttle = BackgroundThrottle(live_traffic)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="p2pcast-keeping")

    def close(self) -> None:
        self._stopped.set()
        self._throttle.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def wake(self) -> None:
        """Called when a version was published, because there may be something to make."""
        self._wakeup.notify()

    async def run(self) -> None:
        while True:
            try:
                done = await self._next()
            except P2PCastError as error:
                logger.warning("%s: %s", self.busy, error)
                done = False
            finally:
                self.busy = None
            if not done:
                again = self._asked or self._short or self._anchor_due() or self.gap() is not None
                await self._wakeup.wait(RETRY_S if again else None)

    async def _next(self) -> bool:
        """Make the most urgent artifact. Returns False if there is none to make, or no space."""
        self._free_bytes = await asyncio.to_thread(self._store.free_bytes)
        if (gap := self.gap()) is not None and await self._close(gap):
            return True
        if self._asked:
            promise = next(iter(self._asked.values()))
            try:
                way = self._way(promise.base, promise.version)
                if self._has_room(f"squash {promise.base} to {promise.version}", self._room_for_squash(_bytes(way))):
                    await self._squash(way)
            finally:
                del self._asked[promise.base], self._askers[promise.base]
        elif self._anchor_due():
            return await self._anchor_if_room()
        elif (rung := self._rung()) is not None:
            way = self._way(*rung)
            if not self._has_room(f"squash {rung[0]} to {rung[1]}", self._room_for_squash(_bytes(way))):
                return False
            self._failed.add(rung)
            if await self._squash(way):
                self._failed.discard(rung)
        else:
            self._short = False
            return False
        return True

    # -- room

    def _has_room(self, what: str, need_bytes: float) -> bool:
        """Whether there is space for an artifact, and for what may follow it. Logs once until there is."""
        self.busy = what
        short = self._free_bytes < need_bytes
        if short and not self._short:
            logger.warning(
                "%s waits for room in %s: %.1f MB are free, and %.1f MB are kept for it and the next versions",
                what, self._store.root, self._free_bytes / 1e6, need_bytes / 1e6,
            )  # fmt: skip
        self._short = short
        return not short

    def _room_for_anchor(self) -> int:
        newest = max(self._store.artifacts.values(), key=lambda s: s.version)
        return newest.assembly.layout.nbytes + room_for_next(self._store.deltas())

    def _room_for_squash(self, parts_bytes: int) -> int:
        """The space that an optional squash must leave free: versions and the next anchor have priority."""
        return parts_bytes + self._room_for_anchor() + room_for_next(self._store.deltas())

    # -- gaps

    def gap(self) -> Gap | None:
        """Why a new peer cannot reach the newest version, or None if it can. Every older peer then can, too."""
        return find_gap(None, self._edges())

    async def _close(self, gap: Gap) -> bool:
        """Fetch lost artifacts from peers, or else make an anchor, which bypasses the gap. Returns False if neither is
        possible; the trainer's next version then closes the gap.
        """
        if gap != self._told:
            self._told = gap
            logger.error("%s; this hub asks its peers, or else makes a whole state of its shadow", gap)
            self._emit_gap(gap, None)
        self.busy = f"artifacts that lead to {gap.version}"
        if found := await self._recover(not self._leads_on()):
            for stored in found:
                self._add(stored)
            await self._catch_up()
        if (closed := self.gap() is None) or self._leads_on():
            if not closed:
                await self._make_room(self._room_for_anchor())
                await self._anchor()
            self._emit_gap(gap, "peers" if closed else "anchor")
            return True
        return False

    def _leads_on(self) -> bool:
        """Whether an anchor of the shadow would lead to the newest version."""
        shadow = self._source.shadow
        return shadow is not None and find_gap(shadow.version, self._edges()) is None

    def _emit_gap(self, gap: Gap, closed: str | None) -> None:
        self._events.emit("gap", version=str(gap.version), missing=str(gap.base), closed=closed)

    # -- anchors

    def _anchor_due(self) -> bool:
        """Whether ``anchor_every`` versions have passed since the newest whole state of this branch and layout."""
        head = self._store.newest()
        if head is None or self._source.shadow is None:
            return False
        stored = self._store.artifacts.values()
        since = max((s.version for s in stored if s.base is None), default=None)
        every = ANCHOR_EVERY if self._anchor_every is None else self._anchor_every
        return since is not None and len({s.version for s in stored if s.version > since}) >= every

    async def _anchor_if_room(self) -> bool:
        need_bytes = self._room_for_anchor()
        await self._make_room(need_bytes)
        self._free_bytes = await asyncio.to_thread(self._store.free_bytes)
        if fits := self._has_room("anchor", need_bytes):
            await self._anchor()
        return fits

    async def _anchor(self) -> None:
        store, urgent = self._store, self.gap() is not None

        def make(shadow: Shadow) -> Stored:
            with shadow.frozen() as frozen:

                def words(cell: Cell) -> Words:
                    self._wait_for_turn(pressed=urgent or frozen.nearly_full)
                    return frozen.words(cell)

                self.busy = f"anchor of {frozen.version}"
                known, state = store.manifest(frozen.version), int(frozen.digests.sum(dtype=np.uint64))
                if known is not None and known.state != state:
                    raise IntegrityError(f"the shadow is not the {frozen.version} that was published: restart the hub")
                files = store.all_files(frozen.version)
                return store.write_anchor(
                    self._key, secrets.token_bytes(16), frozen.version, shadow.layout, words, frozen.digests, files,
                    store.identity(frozen.version),
                )  # fmt: skip

        async with self._source.reading:
            shadow = self._source.shadow
            if shadow is None:
                return
            started = time.monotonic()
            stored = await self._in_thread(lambda: make(shadow))
            took_s = time.monotonic() - started
        logger.info("version %s is kept whole: %.1f MB", stored.version, stored.manifest.log / 1e6)
        self._keep(stored, took_s)

    # -- squashes

    def ask(self, base: Version, node: bytes = b"") -> Promise | None:
        """Promise a late peer (``node``) a squash from ``base`` to the newest version, or return None."""
        head = self._store.newest()
        if head is None or not self._rungs:
            return None
        edges = self._edges()
        there = next((e for e in edges if e.base == base and e.version == head), None)
        if there is not None:
            return Promise(base, head, there.bytes, 0.0)
        if base in self._asked:
            return self._asked[base]
        steps = self._chain(base, head)
        if len(steps) < 2 or len(self._asked) >= MAX_WAITING:
            return None
        if node and list(self._askers.values()).count(node) >= limits.MAX_SQUASHES_PER_NODE:
            return None
        layout = next(s.assembly.layout for s in self._store.artifacts.values() if s.version == head)
        size = expected_bytes(sum(e.bytes for e in steps), len(steps), self.exponent())
        if self._free_bytes < self._room_for_squash(size):
            return None
        links = len(self._fewest(base, head))
        ahead_s = sum(p.wait_s for p in self._asked.values())
        promise = Promise(base, head, size, ahead_s + links * layout.nbytes / self._speed_bytes_s)
        self._asked[base], self._askers[base] = promise, node
        self.wake()
        return promise

    def exponent(self) -> float:
        """The exponent by which this run's squashes shrink, relative to their deltas, the more deltas they join."""
        return fitted_exponent(self._ratios())

    def _ratios(self) -> list[tuple[int, float]]:
        found = []
        edges = self._edges()
        for edge in edges:
            if edge.base is not None:
                steps = self._chain(edge.base, edge.version)
                if len(steps) > 1:
                    found.append((len(steps), edge.bytes / max(1, sum(e.bytes for e in steps))))
        return found

    def _edges(self) -> list[Edge]:
        return [Edge(s.id, s.base, s.version, s.manifest.log) for s in self._store.artifacts.values()]

    def _chain(self, base: Version, version: Version) -> list[Edge]:
        """Return every single step between the two versions."""
        newest: dict[Version, Edge] = {}
        for edge in self._edges():
            if edge.base is not None and (
                edge.version not in newest or edge.base > (newest[edge.version].base or base)
            ):
                newest[edge.version] = edge
        path: list[Edge] = []
        at = version
        while at != base:
            step = newest.get(at)
            if step is None or step.base is None or step.base < base:
                return []
            path.append(step)
            at = step.base
        return path[::-1]

    def _path(self) -> list[Version]:
        """Versions up to the newest, each the base of the next, as far back as single steps go."""
        steps = {
            s.version: s.base
            for s in sorted(self._store.artifacts.values(), key=lambda s: s.base or Version(0, 0))
            if s.base
        }
        at = self._store.newest()
        path: list[Version] = [] if at is None else [at]
        while at is not None and (at := steps.get(at)) is not None:
            path.append(at)
        return path[::-1]

    def _rung(self) -> Span | None:
        if not self._rungs:
            return None
        path = self._path()
        made = [(e.base, e.version) for e in self._edges() if e.base is not None]
        self._failed = {span for span in self._failed if span[0] in path}
        return next(
            (
                (r.base, r.version)
                for r in missing_rungs(path, made, self._rungs)
                if (r.base, r.version) not in self._failed
            ),
            None,
        )

    def _way(self, base: Version, version: Version) -> list[Holding]:
        """Return the fewest artifacts that lead from ``base`` to ``version``."""
        return [self._holdings[e.artifact] for e in self._fewest(base, version)]

    def _fewest(self, base: Version, version: Version) -> list[Edge]:
        deltas = [e for e in self._edges() if e.base is not None]
        return cheapest_path(base, deltas, cost=lambda e: 1, target=version)

    async def _squash(self, parts: Sequence[Holding]) -> bool:
        """Make a squash. Returns False if there is nothing to join."""
        if len(parts) < 2:
            return False
        base = parts[0].open.base
        assert base is not None
        held = [h for h in self._holdings.values() if h.finished]
        before = replay_to(base, held)
        started = time.monotonic()
        stored = await self._in_thread(lambda: make_squash(self._store, self._key, parts, before, self._wait_for_turn))
        took_s = max(1e-3, time.monotonic() - started)
        links = len(parts) + (0 if before is None else before.links)
        self._speed_bytes_s = links * stored.assembly.layout.nbytes / took_s
        logger.info(
            "squash %s to %s: %.1f kB instead of %.1f kB, made in %.2f s", base, stored.version,
            stored.manifest.log / 1e3,
            _bytes(parts) / 1e3, took_s,
        )  # fmt: skip
        self._keep(stored, took_s)
        return True

    # -- both

    def _keep(self, stored: Stored, took_s: float) -> None:
        self.made_bytes += stored.manifest.log
        self._add(stored)
        base = None if stored.base is None else str(stored.base)
        self._events.emit(
            "kept", version=str(stored.version), base=base, bytes=stored.manifest.log, took_s=round(took_s, 3)
        )

    def _wait_for_turn(self, *, pressed: bool = False) -> None:
        """Called in the thread before each cell. Raises RetryableError when the hub exits."""
        self._throttle.take(pressed=pressed)
        if self._stopped.is_set():
            raise RetryableError("the hub ends")

    async def _in_thread(self, work: Callable[[], T]) -> T:
        async with self._throttle.watched():
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
