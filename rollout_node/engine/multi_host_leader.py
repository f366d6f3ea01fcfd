"""The lead of an engine whose ranks run on several hosts, with a peer on each. The other peers are its members:
``rollout_node.engine.multi_host_member``.

Guarantees: the server reads a version only while all members hold their shadows still at that version. A rank's report
through a member counts once, or is declared lost before the lead acts on it. If not all members reach one version, the
lead skips that version, and the engine continues to serve the old one. A node is a member only if the hub names it. A
member counts only once a rank of this engine has answered through it. Ranks get the question's nonce from their server,
so a node without a server cannot answer. A rank belongs to one host at a time. ``meeting`` decides at which version the
members meet; it does no I/O. Protocol: docs/formats/wire-protocol.md, section 7.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from p2pcast.ground import limits
from p2pcast.ground.errors import P2PCastError, RefusedError, RemoteError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.wire import messages
from p2pcast.wire.connection import Event, Message
from p2pcast.wire.dispatch import Handlers, dispatch
from rollout_node.installers.install_instructions import Report
from rollout_node.installers.install_socket import InstallSocket

logger = logging.getLogger("p2pcast.peer")

BEAT_S = 1.0
"""Seconds between a lead's PINGs."""
SILENCE_S = 5.0
"""A connection that has been silent for this many seconds counts as dead."""
LOST_S = 5.0
"""Seconds after the loss of a member's connection until its ranks' reports count as lost."""
PATIENCE_S = 60.0
"""Seconds for which a lead waits for its members; the time restarts whenever a member makes progress."""

_ANY_TIME = (messages.Type.PING, messages.Type.PONG)
"""Messages that a member may send even before MEMBER."""


# -- decisions


class MemberStanding(NamedTuple):
    """The version of a member's shadow, and whether the member holds the shadow still for the lead."""

    version: Version | None
    still: bool


@dataclass(frozen=True, slots=True)
class Meeting:
    """``place``: the version that all shadows must reach. ``behind``: members that are not there, or do not hold still.
    ``met``: all shadows are there, including the lead's own.
    """

    place: Version
    met: bool
    behind: tuple[str, ...]


def meeting(own: Version, members: Mapping[str, MemberStanding]) -> Meeting:
    """Decide where the shadows meet. They only move forward, so the most advanced shadow waits for the others. Members
    at the meeting place stay there, so the decision does not depend on the order of arrival.
    """
    place = max([own, *(s.version for s in members.values() if s.version is not None)])
    behind = tuple(name for name, s in members.items() if s != MemberStanding(place, True))
    return Meeting(place, not behind and own == place, behind)


def unpack_report(data: bytes) -> dict[str, Any]:
    """Unpack a rank's report that another host forwarded, using memory within a small multiple of ``data``. Raises
    RemoteError.
    """
    items = 0

    def count(found: Any) -> Any:
        nonlocal items
        items += 1
        if items > limits.MAX_REPORT_ITEMS:
            raise ValueError("too many rows")
        return found

    try:
        # Unpacking allocates an array by its claimed length, before reading its elements. A dry run detects false
        # lengths first.
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


class _MemberLink:
    """A member's connection."""

    def __init__(self, link: Link, lead: MultiHostLeader) -> None:
        self.link = link
        self.incarnation = b""
        """Empty until MEMBER arrives."""
        self.standing: MemberStanding | None = None
        """None until HELD arrives."""
        self.last_received_at = asyncio.get_running_loop().time()
        self._lead = lead
        link.expect_first_message("MEMBER")

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        if not isinstance(event, Message):
            return
        try:
            self._lead.on_member_message(self, event)
        except P2PCastError as error:
            link.close(error)

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        self.last_received_at = asyncio.get_running_loop().time()

    def on_link_writable(self, link: Link, stripe: Stripe) -> None: ...

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self._lead.on_member_lost(self, error)


