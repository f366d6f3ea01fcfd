"""The link to a peer's parent: the planned parent, a backup if that is lost, and finally the hub. If none of them can
be reached, a neighbour feeds the peer (topology.fallback_neighbours). ``rollout_node.sync.downloader`` pulls the rest.

Guarantees:

- A lost parent is replaced by the next candidate at once.
- The peer reports the pieces it holds, so none is sent twice.

A candidate that does not answer delays the next one by at most a head start. A candidate that has just failed is not
tried again before the others. When a new plan replaces a parent, the old one sends until its successor answers, unless
this peer lags and slows down the parent's other children. The neighbour is left as soon as a candidate answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from p2pcast.ground.addresses import show_address
from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import P2PCastError
from p2pcast.ground.private_random import uniform
from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.relay.upstream import ReceivingNode, Upstream
from p2pcast.transport.dial import Stripes
from rollout_node.sync.connector import Connector, Place

logger = logging.getLogger("p2pcast.peer")

RETRY_MIN_S = 0.1
RETRY_MAX_S = 3.0
"""Bounds in seconds on the delay between rounds over all candidates."""
RETRY_WANTING_S = 0.5
"""Longest delay in seconds while artifacts are only partly received."""
LOOP_RETRY_S = 0.1
LOOP_TRIES = 20
"""Delay in seconds and number of retries for a planned parent that is still below this peer until it moves too."""
HEAD_START_S = 0.3
"""During a transfer, seconds that a candidate has to answer before the next one is dialled too: half the time that
opening a link takes at a round trip of 150 ms.
"""
CALM_S = 1.5
"""The same while there is no transfer, which gives a busy parent more time."""
AVOID_S = 5.0
"""Seconds for which a failed candidate is the last choice, unless a new plan names it."""

Epoch = tuple[int, int]


@dataclass(slots=True)
class PlanOrders:
    """This peer's part of the plan. ``parent``: None means the hub."""

    epoch: Epoch = (0, 0)
    parent: Place | None = None
    backups: list[Place] = field(default_factory=list)


class PlanningHub(Protocol):
    """The hub (rollout_node.control.hub_session) as the parent of last resort and the receiver of reports."""

    @property
    def hub(self) -> bytes:
        """The hub's node id."""

    @property
    def place(self) -> Place:
        """The hub's node id and address."""

    def changed(self) -> None:
        """Send a report at once."""


class ParentTimeline(Protocol):
    def attached(self, parent: bytes | None) -> None: ...


class SavedPlaces(Protocol):
    """Saves the nodes that the hub has named (rollout_node.control.saved_hub_state)."""

    def keep_neighbourhood(
        self, hub: bytes, parent: Place | None, backups: list[Place], neighbours: list[Place]
    ) -> None: ...


class DialParent(Protocol):
    """Opens a link to a parent without starting it. Raises P2PCastError."""

    async def __call__(self, place: Place, *, beside: bool, on_dial_failed: Callable[[], None]) -> Upstream: ...


def parent_dialler(node: ReceivingNode, connector: Connector, stripes: Stripes) -> DialParent:
    async def dial(place: Place, *, beside: bool, on_dial_failed: Callable[[], None]) -> Upstream:
        build = partial(Upstream, node, live=True, beside=beside)
        return await connector.reach(build, place, stripes, call=not beside, on_dial_failed=on_dial_failed)

    return dial


