"""Whom a peer receives from: its parent by plan, an ancestor when that is lost, the hub in the end; a peer beside it when all of these are out of reach.
What it lacks besides it pulls (``rollout_node.pulling``).

Promises: a lost parent is left for the next candidate at once, with what is held stated piece by piece, so nothing is sent twice; one that does not answer
holds nobody up, since the next is dialled beside it; a candidate that just failed is not tried again before the others. A parent that a new plan replaces goes on
sending until its successor answers, unless we lag behind it and are in others' way there. Whoever is beside us (topology.sideways) is left as soon as somebody above answers.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from p2pcast.addresses import show_address
from p2pcast.bell import Bell
from p2pcast.errors import P2PCastError
from p2pcast.relay.node import Node
from p2pcast.relay.upstream import Upstream
from p2pcast.transport.dial import Stripes
from p2pcast.version import Version
from rollout_node.dialling import Dialling, Place

logger = logging.getLogger("p2pcast.peer")

RETRY_MIN_S = 0.1
RETRY_MAX_S = 3.0
RETRY_WANTING_S = 0.5
"""At most, while something half received waits for somebody above to come back."""
LOOP_RETRY_S = 0.1
LOOP_TRIES = 20
HEAD_START_S = 0.3
"""For a candidate to answer, before the next one is dialled too, while a transfer runs: half of what it takes to bring a link up at a round trip of 150 ms."""
CALM_S = 1.5
"""And while nothing is on its way here: nobody waits, and a parent that is busy is not to be passed by."""
SHUN_S = 5.0
"""A candidate that failed is the last choice for so long, unless a new plan names it."""

Epoch = tuple[int, int]


@dataclass(slots=True)
class Orders:
    """The plan as far as it concerns this peer; ``parent`` None: the hub."""

    epoch: Epoch = (0, 0)
    parent: Place | None = None
    backups: list[Place] = field(default_factory=list)


class Attachment:
    def __init__(
        self,
        node: Node,
        dialling: Dialling,
        hub: Callable[[], Place],
        stripes: Stripes,
        changed: Callable[[], None],
    ) -> None:
        self.orders = Orders()
        self.place: Place | None = None
        """Where the node listens that feeds us now."""
        self.live: Upstream | None = None
        self.beside: Upstream | None = None
        """From a peer that has lost all above it, as we have."""
        self._moved_at = 0.0
        self.settled: Epoch = (0, 0)
        """The newest plan that has been followed, or could not be: what we say of our place is said of this one."""
        self._node = node
        self._dialling = dialling
        self._hub = hub
        self._stripes = stripes
        self._changed = changed
        self._shunned: dict[bytes, float] = {}
        self._moving = False
        """The link was closed for a new plan: that is no fault of the parent."""
        self._ordered = asyncio.Event()
        self._news = Bell()
        """Rings for each new plan."""
        self.on_places: Callable[[], None] = lambda: None
        """Called when the hub has named other nodes to turn to."""
        self.neighbours: list[Place] = []
        """Beside us, by the hub's last word."""
        self._introduced = Bell()
        self._orphaned = asyncio.Event()
        """Nobody above has answered."""
        self._doubts = Bell()
        """Rings when somebody could not be dialled, and is waited for all the same: it has been called."""

    def order(self, epoch: Epoch, parent: Place | None, backups: list[Place]) -> None:
        """A plan from the hub. Older ones are ignored."""
        if epoch <= self.orders.epoch:
            return
        self.orders = Orders(epoch, parent, backups)
        wanted = (parent or self._hub())[0]
        self._shunned.pop(wanted, None)
        if self.parent == wanted:
            self.settled = epoch
        self._ordered.set()
        self._news.ring()
        self._changed()
        self.on_places()

    def recall(self, parent: Place | None, backups: list[Place], neighbours: list[Place]) -> None:
        """What an earlier process was told, for a start without the hub; whatever the hub says is newer."""
        self.orders, self.neighbours = Orders((0, 0), parent, backups), neighbours
        self._ordered.set()

    def introduce(self, neighbours: list[Place]) -> None:
        """Whom to turn to when nobody above answers."""
        self.neighbours = neighbours
        self._introduced.ring()
        self.on_places()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_plan(), name="parent")
            group.create_task(self._exchange(), name="neighbours")

    @property
    def moved_at(self) -> float:
        """When a parent was last found or lost: this moment, if its link has just been closed."""
        lost = self.live is not None and self.live.link.closed
        return asyncio.get_running_loop().time() if lost else self._moved_at

    @property
    def feeding(self) -> Upstream | None:
        """The link to the parent, unless it has just been closed."""
        return None if self.live is None or self.live.link.closed else self.live

    @property
    def parent(self) -> bytes | None:
        """The node that feeds us now; a newer plan may name another, and not this one any more."""
        return None if self.place is None else self.place[0]

    @property
    def receiving(self) -> Version | None:
        """The oldest version that the parent is sending just now."""
        live = self.feeding
        handles = () if live is None else live.handles.values()
        coming = (
            h.open.version for h in handles if h is not None and h.source is live and h.completed_at is None and not h.aborted
        )
        return min(coming, default=None)

    async def _follow_plan(self) -> None:
        await self._ordered.wait()
        loop = asyncio.get_running_loop()
        wait_s, loops = RETRY_MIN_S, 0
        found: tuple[Place, Upstream] | None = None
        while True:
            if found is None:
                if self._all_shunned():
                    self._orphaned.set()
                    if self._node.wants():
                        wait_s = min(RETRY_WANTING_S, wait_s)
                    await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))
                    wait_s = min(RETRY_MAX_S, wait_s * 2)
                orders = self.orders
                found = await self._first_to_answer(self._ranked())
                if found is None:
                    continue
                self.settled = orders.epoch
            place, upstream = found
            self._orphaned.clear()
            if self.beside is not None:
                # First of all: what it was sending is asked for above.
                self.beside.link.abort()
            upstream.on_lag = self._changed
            upstream.start(upstream.link)
            self.live, self.place = upstream, place
            self._moved_at = loop.time()
            self._changed()
            error, found = await self._receive(upstream)
            self.live = self.place = None
            attached_s, self._moved_at = loop.time() - self._moved_at, loop.time()
            if attached_s > RETRY_MAX_S:
                wait_s = RETRY_MIN_S
            if found is not None or self._moving:
                self._moving = False
            elif upstream.looped and loops < LOOP_TRIES:
                # The parent is still to be moved by the same plan.
                loops += 1
                await asyncio.sleep(LOOP_RETRY_S)
            else:
                loops = 0
                self._shunned[place[0]] = loop.time()
                logger.info("lost parent %s%s", upstream.link.name, f": {error}" if error else "")

    async def _receive(self, upstream: Upstream) -> tuple[P2PCastError | None, tuple[Place, Upstream] | None]:
        """Until the link ends: why, and the planned parent's, if that is the reason."""
        serving = asyncio.create_task(upstream.run(), name="parent's link")
        turning = asyncio.create_task(self._next_parent(upstream), name="next parent")
        found: tuple[Place, Upstream] | None = None
        try:
            await asyncio.wait({serving, turning}, return_when=asyncio.FIRST_COMPLETED)
            if turning.done():
                found = turning.result()
                # What is still on its way comes again from there: it is told only now what we hold.
                upstream.link.close()
            return await serving, found
        finally:
            for task in (serving, turning):
                task.cancel()
            await asyncio.wait({serving, turning})
            if found is None and not turning.cancelled() and turning.exception() is None:
                turning.result()[1].link.abort()

    async def _next_parent(self, upstream: Upstream) -> tuple[Place, Upstream]:
        """Return as soon as the plan names another parent than the one that feeds us, and that one answers. If it does not, we stay, and say so."""
        while True:
            orders = self.orders
            place = orders.parent or self._hub()
            if place[0] == self.parent or orders.epoch == self.settled:
                # There already; or this plan's parent was tried, and lost or found out of reach.
                await self._news.wait()
            elif upstream.lag.lags:
                self._moving = True
                upstream.link.close()
                await self._news.wait()
            else:
                found = await self._before(self._news, self._attach(place, live=True))
                if self.orders is not orders:
                    if found is not None:
                        found.link.abort()
                elif found is not None:
                    self.settled = orders.epoch
                    return place, found
                else:
                    self._shunned[place[0]] = asyncio.get_running_loop().time()
                    self.settled = orders.epoch
                    self._changed()
                    await self._news.wait()

    @staticmethod
    async def _before(bell: Bell, attaching: Coroutine[None, None, Upstream | None]) -> Upstream | None:
        """The link, unless the bell rings first."""
        ringing = asyncio.create_task(bell.wait(), name="new plan")
        dialling = asyncio.create_task(attaching, name="dial the planned parent")
        try:
            await asyncio.wait({ringing, dialling}, return_when=asyncio.FIRST_COMPLETED)
            return dialling.result() if dialling.done() else None
        finally:
            for task in (ringing, dialling):
                task.cancel()
            await asyncio.wait({ringing, dialling})

    def _ranked(self) -> list[Place]:
        """The planned parent, the backups, the hub: those first that have not just failed, then the one that failed longest ago, alone."""
        now = asyncio.get_running_loop().time()
        self._shunned = {n: t for n, t in self._shunned.items() if now - t < SHUN_S}
        every: dict[bytes, Place] = {}
        for place in self._candidates():
            every.setdefault(place[0], place)
        ranked = sorted(every.values(), key=lambda c: self._shunned.get(c[0], 0.0))
        return [c for c in ranked if c[0] not in self._shunned] or ranked[:1]

    async def _first_to_answer(self, places: list[Place]) -> tuple[Place, Upstream] | None:
        """Dial one after the other, each with a head start; the first link that is up. Those that failed or were overtaken are shunned."""
        loop = asyncio.get_running_loop()
        left = list(places)
        head_start_s = HEAD_START_S if self._node.wants() else CALM_S
        dials: dict[asyncio.Task[Upstream | None], Place] = {}
        try:
            while left or dials:
                if left:
                    place = left.pop(0)
                    dials[asyncio.create_task(self._attach(place, live=True), name=f"dial {place[1]}:{place[2]}")] = place
                # The last one is waited for; but if it takes long we are orphans meanwhile.
                started, timeout_s = loop.time(), None if self._orphaned.is_set() and not left else head_start_s
                doubting = asyncio.create_task(self._doubts.wait(), name="in doubt")
                ended, _ = await asyncio.wait({*dials, doubting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                doubting.cancel()
                await asyncio.wait([doubting])
                done = [task for task in dials if task in ended]
                if not done and not left and loop.time() - started >= head_start_s:
                    self._orphaned.set()
                for task in done:
                    place, upstream = dials.pop(task), task.result()
                    if upstream is not None:
                        return place, upstream
                    self._shunned[place[0]] = loop.time()
            return None
        finally:
            for task, place in dials.items():
                task.cancel()
                self._shunned[place[0]] = loop.time()
            if dials:
                await asyncio.wait(dials)
            for task in dials:
                if not task.cancelled() and task.exception() is None and (late := task.result()) is not None:
                    late.link.abort()

    def _candidates(self) -> list[Place]:
        hub = self._hub()
        return [self.orders.parent or hub, *self.orders.backups, hub]

    def _all_shunned(self) -> bool:
        """There is nobody left to try at once."""
        return all(node in self._shunned for node, _, _ in self._candidates())

    async def _exchange(self) -> None:
        """As an orphan: receive what a neighbour has, until somebody above answers."""
        while True:
            await self._orphaned.wait()
            for place in list(self.neighbours):
                upstream = await self._attach(place, live=True, beside=True)
                if upstream is None:
                    continue
                if not self._orphaned.is_set():
                    upstream.link.abort()
                    break
                self.beside = upstream
                upstream.start(upstream.link)
                logger.info("nobody above answers; receiving what %s holds", upstream.link.name)
                await upstream.run()
                self.beside = None
                if not self._orphaned.is_set():
                    break
            # Those above are dialled meanwhile; here nobody has answered, or the one that did is gone.
            await self._introduced.wait(RETRY_MIN_S)

    async def _attach(self, place: Place, *, live: bool, beside: bool = False) -> Upstream | None:
        """A link that is up, not started yet."""
        upstream = Upstream(self._node, live=live, beside=beside)
        try:
            upstream.link = await self._dialling.reach(
                upstream, place, self._stripes, call=not beside, doubtful=self._doubts.ring
            )
        except P2PCastError as error:
            logger.info("cannot attach to %s: %s", show_address(*place[1:]), error)
            return None
        return upstream
