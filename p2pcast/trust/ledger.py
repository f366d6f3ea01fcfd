"""What a hub remembers of trust: join tokens, holders of certificates, and the names that they go by. Pure: time and randomness are passed in.

Promises: a token admits no new node once it is revoked, expired or used up; a node that is known gets its next certificate by its key alone, whatever has become of its token;
a node's id belongs to the first key that was admitted under it, for as long as the node is known; a name belongs to the node that took it first, until that node is evicted or has been
away for ``NAME_KEPT_S``; an evicted node gets no certificate, by any token; no row for people holds a secret.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from p2pcast import limits
from p2pcast.errors import LocalError, RefusedError, UsageError
from p2pcast.trust.names import check_name, is_id, is_name, marked, shown
from p2pcast.trust.roles import BOUGHT
from p2pcast.wire.token import Token

IDENT_DIGITS = 16
DAY_S = 86400.0
OWN_TTL_S = DAY_S
"""Life of the hub's own token, in seconds: long enough to start a fleet, short enough for a copy that is lost."""
LEGACY_TTL_S = 14 * DAY_S
"""Remaining life of a hub's own token that an earlier release made without an end, in seconds."""
KNOWN_S = 90 * DAY_S
"""Time after the end of a peer's certificate in which its key alone gets the next one, in seconds."""
NAME_KEPT_S = 7 * DAY_S
"""Time for which a name is kept for a node that is away, in seconds: longer than a weekend."""
FORMAT = 2
"""Of the document; 1 (releases up to 0.1.0) had the evictions in it, and says no number."""


@dataclass(slots=True)
class Grant:
    """A join token at its hub. Times in Unix seconds; ``uses`` None: any number. ``own``: one that the hub made for its token file."""

    secret: str
    role: str
    created: float
    expires: float | None = None
    uses: int | None = None
    used: int = 0
    revoked: bool = False
    own: bool = False

    def __repr__(self) -> str:
        return f"Grant({self.role}, {'revoked' if self.revoked else f'used {self.used}'})"

    def fault(self, now: float) -> str | None:
        """Why the token admits no new node."""
        if self.revoked:
            return "was revoked"
        if self.expires is not None and now >= self.expires:
            return "has expired"
        if self.uses is not None and self.used >= self.uses:
            return "is used up"
        return None


@dataclass(slots=True)
class Holder:
    """A node that has a certificate, or has joined over plain text. ``key``: its fingerprint (empty over plain text); ``name``: the name that it asked for; ``token``: ident of the token that
    admitted it (empty: unknown); ``until``: the end of its newest certificate; ``shown``: other tokens that it has used; ``called``: the name in use; ``seen``: when it was last connected."""

    key: str
    role: str
    name: str
    token: str
    until: float
    shown: list[str] = field(default_factory=list)
    called: str = ""
    seen: float = 0.0


_GRANT, _HOLDER = (tuple(field.name for field in fields(kind)) for kind in (Grant, Holder))