class ParentFailover:
    """``is_wanting``: whether the node is missing a part of an artifact, so that failover must be quick."""

    def __init__(
        self,
        dial_parent: DialParent,
        is_wanting: Callable[[], bool],
        hub: PlanningHub,
        timeline: ParentTimeline,
        saved: SavedPlaces,
    ) -> None:
        """``timeline`` receives the parent whenever the link to it may have changed; ``saved`` saves the nodes that the
        hub has named.
        """
        self.orders = PlanOrders()
        self.place: Place | None = None
        """The parent that currently feeds this peer, and where it listens."""
        self.live: Upstream | None = None
        self.beside: Upstream | None = None
        """The link to a neighbour, while no candidate answers."""
        self._moved_at = 0.0
        self.settled: Epoch = (0, 0)
        """The newest plan that was followed, or could not be; reports contain its epoch."""
        self._dial_parent = dial_parent
        self._is_wanting = is_wanting
        self._hub = hub
        self._timeline = timeline
        self._saved = saved
        self._avoided: dict[bytes, float] = {}
        self._moving = False
        """Whether the link was closed to follow a new plan, and not because the parent failed."""
        self._ordered = asyncio.Event()
        self._news = Wakeup()
        """Rings for each new plan."""
        self.neighbours: list[Place] = []
        """The neighbours in the hub's last message."""
        self._introduced = Wakeup()
        self._without_parent = asyncio.Event()
        """Set while no candidate answers."""
        self._dial_failures = Wakeup()
        """Rings when dialling a candidate has failed, and only being dialled by it is left."""

    def order(self, epoch: Epoch, parent: Place | None, backups: list[Place]) -> None:
        """Follow a plan from the hub. Older plans are ignored."""
        if epoch <= self.orders.epoch:
            return
        self.orders = PlanOrders(epoch, parent, backups)
        wanted = (parent or self._hub.place)[0]
        self._avoided.pop(wanted, None)
        if self.parent == wanted:
            self.settled = epoch
        self._ordered.set()
        self._news.notify()
        self._changed()
        self._keep_places()

    def recall(self, parent: Place | None, backups: list[Place], neighbours: list[Place]) -> None:
        """Restore an earlier process's orders, for a start without the hub. Any plan from the hub is newer."""
        self.orders, self.neighbours = PlanOrders((0, 0), parent, backups), neighbours
        self._ordered.set()

    def introduce(self, neighbours: list[Place]) -> None:
        """Set the neighbours named by the hub."""
        self.neighbours = neighbours
        self._introduced.notify()
        self._keep_places()

    def _changed(self) -> None:
        self._timeline.attached(self.parent)
        self._hub.changed()

    def _keep_places(self) -> None:
        self._saved.keep_neighbourhood(self._hub.hub, self.orders.parent, self.orders.backups, self.neighbours)

    async def run(self) -> None:
        """Keep the peer attached to a parent or a neighbour, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_plan(), name="parent")
            group.create_task(self._exchange(), name="neighbours")

    @property
    def moved_at(self) -> float:
        """When a parent was last found or lost, by the loop's clock; now, if its link has just closed."""
        lost = self.live is not None and self.live.link.closed
        return asyncio.get_running_loop().time() if lost else self._moved_at

    @property
    def feeding(self) -> Upstream | None:
        """The link to the parent; None if there is none or it has just closed."""
        return None if self.live is None or self.live.link.closed else self.live

    @property
    def parent(self) -> bytes | None:
        """The node that currently feeds this peer; a newer plan may name a different one."""
        return None if self.place is None else self.place[0]

    @property
    def receiving(self) -> Version | None:
        """The oldest version that the parent is currently sending."""
        live = self.feeding
        handles = () if live is None else live.handles.values()
        coming = (h.open.version for h in handles if h is not None and h.source is live)
        return min(coming, default=None)

    async def _follow_plan(self) -> None:
        await self._ordered.wait()
        loop = asyncio.get_running_loop()
        backoff, loops = Backoff(RETRY_MIN_S, RETRY_MAX_S, uniform), 0
        found: tuple[Place, Upstream] | None = None
        while True:
            if found is None:
                if self._all_avoided():
                    self._without_parent.set()
                    await asyncio.sleep(backoff.next_s(RETRY_WANTING_S if self._is_wanting() else None))
                orders = self.orders
                found = await self._first_to_answer(self._ranked())
                if found is None:
                    continue
                self.settled = orders.epoch
            place, upstream = found
            self._without_parent.clear()
            if self.beside is not None:
                # Drop the neighbour first: the parent is then asked for what the neighbour was sending.
                self.beside.link.abort()
            upstream.start(self._changed)
            self.live, self.place = upstream, place
            self._moved_at = loop.time()
            self._changed()
            error, found = await self._receive(upstream)
            self.live = self.place = None
            attached_s, self._moved_at = loop.time() - self._moved_at, loop.time()
            if attached_s > RETRY_MAX_S:
                backoff.reset()
            if found is not None or self._moving:
                self._moving = False
            elif upstream.looped and loops < LOOP_TRIES:
                # The same plan is about to move the parent.
                loops += 1
                await asyncio.sleep(LOOP_RETRY_S)
            else:
                loops = 0
                self._avoided[place[0]] = loop.time()
                logger.info("lost parent %s%s", upstream.link.name, f": {error}" if error else "")

    async def _receive(self, upstream: Upstream) -> tuple[P2PCastError | None, tuple[Place, Upstream] | None]:
        """Receive until the link closes. Returns its error, and the link to the planned parent if that replaces it."""
        serving = asyncio.create_task(upstream.run(), name="parent's link")
        turning = asyncio.create_task(self._next_parent(upstream), name="next parent")
        found: tuple[Place, Upstream] | None = None
        try:
            await asyncio.wait({serving, turning}, return_when=asyncio.FIRST_COMPLETED)
            if turning.done():
                found = turning.result()
                # The new parent resends what is still in flight: it learns only now which pieces are here.
                upstream.link.close()
            return await serving, found
        finally:
            for task in (serving, turning):
                task.cancel()
            await asyncio.wait({serving, turning})
            if found is None and not turning.cancelled() and turning.exception() is None:
                turning.result()[1].link.abort()

    async def _next_parent(self, upstream: Upstream) -> tuple[Place, Upstream]:
        """Return once the plan names a different parent and that parent answers. Until then the current parent stays,
        and reports name it.
        """
        while True:
            orders = self.orders
            place = orders.parent or self._hub.place
            if place[0] == self.parent or orders.epoch == self.settled:
                # The planned parent already feeds this peer, or was tried and is lost or unreachable.
                await self._news.wait()
            elif upstream.lag.lags:
                self._moving = True
                upstream.link.close()
                await self._news.wait()
            else:
                found = await self._before(self._news, self._attach(place))
                if self.orders is not orders:
                    if found is not None:
                        found.link.abort()
                elif found is not None:
                    self.settled = orders.epoch
                    return place, found
                else:
                    self._avoided[place[0]] = asyncio.get_running_loop().time()
                    self.settled = orders.epoch
                    self._changed()
                    await self._news.wait()

    @staticmethod
    async def _before(bell: Wakeup, attaching: Coroutine[None, None, Upstream | None]) -> Upstream | None:
        """Return the link, or None if the bell rings first."""
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
        """Return the planned parent, the backups and the hub, without those that have just failed. If all have, return
        the one that failed longest ago.
        """
        now = asyncio.get_running_loop().time()
        self._avoided = {n: t for n, t in self._avoided.items() if now - t < AVOID_S}
        every: dict[bytes, Place] = {}
        for place in self._candidates():
            every.setdefault(place[0], place)
        ranked = sorted(every.values(), key=lambda c: self._avoided.get(c[0], 0.0))
        return [c for c in ranked if c[0] not in self._avoided] or ranked[:1]

    async def _first_to_answer(self, places: list[Place]) -> tuple[Place, Upstream] | None:
        """Dial the candidates with staggered starts, and return the first link that comes up. Candidates that failed or
        were slower are avoided.
        """
        loop = asyncio.get_running_loop()
        left = list(places)
        head_start_s = HEAD_START_S if self._is_wanting() else CALM_S
        dials: dict[asyncio.Task[Upstream | None], Place] = {}
        try:
            while left or dials:
                if left:
                    place = left.pop(0)
                    dials[asyncio.create_task(self._attach(place), name=f"dial {place[1]}:{place[2]}")] = place
                # The last candidate gets all the time that it needs; meanwhile, neighbours may feed this peer.
                started, timeout_s = loop.time(), None if self._without_parent.is_set() and not left else head_start_s
                failing = asyncio.create_task(self._dial_failures.wait(), name="in doubt")
                ended, _ = await asyncio.wait({*dials, failing}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                failing.cancel()
                await asyncio.wait([failing])
                done = [task for task in dials if task in ended]
                if not done and not left and loop.time() - started >= head_start_s:
                    self._without_parent.set()
                for task in done:
                    place, upstream = dials.pop(task), task.result()
                    if upstream is not None:
                        return place, upstream
                    self._avoided[place[0]] = loop.time()
            return None
        finally:
            for task, place in dials.items():
                task.cancel()
                self._avoided[place[0]] = loop.time()
            if dials:
                await asyncio.wait(dials)
            for task in dials:
                if not task.cancelled() and task.exception() is None and (late := task.result()) is not None:
                    late.link.abort()

    def _candidates(self) -> list[Place]:
        hub = self._hub.place
        return [self.orders.parent or hub, *self.orders.backups, hub]

    def _all_avoided(self) -> bool:
        """Whether every candidate has just failed."""
        return all(node in self._avoided for node, _, _ in self._candidates())

    async def _exchange(self) -> None:
        """While no candidate answers, receive what a neighbour holds."""
        while True:
            await self._without_parent.wait()
            for place in list(self.neighbours):
                upstream = await self._attach(place, beside=True)
                if upstream is None:
                    continue
                if not self._without_parent.is_set():
                    upstream.link.abort()
                    break
                self.beside = upstream
                upstream.start()
                logger.info("no parent answers; receiving what %s holds", upstream.link.name)
                await upstream.run()
                self.beside = None
                if not self._without_parent.is_set():
                    break
            # No neighbour answered, or the link to one has closed. Candidates are being dialled meanwhile.
            await self._introduced.wait(RETRY_MIN_S)

    async def _attach(self, place: Place, *, beside: bool = False) -> Upstream | None:
        """Return a link that is connected but not started; None if dialling failed."""
        try:
            return await self._dial_parent(place, beside=beside, on_dial_failed=self._dial_failures.notify)
        except P2PCastError as error:
            logger.info("cannot attach to %s: %s", show_address(*place[1:]), error)
            return None
