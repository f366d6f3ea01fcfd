"""Engines whose workers run on several hosts: which peer leads each, so that its members find it (docs/wire-protocol.md, section 7).

Promises: an engine has one lead at a time, and a second one is refused; members are told only what is new to them. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pcast.errors import RefusedError

Place = tuple[bytes, str, int]
"""A node and its address."""


class Spans:
    """Peers by ``ident``, their node in hex."""

    def __init__(self) -> None:
        self._leads: dict[str, tuple[str, Place]] = {}
        """Engine → who leads it, and where."""
        self._members: dict[str, str] = {}
        """Peer → the engine of which it is a member."""
        self._told: dict[str, Place | None] = {}

    def join(self, ident: str, name: str, engine: tuple[str, str] | None, place: Place) -> None:
        """``engine``: its name and the peer's role; ``name``: the peer's own, for messages. Raises RefusedError for a second lead."""
        called, role = engine or ("", "")
        known = self._leads.get(called)
        if role == "lead" and known is not None and known[0] != ident:
            node, host, port = known[1]
            raise RefusedError(
                f"engine {called} has a lead already: {node.hex()[:8]} at {host}:{port}; "
                f"join {name} with --role member, or give its engine another name"
            )
        self.leave(ident)
        if role == "member":
            self._members[ident] = called
        elif role == "lead":
            self._leads[called] = ident, place

    def leave(self, ident: str) -> None:
        self._members.pop(ident, None)
        self._told.pop(ident, None)
        self._leads = {name: lead for name, lead in self._leads.items() if lead[0] != ident}

    def news(self) -> Iterable[tuple[str, str, Place | None]]:
        """(member, engine, its lead's place) for every member that has not been told yet; then it has been."""
        for ident, called in self._members.items():
            place = self._leads[called][1] if called in self._leads else None
            if ident not in self._told or self._told[ident] != place:
                self._told[ident] = place
                yield ident, called, place
