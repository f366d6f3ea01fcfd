"""The barrier of ``--commit barrier``: all engines switch together, in rounds of one version each.

A round begins when a version opens (or with the newest sealed version, if several were sealed meanwhile). All peers are
instructed to hold their shadows at that version. So a trainer that publishes faster than the fleet switches never takes
a staged version away from a peer. A round has one of these outcomes:

- *committed*: every awaited engine has staged the version, or the time-out has passed and a quorum of the peers has.
  The next round begins once they have switched, or after another time-out. A late peer is unready until it has the
  version.
- *failed*: the time-out has passed without a quorum. No engine switches. The round continues until there is a newer
  version, because peers may still reach the quorum.
- *superseded*: a newer version replaces this one. This happens after a failure, when no peer is awaited, and when a
  peer has staged a newer version, which it cannot undo. It also happens when a newer version is sealed and no peer has
  staged this one within EMPTY_TIMEOUTS time-outs.

The time-out starts when the first peer has staged the version: from then on, a peer could switch and is waiting for
others.

The barrier awaits the engines at joined peers that were in service when the round began: ready, and at the last
committed version. Before the first commit, it awaits every engine that has started. A peer has staged a version when
all its awaited engines have. An engine of a lost peer, or one that loses its weights, is no longer awaited. An engine
that joins during a round is not awaited, but switches with the others if it is in time.

No I/O. Time is passed in: ``handle(event, now)`` returns decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from p2pcast.ground.version import Version

EMPTY_TIMEOUTS = 10
"""Number of time-outs in which no peer has staged a version, after which a newer version replaces it."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An engine's state, as its peer reports it. ``ready``: it serves verified weights, those of ``committed``."""

    staged: Version | None = None
    committed: Version | None = None
    ready: bool = False

    def has(self, version: Version) -> bool:
        """Whether the engine could switch to ``version`` at once, or has switched."""
        return version in (self.staged, self.committed)

    def serves(self, version: Version) -> bool:
        """Whether the engine is ready at this version or a newer one."""
        return self.ready and self.committed is not None and self.committed >= version

    def is_past(self, version: Version) -> bool:
        return any(v is not None and v > version for v in (self.staged, self.committed))

    def is_beyond(self, version: Version | None) -> bool:
        """Whether the engine reports a version that is not known to be sealed."""
        return version is None or self.is_past(version)


# -- events


@dataclass(frozen=True, slots=True)
class Opened:
    """The hub has started to send a version."""

    version: Version


@dataclass(frozen=True, slots=True)
class Sealed:
    """A version is complete and durable."""

    version: Version


@dataclass(frozen=True, slots=True)
class VersionAborted:
    """A version will never be sealed."""

    version: Version


@dataclass(frozen=True, slots=True)
class PeerReported:
    """A joined peer reported its engines: those that have started, by name."""

    peer: str
    engines: Mapping[str, EngineReport]


@dataclass(frozen=True, slots=True)
class Left:
    peer: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Opened | Sealed | VersionAborted | PeerReported | Left | Tick


# -- decisions


@dataclass(frozen=True, slots=True)
class HoldShadows:
    """Shadows must not go beyond this version."""

    version: Version


@dataclass(frozen=True, slots=True)
class CommitVersion:
    """Engines may switch to this version. ``late``: awaited peers that have not staged it."""

    version: Version
    staged: int
    ready: int
    late: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """At the time-out there is no quorum: no engine switches."""

    version: Version
    staged: int
    ready: int
    needed: int
    late: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Superseded:
    version: Version
    by: Version


@dataclass(frozen=True, slots=True)
class Switched:
    """The round is over. ``missing``: each (peer, engine) that had staged the version but did not report the switch in
    time.
    """

    version: Version
    missing: tuple[tuple[str, str], ...]


Decision = HoldShadows | CommitVersion | Failed | Superseded | Switched


class BarrierPhase(Enum):
    IDLE = "idle"
    GATHERING = "gathering"
    FAILED = "failed"
    """The time-out has passed without a quorum; peers are still awaited."""
    SWITCHING = "switching"


@dataclass(slots=True)
class _Round:
    """``waited``: (peer, engine) → its version when it was first awaited."""

    version: Version
    waited: dict[tuple[str, str], Version | None] = field(default_factory=dict)
    phase: BarrierPhase = BarrierPhase.GATHERING
    since: float | None = None
    """When its version was found sealed."""
    deadline: float | None = None