class MultiHostLeader:
    """``serves``: the version that the engine serves, and whether it is ready for requests."""

    def __init__(self, name: str, socket: InstallSocket, changed: Callable[[], None]) -> None:
        self.name = name
        self.serves: tuple[Version | None, bool] = (None, False)
        self._socket = socket
        self._changed = changed
        self._members: dict[bytes, _MemberLink] = {}
        """Node → its connection, once MEMBER has arrived."""
        self._links: set[_MemberLink] = set()
        self._ranks: dict[int, bytes] = {}
        """Rank → the member that last reported for it."""
        self._names: dict[bytes, str] = {}
        self._incarnations: dict[bytes, bytes] = {}
        self._lost: dict[bytes, float] = {}
        """Lost member → the time of the loss, until its ranks' reports count as lost."""
        self._own: Version | None = None
        self._place: Version | None = None
        """The version at which members have been ordered to hold still."""
        self._round = 0
        self._started = False
        self._news = Wakeup()
        self._roster: frozenset[bytes] | None = None
        """The nodes that the hub names as members; None until it has."""
        self._any_node = False
        """Whether any node may be a member, because the hub is too old to name them."""
        self._own_ranks: set[int] = set()
        """The ranks on this host."""
        self._movable_ranks: set[int] = set()
        """Ranks that may have moved to a different host, because the server may have been restarted."""
        self._relaying = False
        """Whether the report being handled comes from a member."""
        self._handlers: Handlers = {
            messages.Ping: lambda member, body: member.link.send(messages.Pong(body.t)),
            messages.Member: self._introduced,
            messages.Held: self._stands,
            messages.WorkerReport: self._relay,
        }
        socket.elsewhere = self._sources

    async def run(self) -> None:
        """Ping the members and drop silent ones, until cancelled."""
        try:
            while True:
                await asyncio.sleep(BEAT_S)
                now = asyncio.get_running_loop().time()
                for member in list(self._links):
                    if now - member.last_received_at > SILENCE_S:
                        member.link.abort(RetryableError(f"silent for {SILENCE_S:.0f} s"))
                    else:
                        member.link.send(messages.Ping(int(now * 1e6)))
                for node in [n for n, since in self._lost.items() if now - since > LOST_S]:
                    del self._lost[node]
                    self._give_up(node, "was lost")
        finally:
            for member in list(self._links):
                member.link.close()

    def begin(self) -> None:
        """Called once every rank has answered. None is still in an install of an earlier lead, so members may move."""
        self._started = True
        self._order(self._own)

    def moved(self, version: Version) -> None:
        """Called when the lead's shadow is at ``version``: members may move up to that version."""
        self._own = version
        if self._started:
            self._order(version)

    def set_serving(self, version: Version | None, ready: bool) -> None:
        if self.serves != (version, ready):
            self.serves = (version, ready)
            self._send(self._serving())

    def set_members(self, nodes: Iterable[bytes]) -> None:
        """Set the members named by the hub. Connected members stay, because a member may only have lost the hub."""
        self._roster = frozenset(nodes)

    def on_hub_listed(self) -> None:
        """Called after the hub's first messages: a hub that names members has done so by now."""
        if self._roster is None and not self._any_node:
            self._any_node = True
            logger.warning(
                "engine %s: the hub is of an older release and does not name the members; any peer may join the engine",
                self.name,
            )

    def loosen(self) -> None:
        """Called when the server was unreachable or lost its version: its ranks may come back on different hosts."""
        self._movable_ranks = self._own_ranks | self._ranks.keys()

    def on_report(self, report: Report) -> None:
        """Handle a report from any host. A report by a rank of this host takes the rank from its member."""
        if not self._relaying and 0 <= report["rank"] < limits.MAX_RANKS:
            self._ranks.pop(report["rank"], None)
            self._own_ranks.add(report["rank"])
            self._movable_ranks.discard(report["rank"])

    def require(self) -> None:
        """Raises RetryableError if a member with ranks is gone."""
        gone = sorted({self._names[n] for n in self._ranks.values() if n not in self._members})
        if gone:
            raise RetryableError(f"engine {self.name}: member {', '.join(gone)} is gone; {self._sources()}")

    async def meet(self, version: Version) -> None:
        """Wait until all members hold their shadows still at ``version``, as the lead already does. Members hold still
        for as long as the lead's shadow does.

        Raises RetryableError if a member does not reach the version, or is past it: then the lead has to catch up.
        """
        while True:
            working = {*self._ranks.values()}
            standings = {
                f"{s.link.name} ({node.hex()[:8]})": s.standing for node, s in self._members.items() if node in working
            }
            names = {n: s or MemberStanding(None, False) for n, s in standings.items()}
            found = meeting(version, names)
            if found.place != self._place:
                self._order(found.place)
                continue
            if found.place > version:
                further = ", ".join(n for n, s in names.items() if s.version == found.place)
                raise RetryableError(
                    f"engine {self.name}: member {further} is at version {found.place} already, so {version} is skipped"
                )
            if found.met:
                return
            if empty := [n for n in found.behind if standings[n] is not None and names[n].version is None]:
                raise RetryableError(f"engine {self.name}: member {', '.join(empty)} has no version yet")
            if not await self._news.wait(PATIENCE_S):
                late = ", ".join(f"{n} at {names[n].version}" for n in found.behind)
                raise RetryableError(
                    f"engine {self.name}: its members did not reach {version} within {PATIENCE_S:.0f} s: {late}"
                )

    def status(self) -> dict[str, Any]:
        """Return the lead's part of /status."""
        members = [
            {
                "name": s.link.name,
                "node": node.hex(),
                "address": s.link.remote_host,
                "staged": None if s.standing is None or s.standing.version is None else str(s.standing.version),
                "still": s.standing is not None and s.standing.still,
                "ranks": sorted(r for r, n in self._ranks.items() if n == node),
            }
            for node, s in self._members.items()
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

    def accept(self, link: Link, hello: messages.Hello) -> None:
        """Accept a member's link. Raises RefusedError, RetryableError."""
        if hello.role != "member":
            raise RefusedError("an engine's lead accepts members only")
        self._check_named(link.remote)
        for member in [s for s in self._links if s.link.remote == link.remote and not s.incarnation]:
            member.link.close(RetryableError("the same member is here again"))
        if len({s.link.remote for s in self._links} - {link.remote}) >= limits.MAX_MEMBERS:
            raise RetryableError(f"engine {self.name} has {limits.MAX_MEMBERS} members already")
        member = _MemberLink(link, self)
        link.owner = member
        self._links.add(member)

    def _check_named(self, node: bytes) -> None:
        if self._any_node or node in self._ranks.values():
            return
        if self._roster is None:
            raise RetryableError(f"the hub has not named the members of engine {self.name} yet")
        if node not in self._roster:
            raise RefusedError(
                f"the hub names no such member of engine {self.name}: join with --engine {self.name} --role member"
            )

    def on_member_message(self, member: _MemberLink, message: Message) -> None:
        """Handle a member's message. Raises P2PCastError, on which the caller closes the member's connection."""
        if message.type not in _ANY_TIME and (message.type is messages.Type.MEMBER) == bool(member.incarnation):
            raise RemoteError("MEMBER comes first, and once")
        dispatch(self._handlers, message, member)

    def _stands(self, member: _MemberLink, body: messages.Held) -> None:
        standing = MemberStanding(body.version, body.still and body.round == self._round)
        if standing != member.standing:
            member.standing = standing
            if member.link.remote in self._ranks.values():
                self._news.notify()
                self._changed()

    def _relay(self, member: _MemberLink, body: messages.WorkerReport) -> None:
        report = unpack_report(body.report)
        self._relaying = True
        try:
            self._socket.offer(report, body.age_us / 1e6, lambda checked: self._claim(member, checked["rank"]))
        finally:
            self._relaying = False

    def _claim(self, member: _MemberLink, rank: int) -> None:
        """Record that a rank answered through ``member``. Raises RefusedError if a different host has the rank."""
        node, holder = member.link.remote, self._ranks.get(rank)
        owner = (
            "this host"
            if rank in self._own_ranks
            else self._names[holder]
            if holder in self._members and holder != node
            else None
        )
        if owner is not None and rank not in self._movable_ranks:
            error = f"engine {self.name}: {member.link.name} reports for rank {rank}, which belongs to {owner}"
            logger.error("%s", error)
            self._socket.lose({rank}, RetryableError(error))
            raise RefusedError(error)
        self._movable_ranks.discard(rank)
        self._own_ranks.discard(rank)
        if holder != node:
            self._ranks[rank] = node
            self._news.notify()
            self._changed()

    def _introduced(self, member: _MemberLink, body: messages.Member) -> None:
        link, node = member.link, member.link.remote
        if body.engine != self.name:
            raise RefusedError(f"this peer leads the engine {self.name}, not {body.engine}")
        old = self._members.get(node)
        if old is not None:
            old.link.close(RetryableError("the same member is here again"))
        member.incarnation = body.incarnation
        link.introduced()
        if self._incarnations.get(node, member.incarnation) != member.incarnation:
            self._give_up(node, "was restarted")
        self._lost.pop(node, None)
        self._members[node], self._names[node], self._incarnations[node] = member, link.name, member.incarnation
        for known in [n for n in self._names if n not in self._members and n not in self._ranks.values()][
            : -limits.MAX_MEMBERS
        ]:
            del self._names[known], self._incarnations[known]
        link.send(self._serving())
        if self._started:
            link.send(self._ordered())
        logger.info("engine %s: member %s is here, from %s", self.name, link.name, link.remote_host)
        self._news.notify()
        self._changed()

    def on_member_lost(self, member: _MemberLink, error: P2PCastError | None) -> None:
        self._links.discard(member)
        node = member.link.remote
        if self._members.get(node) is member:
            del self._members[node]
            self._lost[node] = asyncio.get_running_loop().time()
            logger.warning("engine %s: member %s is gone%s", self.name, member.link.name, f": {error}" if error else "")
            self._news.notify()
            self._changed()

    def _give_up(self, node: bytes, why: str) -> None:
        ranks = {r for r, n in self._ranks.items() if n == node}
        if ranks:
            named = ", ".join(map(str, sorted(ranks)))
            self._socket.lose(
                ranks,
                RetryableError(
                    f"engine {self.name}: member {self._names[node]}, of rank {named}, {why} before all was reported"
                ),
            )

    def _order(self, place: Version | None) -> None:
        """Start a new round; members' earlier answers do not count for it."""
        self._place, self._round = place, self._round + 1
        for member in self._members.values():
            if member.standing is not None:
                member.standing = MemberStanding(member.standing.version, False)
        self._send(self._ordered())

    def _ordered(self) -> messages.Freeze:
        return messages.Freeze(self._place, self._round)

    def _send(self, record: messages.Record) -> None:
        for member in self._members.values():
            member.link.send(record)

    def _serving(self) -> messages.Serving:
        return messages.Serving(*self.serves)

    def _sources(self) -> str:
        """List the members that forward reports, for a message about missing reports."""
        rows = []
        for node, member in self._members.items():
            ranks = ", ".join(str(r) for r, n in sorted(self._ranks.items()) if n == node)
            rows.append(f"{member.link.name} (rank {ranks})" if ranks else f"{member.link.name} (no worker so far)")
        return f"connected members of {self.name}: {'; '.join(sorted(rows)) or 'none'}"
