"""Engines whose ranks run on several hosts: which peer leads each engine, and which peers are its members
(docs/formats/wire-protocol.md, section 7). Members need the lead's address; the lead refuses peers that are not
members.

Guarantees: an engine has one lead at a time. A second lead is refused, also for CLAIM_S after the first one left.
Members and leads are informed only of changes. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from p2pcast.ground.errors import RefusedError
from p2pcast.ground.limits import CLAIM_S, MAX_CLAIMS, MAX_MEMBERS

Place = tuple[bytes, str, int]
"""A node and its address."""


class MultiHostEngines:
    """Peers are identified by ``ident``, their node in hex. ``now``: monotonic time in seconds."""

    def __init__(self) -> None:
        self._leads: dict[str, tuple[str, Place]] = {}
        """Engine → its lead, and the lead's address."""
        self._claims: dict[str, tuple[str, float]] = {}
        """Engine → its last lead, and when that lead left; the time is meaningless while the lead is joined."""
        self._members: dict[str, str] = {}
        """Peer → the engine that it is a member of."""
        self._sent_leads: dict[str, Place | None] = {}
        self._listed: dict[str, list[bytes]] = {}
        """Lead → the members that were last sent to it."""

    def recall(self, claims: Mapping[str, str], now: float) -> None:
        """Load the ``claims`` of an earlier process."""
        self._claims = {name: (ident, now) for name, ident in claims.items()}

    @property
    def claims(self) -> dict[str, str]:
        """Engine → its lead, or its last lead."""
        return {name: ident for name, (ident, _) in self._claims.items()}

    def join(self, ident: str, name: str, engine: tuple[str, str] | None, place: Place, now: float) -> None:
        """``engine``: its name and the peer's role. ``name``: the peer's own, for messages. Raises RefusedError for a
        second lead.
        """
        called, role = engine or ("", "")
        if role == "lead":
            self._check_claim(called, ident, name, now)
        elif role == "member":
            others = sum(e == called and i != ident for i, e in self._members.items())
            if others >= MAX_MEMBERS:
                raise RefusedError(f"engine {called} has {MAX_MEMBERS} members already")
        self.leave(ident, now)
        # A peer that joins in a different role gives up the engine that it led.
        self._claims = {e: claim for e, claim in self._claims.items() if claim[0] != ident}
        if role == "member":
            self._members[ident] = called
        elif role == "lead":
            self._leads[called] = ident, place
            self._claims[called] = ident, now
            for old in [e for e in self._claims if e not in self._leads][: max(0, len(self._claims) - MAX_CLAIMS)]:
                del self._claims[old]

    def _check_claim(self, called: str, ident: str, name: str, now: float) -> None:
        known, (claimant, since) = self._leads.get(called), self._claims.get(called, ("", 0.0))
        if known is not None and known[0] != ident:
            node, host, port = known[1]
            raise RefusedError(
                f"engine {called} has a lead already: {node.hex()[:8]} at {host}:{port}; "
                f"join {name} with --role member, or give its engine another name"
            )
        if known is None and claimant not in ("", ident) and now - since < CLAIM_S:
            raise RefusedError(
                f"engine {called} was led by {claimant[:8]} until {now - since:.0f} s ago, and its name is kept for "
                f"{CLAIM_S:.0f} s; "
                f"wait, or run `p2pcast evict {claimant}` if that machine will not come back"
            )

    def leave(self, ident: str, now: float, *, evicted: bool = False) -> None:
        """Remove the peer. Its engine's name stays reserved for it, unless the peer was ``evicted``."""
        self._members.pop(ident, None)
        self._sent_leads.pop(ident, None)
        self._listed.pop(ident, None)
        self._leads = {name: lead for name, lead in self._leads.items() if lead[0] != ident}
        if evicted:
            self._claims = {name: claim for name, claim in self._claims.items() if claim[0] != ident}
        else:
            self._claims = {name: (who, now if who == ident else since) for name, (who, since) in self._claims.items()}

    def changed_leads(self) -> Iterable[tuple[str, str, Place | None]]:
        """Yield (member, engine, its lead's address) for each change that was not yielded before."""
        for ident, called in self._members.items():
            place = self._leads[called][1] if called in self._leads else None
            if ident not in self._sent_leads or self._sent_leads[ident] != place:
                self._sent_leads[ident] = place
                yield ident, called, place

    def changed_rosters(self) -> Iterable[tuple[str, str, list[bytes]]]:
        """Yield (lead, engine, its members' nodes) for each change that was not yielded before."""
        for called, (ident, _) in self._leads.items():
            members = sorted(bytes.fromhex(i) for i, engine in self._members.items() if engine == called)
            if self._listed.get(ident) != members:
                self._listed[ident] = members
                yield ident, called, members
