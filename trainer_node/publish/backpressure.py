"""Backpressure on the trainer: with ``--max-lag K``, no version begins while an engine is more than K versions behind.

Guarantees: the hub does not wait for a peer without a reachable engine, or for a detached peer. It waits for one peer
at most ``--max-lag-wait``, and does not wait for that peer again until it has been within the limit. The hub reports
each peer once when it starts or stops waiting for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from p2pcast.ground.version import Version
from p2pcast.process.events import Events
from trainer_node.membership.peer_record import PeerRecord

logger = logging.getLogger("p2pcast.hub")

NO_ENGINE = "none of its engines is in reach"
DETACHED = "too slow for the others"


@dataclass(frozen=True, slots=True)
class PeersBehind:
    """Peers by id. ``late``: the names of peers that are behind. ``excused``: name and reason of peers that are behind
    but that the hub does not wait for.
    """

    late: dict[str, str] = field(default_factory=dict)
    excused: dict[str, tuple[str, str]] = field(default_factory=dict)


def laggards(
    peers: Iterable[PeerRecord], versions: Iterable[Version], most: int, detached: Collection[str] = ()
) -> PeersBehind:
    """Return the peers with an engine that is more than ``most`` of ``versions`` behind. An engine that has no version
    is behind all of them. Pure.
    """
    newest = sorted(set(versions), reverse=True)
    if len(newest) <= most:
        return PeersBehind()
    # A peer at this version or a later one is missing at most ``most`` versions.
    needed = newest[most]
    late, excused = {}, {}
    for peer in peers:
        started = [engine for engine in peer.engines if engine.started]
        if not started:
            # A relay without engines is normal; an engine that has never answered is not.
            if peer.engines:
                excused[peer.ident] = (peer.name, NO_ENGINE)
        elif any(engine.committed is None or engine.committed < needed for engine in started):
            if peer.ident in detached:
                excused[peer.ident] = (peer.name, DETACHED)
            else:
                late[peer.ident] = peer.name
    return PeersBehind(late, excused)


class Backpressure:
    """``most``: the limit in versions, or None for no limit. ``behind`` returns the peers that exceed a limit.
    ``wait_s``: how long one peer may hold back versions, in seconds; 0 for no limit.
    """

    def __init__(self, most: int | None, behind: Callable[[int], PeersBehind], wait_s: float, events: Events) -> None:
        self._most = most
        self._behind = behind
        self._wait_s = wait_s
        self._events = events
        self._recheck = asyncio.Event()
        self._since: dict[str, float] = {}
        """Peer → since when it has held back versions."""
        self._given_up: dict[str, str] = {}
        """Peer → why the hub no longer waits for it; the entry stays until the peer is within the limit."""
        self.waiting_for: list[str] = []
        """Names of the peers that are holding back a version."""
        self.not_waited_for: dict[str, str] = {}
        """Names of peers that are behind but do not hold back versions → why."""

    def recheck(self) -> None:
        """Check again; called when a peer has committed a version or left."""
        self._recheck.set()

    async def until_caught_up(self) -> None:
        """Wait until no peer that counts is further behind than allowed."""
        if self._most is None:
            return
        loop = asyncio.get_running_loop()
        try:
            while late := self._late(self._most, loop.time()):
                if not self.waiting_for:
                    logger.info(
                        "publishing waits: more than %d versions behind: %s",
                        self._most,
                        ", ".join(sorted(late.values())),
                    )
                self.waiting_for = list(late.values())
                self._recheck.clear()
                try:
                    async with asyncio.timeout_at(
                        min(self._since[ident] for ident in late) + self._wait_s if self._wait_s else None
                    ):
                        await self._recheck.wait()
                except TimeoutError:
                    pass
        finally:
            self.waiting_for = []
            self._since.clear()

    def _late(self, most: int, now: float) -> dict[str, str]:
        """Return the peers to wait for, with their names. Reports peers that are newly not waited for."""
        lag = self._behind(most)
        self._given_up = {ident: why for ident, why in self._given_up.items() if ident in lag.late}
        self._since = {ident: self._since.get(ident, now) for ident in lag.late}
        for ident, since in self._since.items():
            if self._wait_s and now - since >= self._wait_s:
                self._given_up.setdefault(ident, f"held back versions for {self._wait_s:g} s")
        rows = {lag.late[ident]: why for ident, why in self._given_up.items()} | dict(lag.excused.values())
        for name, why in rows.items():
            if name not in self.not_waited_for:
                self._events.emit("not_waited_for", peer=name, why=why)
                logger.warning("publishing does not wait for %s, which is behind: %s", name, why)
        self.not_waited_for = rows
        return {ident: name for ident, name in lag.late.items() if ident not in self._given_up}