class Ledger:
    """``document`` is all of it, for JSON. ``evicted``: nodes, which others keep. ``legacy``: node → name, evictions of a document of format 1."""

    def __init__(self, evicted: Container[bytes] = frozenset()) -> None:
        self.grants: dict[str, Grant] = {}
        self.holders: dict[str, Holder] = {}
        """Node, in hexadecimal →."""
        self.legacy: dict[str, str] = {}
        self._evicted = evicted
        self._names: dict[str, str] = {}
        """Name → the node that goes by it."""

    def __repr__(self) -> str:
        return f"Ledger({len(self.grants)} tokens, {len(self.holders)} holders)"

    @property
    def document(self) -> dict[str, Any]:
        # By hand: `asdict` takes longer, and there may be tens of thousands.
        return {
            "format": FORMAT,
            "tokens": {ident: {name: getattr(g, name) for name in _GRANT} for ident, g in self.grants.items()},
            "holders": {
                node: {name: getattr(h, name) for name in _HOLDER} | {"shown": list(h.shown)} for node, h in self.holders.items()
            },
        }

    @classmethod
    def of(cls, document: dict[str, Any], evicted: Container[bytes] = frozenset()) -> Ledger:
        """Raises LocalError."""
        made = cls(evicted)
        try:
            written = document.get("format", 1)
            made.grants = {str(ident): Grant(**g) for ident, g in document["tokens"].items()}
            made.holders = {str(node): Holder(**h) for node, h in document["holders"].items()}
            if written == 1:
                made.legacy = {str(node): str(name) for node, name in document["evicted"].items()}
        except (KeyError, TypeError, AttributeError):
            raise LocalError("the ledger of tokens and certificates is damaged") from None
        if written not in (1, FORMAT):
            raise LocalError(f"the ledger of tokens and certificates is of a later release (format {written})")
        if written == 1:
            made._take_names()
        made._names = {h.called: node for node, h in made.holders.items() if h.called}
        return made

    def _take_names(self) -> None:
        """Earlier releases gave a name to as many nodes as asked for it; those that one node alone has are that node's."""
        peers = [h for h in self.holders.values() if h.role == "peer"]
        count = Counter(h.name for h in peers)
        for found in peers:
            if count[found.name] == 1 and is_name(found.name):
                found.called, found.seen = found.name, found.until

    # -- tokens

    def own(self, now: float) -> str | None:
        """Ident of the hub's own token that lasts longest."""
        found = [(g.expires, ident) for ident, g in self.grants.items() if g.own and g.expires and g.fault(now) is None]
        return max(found)[1] if found else None

    def grant(
        self, secret: bytes, role: str, now: float, *, ttl_s: float | None = None, uses: int | None = None, own: bool = False
    ) -> str:
        """A new token's ident. Raises UsageError, RefusedError."""
        if role not in BOUGHT:
            raise UsageError(f"{role!r} is not a role that a token buys: {' or '.join(BOUGHT)}")
        self._forget(now)
        if len(self.grants) >= limits.MAX_TOKENS and not own:
            raise RefusedError(f"there are {limits.MAX_TOKENS} tokens already: revoke some first")
        ident = Token(b"", secret).ident.hex()
        expires = None if ttl_s is None else now + ttl_s
        self.grants[ident] = Grant(secret.hex(), role, now, expires, uses, own=own)
        return ident

    def bound_own(self, now: float) -> bool:
        """Whether an own token had no end, as earlier releases made it; now it has one."""
        endless = [g for g in self.grants.values() if g.own and g.expires is None]
        for found in endless:
            found.expires = now + LEGACY_TTL_S
        return bool(endless)

    def secret(self, ident: bytes) -> bytes:
        """Of a token that was given out; whether it still admits anybody is ``admit``'s to say. Raises RefusedError."""
        found = self.grants.get(ident.hex())
        if found is None:
            raise RefusedError("the token is not one that this hub gave out")
        return bytes.fromhex(found.secret)

    def revoke(self, ident: str) -> str:
        """By its ident, or enough of its beginning; gives the whole. Raises UsageError."""
        found = [ident] if ident in self.grants else [i for i in self.grants if i.startswith(ident.lower())] if ident else []
        if len(found) != 1:
            raise UsageError(f"{ident[:IDENT_DIGITS]!r} is not a token's id: see `p2pcast token list`")
        self.grants[found[0]].revoked = True
        return found[0]

    def strike(self, idents: Iterable[str]) -> None:
        """Revoke those that there are."""
        for ident in idents:
            if ident in self.grants:
                self.grants[ident].revoked = True

    def rows(self, now: float) -> list[dict[str, Any]]:
        """Tokens, for people: no secrets."""
        return [
            {
                "id": ident, "role": g.role, "own": g.own, "created": g.created, "expires": g.expires,
                "uses": g.uses, "used": g.used, "usable": g.fault(now) is None, "fault": g.fault(now),
            }
            for ident, g in self.grants.items()
        ]  # fmt: skip

    # -- certificates

    def admit(self, ident: bytes, node: bytes, role: str, key: str, name: str, now: float, until: float, *, local: bool) -> None:
        """Before a certificate is issued on a first connection. A node that is known needs no token in force: its request has proved its key. Any other spends the token.
        ``local``: asked from the hub's own machine, where its own tokens buy every role. Raises RefusedError."""
        if role not in BOUGHT:
            raise RefusedError(f"a token does not make a {role}")
        self._may_hold(node, role, key)
        check_name(name)
        known = self.holders.get(node.hex())
        if known is not None and known.key:
            known.until, known.name, known.seen = max(known.until, until), name, now
            self.came_with(node, ident)
            return
        token = self._usable(ident, role, now, local=local)
        self._drop(node.hex())
        self._make_room(now)
        token.used += 1
        self.holders[node.hex()] = Holder(key, role, name, ident.hex(), until, seen=now)

    def renew(self, node: bytes, role: str, key: str, now: float, until: float) -> None:
        """Before the next certificate of one that has shown its last. Raises RefusedError."""
        self._may_hold(node, role, key)
        known = self.holders.get(node.hex())
        if known is None:
            raise RefusedError("this hub knows of no certificate of that node: join with a token")
        known.until, known.seen = max(known.until, until), now

    def adopt(self, node: bytes, key: str, name: str, now: float, until: float) -> bool:
        """A peer that has shown a certificate in force, which this ledger knows nothing of: it was lost, or is an old copy. Whether that is news.
        Raises RefusedError when there are too many."""
        known = self.holders.get(node.hex())
        if known is not None and (known.key or not key):
            return False
        self._drop(node.hex())
        self._make_room(now)
        self.holders[node.hex()] = Holder(key, "peer", name, "", until, seen=now)
        return True

    def came_with(self, node: bytes, ident: bytes) -> bool:
        """A known node has shown a token, which an eviction of the node will revoke. Whether that is news."""
        known = self.holders.get(node.hex())
        if known is None or ident.hex() not in self.grants or ident.hex() in (known.token, *known.shown):
            return False
        known.shown = [*known.shown, ident.hex()][-limits.MAX_SHOWN :]
        return True

    def _usable(self, ident: bytes, role: str, now: float, *, local: bool) -> Grant:
        self.secret(ident)
        found = self.grants[ident.hex()]
        if fault := found.fault(now):
            raise RefusedError(f"the token {fault}: ask for a new one (the hub's token file, or `p2pcast token create`)")
        if role != found.role and not (found.own and local):
            raise RefusedError(
                f"this token admits as {found.role}, not as {role}: ask for another (`p2pcast token create --role {role}`)"
            )
        return found

    def _may_hold(self, node: bytes, role: str, key: str) -> None:
        self.check_not_evicted(node)
        known = self.holders.get(node.hex())
        if known is not None and known.key and (known.key, known.role) != (key, role):
            raise RefusedError("that node's name belongs to another key: remove the state folder to join as a new node")

    def _make_room(self, now: float) -> None:
        self._forget(now)
        if len(self.holders) < limits.MAX_HOLDERS:
            return
        # A node without a certificate in force has the least to lose. Over plain text, no node has one.
        idle = [(h.seen, n) for n, h in self.holders.items() if h.until <= now or not h.key]
        if not idle:
            raise RefusedError(f"{limits.MAX_HOLDERS} nodes hold certificates already")
        self._drop(min(idle)[1])

    def _drop(self, node: str) -> None:
        known = self.holders.pop(node, None)
        if known is not None and self._names.get(known.called) == node:
            del self._names[known.called]

    def _forget(self, now: float) -> None:
        """What can have no effect any more."""
        for node in [n for n, h in self.holders.items() if h.until + (KNOWN_S if h.role == "peer" else 0.0) <= now]:
            self._drop(node)
        bought = {t for h in self.holders.values() for t in (h.token, *h.shown)}
        crowded = len(self.grants) >= limits.MAX_TOKENS

        def kept(ident: str, found: Grant) -> bool:
            # A revoked token admits no new node; while there is room, the list and the error name it as revoked.
            known = found.own and found.expires is not None and now < found.expires + KNOWN_S
            return ident in bought or found.fault(now) is None or known or (found.revoked and not crowded)

        self.grants = {i: g for i, g in self.grants.items() if kept(i, g)}

    # -- names

    def call(self, node: bytes, name: str, now: float, present: Callable[[str], bool]) -> str:
        """What a known peer goes by from now on: ``name``, or where that is another node's, a name of the hub's making. ``present``: whether a node is connected. Raises RefusedError."""
        check_name(name)
        ident = node.hex()
        known = self.holders[ident]
        known.name = name
        self.saw(ident, now)
        if self._names.get(known.called) == ident:
            del self._names[known.called]
        # A node chooses its id, so that the beginning of one is not enough.
        tries = (name, *(marked(name, ident, digits) for digits in (8, 16, len(ident))))
        known.called = next(t for t in tries if self._is_free(t, now, present))
        self._names[known.called] = ident
        return known.called

    def saw(self, node: str, now: float) -> None:
        """A known node is connected."""
        known = self.holders[node]
        known.seen = now
        if not known.key:
            known.until = now

    def _is_free(self, name: str, now: float, present: Callable[[str], bool]) -> bool:
        owner = self._names.get(name)
        if owner is None:
            return True
        if bytes.fromhex(owner) not in self._evicted and (present(owner) or now < self.holders[owner].seen + NAME_KEPT_S):
            return False
        self.holders[owner].called = ""
        del self._names[name]
        return True

    def find(self, peer: str) -> tuple[str, str]:
        """A node to be evicted, by its id or the name that it goes by, and that name. Any id will do: the ledger may have been lost. Raises RefusedError."""
        if is_id(peer) or peer in self.holders:
            known = self.holders.get(peer)
            return peer, peer if known is None else known.called or known.name
        owner = self._names.get(peer)
        if owner is not None and bytes.fromhex(owner) not in self._evicted:
            return owner, peer
        # Trainers, and peers that have not joined yet. A node that goes by another name does not count: the same command would evict it the second time.
        found = [n for n, h in self.holders.items() if h.name == peer and not h.called and bytes.fromhex(n) not in self._evicted]
        if len(found) > 1:
            raise RefusedError(f"{len(found)} nodes have the name {shown(peer)}: give one node's id, {' or '.join(found[:8])}")
        if not found:
            raise RefusedError(f"no node of this run has the name or id {shown(peer)}")
        return found[0], peer

    def others(self, node: str, name: str) -> list[str]:
        """Other nodes that have asked to be called so."""
        return [n for n, h in self.holders.items() if n != node and h.name == name and bytes.fromhex(n) not in self._evicted]

    # -- evictions

    def check_not_evicted(self, node: bytes) -> None:
        """Raises RefusedError."""
        if node in self._evicted:
            raise RefusedError("this node was evicted from the run")

    def had(self, node: str, now: float) -> list[str]:
        """Tokens in force that would let a node in again under another id. A node that had one of the hub's own tokens may have read a later one in the same file."""
        known = self.holders.get(node)
        if known is None:
            return []
        shown = {i for i in (known.token, *known.shown) if i in self.grants}
        own = any(self.grants[i].own for i in shown)
        return [i for i, g in self.grants.items() if g.fault(now) is None and (i in shown or (own and g.own))]
