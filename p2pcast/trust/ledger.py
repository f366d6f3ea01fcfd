"""What a hub remembers of trust: join tokens, holders of certificates, and who was evicted. Pure: time and randomness are passed in.

Promises: a token buys nothing once it is revoked, expired or used up; a node's name belongs to the first key that was admitted under it, for as long as a certificate for it may be in
force; who was evicted gets no certificate, by whichever token, until that is undone; none of the rows for people holds a secret.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from p2pcast import limits
from p2pcast.errors import LocalError, RefusedError, UsageError
from p2pcast.trust.roles import BOUGHT
from p2pcast.wire.token import Token

IDENT_DIGITS = 16


@dataclass(slots=True)
class Grant:
    """A join token at its hub. Times in Unix seconds; ``uses`` None: any number. ``own``: the one that the hub made for itself at its first start."""

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
        """Why it buys nothing any more."""
        if self.revoked:
            return "was revoked"
        if self.expires is not None and now >= self.expires:
            return "has expired"
        if self.uses is not None and self.used >= self.uses:
            return "is used up"
        return None


@dataclass(slots=True)
class Holder:
    """Who has a certificate. ``key``: its print; ``token``: what bought the first one; ``until``: the end of the newest one."""

    key: str
    role: str
    name: str
    token: str
    until: float


class Ledger:
    """``document`` is all of it, for JSON."""

    def __init__(self) -> None:
        self.grants: dict[str, Grant] = {}
        self.holders: dict[str, Holder] = {}
        """Node, in hexadecimal →."""
        self.evicted: dict[str, str] = {}
        """Node → the name that it had."""

    def __repr__(self) -> str:
        return f"Ledger({len(self.grants)} tokens, {len(self.holders)} holders, {len(self.evicted)} evicted)"

    @property
    def document(self) -> dict[str, Any]:
        return {
            "tokens": {ident: asdict(g) for ident, g in self.grants.items()},
            "holders": {node: asdict(h) for node, h in self.holders.items()},
            "evicted": dict(self.evicted),
        }

    @classmethod
    def of(cls, document: dict[str, Any]) -> Ledger:
        """Raises LocalError."""
        made = cls()
        try:
            made.grants = {str(ident): Grant(**g) for ident, g in document["tokens"].items()}
            made.holders = {str(node): Holder(**h) for node, h in document["holders"].items()}
            made.evicted = {str(node): str(name) for node, name in document["evicted"].items()}
        except (KeyError, TypeError, AttributeError):
            raise LocalError("the ledger of tokens and certificates is damaged") from None
        return made

    # -- tokens

    def own(self) -> Grant | None:
        """The hub's own token, unless it was revoked."""
        return next((g for g in self.grants.values() if g.own and not g.revoked), None)

    def grant(
        self, secret: bytes, role: str, now: float, *, ttl_s: float | None = None, uses: int | None = None, own: bool = False
    ) -> str:
        """A new token's ident. Raises UsageError, RefusedError."""
        if role not in BOUGHT:
            raise UsageError(f"{role!r} is not a role that a token buys: {' or '.join(BOUGHT)}")
        self._forget(now)
        if len(self.grants) >= limits.MAX_TOKENS:
            raise RefusedError(f"there are {limits.MAX_TOKENS} tokens already: revoke some first")
        ident = Token(b"", secret).ident.hex()
        expires = None if ttl_s is None else now + ttl_s
        self.grants[ident] = Grant(secret.hex(), role, now, expires, uses, own=own)
        return ident

    def secret(self, ident: bytes, now: float) -> bytes:
        """Of a token that buys something. Raises RefusedError."""
        found = self.grants.get(ident.hex())
        if found is None:
            raise RefusedError("the token is not one that this hub gave out")
        if fault := found.fault(now):
            raise RefusedError(f"the token {fault}: ask for a new one (`p2pcast token create`)")
        return bytes.fromhex(found.secret)

    def revoke(self, ident: str) -> str:
        """By its ident, or enough of its beginning; gives the whole. Raises UsageError."""
        found = [i for i in self.grants if i.startswith(ident.lower())] if ident else []
        if len(found) != 1:
            raise UsageError(f"{ident[:IDENT_DIGITS]!r} is not a token's id: see `p2pcast token list`")
        self.grants[found[0]].revoked = True
        return found[0]

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
        """Before a first certificate is issued: spends the token. ``local``: asked from the hub's own machine, where its own token buys every role.
        Raises RefusedError."""
        self.secret(ident, now)
        found = self.grants[ident.hex()]
        if role not in BOUGHT:
            raise RefusedError(f"a token does not make a {role}")
        if role != found.role and not (found.own and local):
            raise RefusedError(
                f"this token admits as {found.role}, not as {role}: ask for another (`p2pcast token create --role {role}`)"
            )
        self._forget(now)
        self._may_hold(node, role, key)
        if len(self.holders) >= limits.MAX_HOLDERS and node.hex() not in self.holders:
            raise RefusedError(f"{limits.MAX_HOLDERS} nodes hold certificates already")
        known = self.holders.get(node.hex())
        if known is None or known.token != ident.hex():
            found.used += 1
        self.holders[node.hex()] = Holder(key, role, name, ident.hex(), until)

    def renew(self, node: bytes, role: str, key: str, now: float, until: float) -> None:
        """Before the next certificate of one that has shown its last. Raises RefusedError."""
        self._may_hold(node, role, key)
        known = self.holders.get(node.hex())
        if known is None:
            raise RefusedError("this hub knows of no certificate of that node: join with a token")
        known.until = max(known.until, until)

    def _may_hold(self, node: bytes, role: str, key: str) -> None:
        self.check_not_evicted(node)
        known = self.holders.get(node.hex())
        if known is not None and (known.key, known.role) != (key, role):
            raise RefusedError("that node's name belongs to another key: remove the state folder to join as a new node")

    def _forget(self, now: float) -> None:
        """What can have no effect any more."""
        self.holders = {n: h for n, h in self.holders.items() if h.until > now or n in self.evicted}
        bought = {h.token for h in self.holders.values()}
        self.grants = {i: g for i, g in self.grants.items() if i in bought or g.fault(now) is None}

    # -- evictions

    def check_not_evicted(self, node: bytes) -> None:
        """Raises RefusedError."""
        if node.hex() in self.evicted:
            raise RefusedError("this node was evicted from the run")

    def find(self, peer: str) -> str:
        """A node, by its id or its name. Raises RefusedError."""
        if peer in self.holders:
            return peer
        found = [n for n, h in self.holders.items() if h.name == peer and n not in self.evicted]
        if len(found) > 1:
            raise RefusedError(f"{len(found)} nodes go by {peer[:128]!r}: name one by its id, {' or '.join(found[:8])}")
        if not found:
            raise RefusedError(f"no node of this run goes by {peer[:128]!r}")
        return found[0]

    def evict(self, node: str, name: str) -> str | None:
        """Gives the ident of the token that had admitted it. Raises RefusedError."""
        if len(self.evicted) >= limits.MAX_EVICTED:
            raise RefusedError(f"{limits.MAX_EVICTED} nodes are evicted already")
        self.evicted[node] = name
        known = self.holders.get(node)
        return None if known is None else known.token

    def readmit(self, peer: str) -> str:
        """By id or name. Raises RefusedError."""
        found = [n for n, name in self.evicted.items() if peer in (n, name)]
        if len(found) != 1:
            raise RefusedError(f"{peer[:128]!r} is not evicted" if not found else f"name one by its id: {' or '.join(found[:8])}")
        del self.evicted[found[0]]
        return found[0]
