"""An engine whose workers run on several hosts, with a peer on each: the peer that leads. The others: ``rollout_node.member``.

Promises: the server is told to read a version only while all members stand still there; what a member's workers report counts once, or is given up for lost
before anybody acts as if it had been heard; a lead that does not get all members to one version gives up that version, and the engine goes on serving the old
one. A node is a member only if the hub names it. A member counts (is waited for, missed, or speaks for a rank) only once a worker of this engine has answered
through it: workers get the question's nonce from their server, so a node without a server cannot answer. A rank belongs to one host at a time. Where to meet is a pure decision, ``meeting``. Protocol: docs/wire-protocol.md, section 7.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from p2pcast import limits
from p2pcast.bell import Bell
from p2pcast.errors import P2PCastError, RefusedError, RemoteError, RetryableError
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.version import Version
from p2pcast.wire.connection import Event, Message
from p2pcast.wire.messages import Body, Type
from rollout_node.install_socket import InstallSocket, Report

logger = logging.getLogger("p2pcast.peer")

BEAT_S = 1.0
"""Between a lead's PINGs."""
SILENCE_S = 5.0
"""A connection on which nothing has been heard for so long is dead."""
LOST_S = 5.0
"""How long a lead waits for a member that is gone, before it takes what the member's workers reported for lost."""
PATIENCE_S = 60.0
"""A lead that stands still waits so long for its members, counted anew whenever one of them gets further."""


# -- decisions


class Standing(NamedTuple):
    """Where a member's shadow is, and whether it is held there for the lead."""

    version: Version | None
    still: bool


@dataclass(frozen=True, slots=True)
class Meeting:
    """``place``: where all have to stand. ``behind``: who is not there, or not still. ``met``: nobody is behind, our own shadow included."""

    place: Version
    met: bool
    behind: tuple[str, ...]


def meeting(own: Version, members: Mapping[str, Standing]) -> Meeting:
    """Shadows go forward alone: so the furthest one waits for the others. Members that stand there stay, so this settles however they race."""
    place = max([own, *(s.version for s in members.values() if s.version is not None)])
    behind = tuple(name for name, s in members.items() if s != Standing(place, True))
    return Meeting(place, not behind and own == place, behind)


def unpack_report(data: bytes) -> dict[str, Any]:
    """A worker's report as another host passes it on. Memory stays within a small multiple of ``data``. Raises RemoteError."""
    items = 0

    def count(found: Any) -> Any:
        nonlocal items
        items += 1
        if items > limits.MAX_REPORT_ITEMS:
            raise ValueError("too many rows")
        return found

    try:
        # An array is allocated by the length that it claims, before its elements are there. A dry run finds false claims.
        dry = msgpack.Unpacker(max_buffer_size=max(1, len(data)))
        dry.feed(data)
        dry.skip()
        report = msgpack.unpackb(data, max_ext_len=0, object_hook=count, list_hook=count)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise RemoteError(f"a worker's report is not msgpack ({type(error).__name__})") from None
    if not isinstance(report, dict) or not all(isinstance(key, str) for key in report):
        raise RemoteError("a worker's report is not a map with names as keys")
    return report


# -- the lead


class _Seat:
    """A member's connection, at the lead."""

    def __init__(self, link: Link, lead: Lead) -> None:
        self.link = link
        self.incarnation = b""
        """Once it has said MEMBER."""
        self.standing: Standing | None = None
        """Once it has said HELD."""
        self.heard_at = asyncio.get_running_loop().time()
        self._lead = lead
        link.await_first_word("MEMBER")

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        if not isinstance(event, Message) or event.type is Type.PONG:
            return
        if event.type is Type.PING:
            link.send(Type.PONG, {"t": event.body["t"]})
            return
        try:
            if (event.type is Type.MEMBER) == bool(self.incarnation):
                raise RemoteError("MEMBER comes first, and once")
            self._lead.on_said(self, event.type, event.body)
        except P2PCastError as error:
            link.close(error)

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        self.heard_at = asyncio.get_running_loop().time()

    def on_link_writable(self, link: Link, stripe: Stripe) -> None: ...

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self._lead.on_seat_lost(self, error)