class Barrier:
    """``target``: the last committed version. ``settled_at``: the time until which a restarted hub waits for its peers
    to rejoin.
    """

    def __init__(
        self, timeout_s: float, quorum: float, target: Version | None = None, settled_at: float = -math.inf
    ) -> None:
        self.target = target
        self._timeout_s = timeout_s
        self._quorum = quorum
        self._settled_at = settled_at
        self._peers: dict[str, Mapping[str, EngineReport]] = {}
        self._opening: Version | None = None
        self._newest: Version | None = target
        """The newest sealed version."""
        self._round: _Round | None = None

    # -- status

    @property
    def hold(self) -> Version | None:
        """The version at which a joining peer must hold its shadow."""
        return self.target if self._round is None else self._round.version

    @property
    def version(self) -> Version | None:
        """The current round's version."""
        return None if self._round is None else self._round.version

    @property
    def phase(self) -> BarrierPhase:
        return BarrierPhase.IDLE if self._round is None else self._round.phase

    @property
    def deadline(self) -> float | None:
        return None if self._round is None else self._round.deadline

    @property
    def counts(self) -> tuple[int, int, int]:
        """Number of peers that have staged the round's version, of awaited peers, and of peers that make a quorum."""
        if self._round is None:
            return 0, 0, 0
        every = {peer for peer, _ in self._round.waited}
        return len(every) - len(self._late(self._round)), len(every), self._needed(len(every))

    @property
    def late(self) -> tuple[str, ...]:
        """Awaited peers that have not staged the round's version yet."""
        return () if self._round is None else self._late(self._round)

    # -- events

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Return the decisions that follow from an event, to be carried out in order."""
        match event:
            case Opened(version):
                self._opening = version
            case Sealed(version):
                self._newest = version if self._newest is None else max(version, self._newest)
                if self._opening == version:
                    self._opening = None
            case VersionAborted(version):
                if self._opening == version:
                    self._opening = None
            case PeerReported(peer, engines):
                if self._peers.get(peer) == engines:
                    return []  # the usual case: most reports are unchanged
                self._peers[peer] = dict(engines)
            case Left(peer):
                self._peers.pop(peer, None)
            case Tick():
                pass
        out: list[Decision] = []
        while self._step(now, out):
            pass
        return out

    def _step(self, now: float, out: list[Decision]) -> bool:
        """Make one transition. Returns False if there is none to make."""
        this = self._round
        if this is None:
            return self._begin(out)
        self._forget_lost(this)
        if this.phase is BarrierPhase.SWITCHING:
            return self._switch(this, now, out)
        newest = self._newest
        if newest is None or newest < this.version:
            # Not sealed: wait for it, or drop the round if it never will be.
            if self._opening != this.version:
                self._round = None
                return True
            return False
        if this.since is None:
            this.since = now
        return self._gather(this, newest, now, out)

    def _begin(self, out: list[Decision]) -> bool:
        fresh = [v for v in (self._newest, self._opening) if v is not None and (self.target is None or v > self.target)]
        if not fresh:
            return False
        # A sealed version has priority, because peers can get it at once.
        self._round = _Round(fresh[0], self._in_service())
        out.append(HoldShadows(fresh[0]))
        return True

    def _gather(self, this: _Round, newest: Version, now: float, out: list[Decision]) -> bool:
        if now < self._settled_at:
            this.waited = self._in_service()
            return False
        if not this.waited:
            this.waited, this.phase, this.deadline = self._in_service(), BarrierPhase.GATHERING, None
        behind = newest > this.version
        past = [key for key in this.waited if self._engine(key).is_past(this.version)]
        # A report of a version that is not sealed does not end a round.
        if behind and (any(not self._engine(key).is_beyond(newest) for key in past) or not this.waited):
            return self._supersede(this, newest, out)
        for key in past:
            # The engine has a version unknown to this hub, and will not return to this one.
            del this.waited[key]
        staged, ready, needed = self.counts
        if staged and this.deadline is None:
            this.deadline = now + self._timeout_s
        late_by = -math.inf if this.deadline is None else now - this.deadline
        if ready and (staged == ready or (late_by >= 0 and staged >= needed)):
            return self._commit(this, now, out)
        if late_by >= 0 and this.phase is BarrierPhase.GATHERING:
            this.phase = BarrierPhase.FAILED
            out.append(Failed(this.version, staged, ready, needed, self._late(this)))
        assert this.since is not None
        hopeless = not staged and now - this.since >= EMPTY_TIMEOUTS * self._timeout_s
        if behind and (this.phase is BarrierPhase.FAILED or hopeless):
            return self._supersede(this, newest, out)
        return False

    def _commit(self, this: _Round, now: float, out: list[Decision]) -> bool:
        staged, ready, _ = self.counts
        late = self._late(this)
        out.append(CommitVersion(this.version, staged, ready, late))
        self.target = this.version
        this.phase, this.deadline = BarrierPhase.SWITCHING, now + self._timeout_s
        this.waited = {key: at for key, at in this.waited.items() if key[0] not in late}
        return True

    def _switch(self, this: _Round, now: float, out: list[Decision]) -> bool:
        missing = tuple(key for key in this.waited if not self._engine(key).serves(this.version))
        assert this.deadline is not None
        if missing and now < this.deadline:
            return False
        out.append(Switched(this.version, missing))
        self._round = None
        return True

    def _supersede(self, this: _Round, newest: Version, out: list[Decision]) -> bool:
        out.append(Superseded(this.version, newest))
        self._round = None
        return True

    # -- awaited engines

    def _in_service(self) -> dict[tuple[str, str], Version | None]:
        return {
            (peer, name): engine.committed
            for peer, engines in self._peers.items()
            for name, engine in engines.items()
            if self.target is None or engine.serves(self.target)
        }

    def _forget_lost(self, this: _Round) -> None:
        """Remove engines that are gone or have lost their weights. During the switch, an engine may briefly have no
        weights.
        """
        for key, was_at in list(this.waited.items()):
            engine = self._peers.get(key[0], {}).get(key[1])
            lost = engine is not None and was_at is not None and engine.committed is None
            if engine is None or (lost and this.phase is not BarrierPhase.SWITCHING):
                del this.waited[key]

    def _late(self, this: _Round) -> tuple[str, ...]:
        return tuple(sorted({key[0] for key in this.waited if not self._engine(key).has(this.version)}))

    def _engine(self, key: tuple[str, str]) -> EngineReport:
        return self._peers[key[0]][key[1]]

    def _needed(self, ready: int) -> int:
        return max(1, math.ceil(self._quorum * ready - 1e-9))