class Lead:
    """``serves``: the version that the engine serves, and whether it is fit for traffic."""

    def __init__(self, name: str, socket: InstallSocket, changed: Callable[[], None]) -> None:
        self.name = name
        self.serves: tuple[Version | None, bool] = (None, False)
        self._socket = socket
        self._changed = changed
        self._seats: dict[bytes, _Seat] = {}
        """Node → its connection, once it has said MEMBER."""
        self._links: set[_Seat] = set()
        self._ranks: dict[int, bytes] = {}
        """Worker → the member that last reported for it."""
        self._names: dict[bytes, str] = {}
        self._incarnations: dict[bytes, bytes] = {}
        self._lost: dict[bytes, float] = {}
        """Members that are gone, and since when, until their workers' reports are given up."""
        self._own: Version | None = None
        self._place: Version | None = None
        """Where members were told to stand."""
        self._round = 0
        self._started = False
        self._news = Bell()
        self._roster: frozenset[bytes] | None = None
        """Nodes that the hub names as members."""
        self._anybody = False
        """The hub is too old to name them."""
        self._own_ranks: set[int] = set()
        """Workers of this host."""
        self._loose: set[int] = set()
        """Ranks that may have moved to other hosts: the server may be another process."""
        self._relaying = False
        """The report at hand comes from a member."""
        socket.elsewhere = self._sources

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await asyncio.sleep(BEAT_S)
                now = asyncio.get_running_loop().time()
                for seat in list(self._links):
                    if now - seat.heard_at > SILENCE_S:
                        seat.link.abort(RetryableError(f"silent for {SILENCE_S:.0f} s"))
                    else:
                        seat.link.send(Type.PING, {"t": int(now * 1e6)})
                for node in [n for n, since in self._lost.items() if now - since > LOST_S]:
                    del self._lost[node]
                    self._give_up(node, "was lost")
        finally:
            for seat in list(self._links):
                seat.link.close()

    def begin(self) -> None:
        """Every worker has answered: so none is in the middle of an install that an earlier lead began, and members may move."""
        self._started = True
        self._order(self._own)

    def moved(self, version: Version) -> None:
        """Our own shadow is at ``version``: members may go there, and no further."""
        self._own = version
        if self._started:
            self._order(version)

    def set_serving(self, version: Version | None, ready: bool) -> None:
        if self.serves != (version, ready):
            self.serves = (version, ready)
            self._send(Type.SERVES, self._serving())

    def members_are(self, nodes: Iterable[bytes]) -> None:
        """What the hub says. Those that are here stay: a member may have lost the hub alone."""
        self._roster = frozenset(nodes)

    def hub_has_told(self) -> None:
        """All that the hub had to say at first has come."""
        if self._roster is None and not self._anybody:
            self._anybody = True
            logger.warning(
                "engine %s: the hub is of an older release and does not name the members; any peer may join the engine", self.name
            )

    def loosen(self) -> None:
        """The server was out of reach, or has lost its version: its workers may come back on other hosts."""
        self._loose = self._own_ranks | self._ranks.keys()

    def heard(self, report: Report) -> None:
        """A report, whichever way it came: one of this host's own takes its worker off the members'."""
        if not self._relaying and 0 <= report["rank"] < limits.MAX_RANKS:
            self._ranks.pop(report["rank"], None)
            self._own_ranks.add(report["rank"])
            self._loose.discard(report["rank"])

    def require(self) -> None:
        """Raises RetryableError when a member is gone that workers report to."""
        gone = sorted({self._names[n] for n in self._ranks.values() if n not in self._seats})
        if gone:
            raise RetryableError(f"engine {self.name}: member {', '.join(gone)} is gone; {self._sources()}")

    async def meet(self, version: Version) -> None:
        """Until all members stand still at ``version``, where our own shadow is held still already: then they stay there for as long as it is.

        Raises RetryableError when they do not get there, or are further: then it is for us to come to them.
        """
        while True:
            working = {*self._ranks.values()}
            seats = {f"{s.link.name} ({node.hex()[:8]})": s.standing for node, s in self._seats.items() if node in working}
            names = {n: s or Standing(None, False) for n, s in seats.items()}
            found = meeting(version, names)
            if found.place != self._place:
                self._order(found.place)
                continue
            if found.place > version:
                further = ", ".join(n for n, s in names.items() if s.version == found.place)
                raise RetryableError(
                    f"engine {self.name}: member {further} is at version {found.place} already, so {version} is left out"
                )
            if found.met:
                return
            if empty := [n for n in found.behind if seats[n] is not None and names[n].version is None]:
                raise RetryableError(f"engine {self.name}: member {', '.join(empty)} has no version yet")
            if not await self._news.wait(PATIENCE_S):
                late = ", ".join(f"{n} at {names[n].version}" for n in found.behind)
                raise RetryableError(
                    f"engine {self.name}: waited {PATIENCE_S:.0f} s in vain for its members at {version}: {late}"
                )

    def status(self) -> dict[str, Any]:
        """For /status."""
        members = [
            {
                "name": s.link.name,
                "node": node.hex(),
                "address": s.link.remote_host,
                "staged": None if s.standing is None or s.standing.version is None else str(s.standing.version),
                "still": s.standing is not None and s.standing.still,
                "ranks": sorted(r for r, n in self._ranks.items() if n == node),
            }
            for node, s in self._seats.items()
        ]
        place = None if self._place is None else str(self._place)
        return {
            "name": self.name,
            "role": "lead",
            "meets_at": place,
            "members": sorted(members, key=lambda m: str(m["name"])),
            "named": None if self._roster is None else sorted(node.hex() for node in self._roster),
        }

    # -- members

    def accept(self, link: Link, hello: Body) -> None:
        """Raises RefusedError, RetryableError."""
        if hello["role"] != "member":
            raise RefusedError("an engine's lead takes members alone")
        self._check_named(link.remote)
        for seat in [s for s in self._links if s.link.remote == link.remote and not s.incarnation]:
            seat.link.close(RetryableError("the same member is here again"))
        if len({s.link.remote for s in self._links} - {link.remote}) >= limits.MAX_MEMBERS:
            raise RetryableError(f"engine {self.name} has {limits.MAX_MEMBERS} members already")
        seat = _Seat(link, self)
        link.owner = seat
        self._links.add(seat)

    def _check_named(self, node: bytes) -> None:
        if self._anybody or node in self._ranks.values():
            return
        if self._roster is None:
            raise RetryableError(f"the hub has not named the members of engine {self.name} yet")
        if node not in self._roster:
            raise RefusedError(
                f"the hub names no such member of engine {self.name}: join with --engine {self.name} --role member"
            )

    def on_said(self, seat: _Seat, kind: Type, body: Body) -> None:
        if kind is Type.MEMBER:
            self._introduced(seat, body)
        elif kind is Type.HELD:
            version = None if body["version"] is None else Version.of(body["version"])
            standing = Standing(version, body["still"] and body["round"] == self._round)
            if standing != seat.standing:
                seat.standing = standing
                if seat.link.remote in self._ranks.values():
                    self._news.ring()
                    self._changed()
        elif kind is Type.REPORTED:
            report = unpack_report(body["report"])
            self._relaying = True
            try:
                self._socket.offer(report, body["age_us"] / 1e6, lambda checked: self._claim(seat, checked["rank"]))
            finally:
                self._relaying = False

    def _claim(self, seat: _Seat, rank: int) -> None:
        """A worker of this engine has answered by way of ``seat``. Raises RefusedError for one of another host's."""
        node, holder = seat.link.remote, self._ranks.get(rank)
        whose = (
            "this host" if rank in self._own_ranks else self._names[holder] if holder in self._seats and holder != node else None
        )
        if whose is not None and rank not in self._loose:
            error = f"engine {self.name}: {seat.link.name} reports for rank {rank}, which belongs to {whose}"
            logger.error("%s", error)
            self._socket.lose({rank}, RetryableError(error))
            raise RefusedError(error)
        self._loose.discard(rank)
        self._own_ranks.discard(rank)
        if holder != node:
            self._ranks[rank] = node
            self._news.ring()
            self._changed()

    def _introduced(self, seat: _Seat, body: Body) -> None:
        link, node = seat.link, seat.link.remote
        if body["engine"] != self.name:
            raise RefusedError(f"this peer leads the engine {self.name}, not {body['engine']}")
        old = self._seats.get(node)
        if old is not None:
            old.link.close(RetryableError("the same member is here again"))
        seat.incarnation = body["incarnation"]
        link.introduced()
        if self._incarnations.get(node, seat.incarnation) != seat.incarnation:
            self._give_up(node, "was restarted")
        self._lost.pop(node, None)
        self._seats[node], self._names[node], self._incarnations[node] = seat, link.name, seat.incarnation
        for known in [n for n in self._names if n not in self._seats and n not in self._ranks.values()][: -limits.MAX_MEMBERS]:
            del self._names[known], self._incarnations[known]
        link.send(Type.SERVES, self._serving())
        if self._started:
            link.send(Type.STILL, self._ordered())
        logger.info("engine %s: member %s is here, from %s", self.name, link.name, link.remote_host)
        self._news.ring()
        self._changed()

    def on_seat_lost(self, seat: _Seat, error: P2PCastError | None) -> None:
        self._links.discard(seat)
        node = seat.link.remote
        if self._seats.get(node) is seat:
            del self._seats[node]
            self._lost[node] = asyncio.get_running_loop().time()
            logger.warning("engine %s: member %s is gone%s", self.name, seat.link.name, f": {error}" if error else "")
            self._news.ring()
            self._changed()

    def _give_up(self, node: bytes, why: str) -> None:
        ranks = {r for r, n in self._ranks.items() if n == node}
        if ranks:
            named = ", ".join(map(str, sorted(ranks)))
            self._socket.lose(
                ranks,
                RetryableError(f"engine {self.name}: member {self._names[node]}, of rank {named}, {why} before all was reported"),
            )

    def _order(self, place: Version | None) -> None:
        """A new round: what members said before is no answer to it."""
        self._place, self._round = place, self._round + 1
        for seat in self._seats.values():
            if seat.standing is not None:
                seat.standing = Standing(seat.standing.version, False)
        self._send(Type.STILL, self._ordered())

    def _ordered(self) -> Body:
        return {"version": plain(self._place), "round": self._round}

    def _send(self, kind: Type, body: Body) -> None:
        for seat in self._seats.values():
            seat.link.send(kind, body)

    def _serving(self) -> Body:
        version, ready = self.serves
        return {"version": plain(version), "ready": ready}

    def _sources(self) -> str:
        """Who passes on reports, for a message about those that are missing."""
        rows = []
        for node, seat in self._seats.items():
            ranks = ", ".join(str(r) for r, n in sorted(self._ranks.items()) if n == node)
            rows.append(f"{seat.link.name} (rank {ranks})" if ranks else f"{seat.link.name} (no worker so far)")
        return f"connected members of {self.name}: {'; '.join(sorted(rows)) or 'none'}"


def plain(version: Version | None) -> list[int] | None:
    """As it goes over the wire."""
    return None if version is None else list(version)
