"""The hub's records of join tokens, certificate holders and nodes' names. Pure: time and randomness are passed
in.

Guarantees:

- A token admits no new node once it is revoked, expired or used up.
- A known node gets its next certificate by its key alone, whatever the state of its token.
- A node id belongs to the first key admitted under it, for as long as the node is known.
- A name belongs to the first node that took it, until that node is evicted or has been away for ``NAME_KEPT_S``.
- An evicted node gets no certificate, by any token.
- No row for people holds a secret.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from p2pcast.ground import limits
from p2pcast.ground.errors import LocalError, RefusedError, UsageError
from p2pcast.trust.dial_permissions import BOUGHT
from p2pcast.trust.join_token import UNKNOWN_TOKEN, JoinToken
from p2pcast.trust.node_names import check_name, disambiguated, is_id, is_name, quoted

IDENT_DIGITS = 16
DAY_S = 86400.0
LEGACY_TTL_S = 14 * DAY_S
"""Remaining lifetime, in seconds, of a hub's own token that an earlier release created without an expiry time."""
KNOWN_S = 90 * DAY_S
"""Seconds after a peer's certificate expires in which its key is enough to get the next certificate."""
NAME_KEPT_S = 7 * DAY_S
"""Time in seconds for which a name stays reserved for an absent node: longer than a weekend."""
FORMAT = 2
"""Format number of the document. Format 1 (releases up to 0.1.0) held the evictions too, and has no number."""


@dataclass(slots=True)
class TokenRecord:
    """A join token at its hub. Times in Unix seconds. ``uses``: most nodes to admit; None: no limit. ``own``: made by
    the hub for its token file.
    """

    secret: str
    role: str
    created: float
    expires: float | None = None
    uses: int | None = None
    used: int = 0
    revoked: bool = False
    own: bool = False

    def __repr__(self) -> str:
        return f"TokenRecord({self.role}, {'revoked' if self.revoked else f'used {self.used}'})"

    def fault(self, now: float) -> str | None:
        """Return why the token cannot admit a new node; None if it can."""
        if self.revoked:
            return "was revoked"
        if self.expires is not None and now >= self.expires:
            return "has expired"
        if self.uses is not None and self.used >= self.uses:
            return "is used up"
        return None


@dataclass(slots=True)
class Holder:
    """A node that has a certificate, or has joined over plaintext. ``key``: fingerprint of its key (empty over
    plaintext). ``name``: the requested name; ``called``: the name in use. ``token``: ident of the token that admitted
    the node (empty: unknown); ``shown``: other tokens that the node has used. ``until``: end of its newest certificate;
    ``seen``: time of its last connection; both in Unix seconds.
    """

    key: str
    role: str
    name: str
    token: str
    until: float
    shown: list[str] = field(default_factory=list)
    called: str = ""
    seen: float = 0.0


_TOKEN, _HOLDER = (tuple(field.name for field in fields(kind)) for kind in (TokenRecord, Holder))


class TokenRegister:
    """All records. ``document``: the records for JSON. ``evicted``: evicted nodes, a set kept elsewhere. ``legacy``:
    node → name of evictions in a document of format 1.
    """

    def __init__(self, evicted: Container[bytes] = frozenset()) -> None:
        self.ages_count = True
        """Whether records are deleted by age. They are not while the clock may be wrong."""
        self.tokens: dict[str, TokenRecord] = {}
        self.holders: dict[str, Holder] = {}
        """Node id in hexadecimal → its record."""
        self.legacy: dict[str, str] = {}
        self._evicted = evicted
        self._names: dict[str, str] = {}
        """Name in use → node id in hexadecimal."""

    def __repr__(self) -> str:
        return f"TokenRegister({len(self.tokens)} tokens, {len(self.holders)} holders)"

    @property
    def document(self) -> dict[str, Any]:
        # Not `dataclasses.asdict`, which is slow for tens of thousands of records.
        return {
            "format": FORMAT,
            "tokens": {ident: {name: getattr(g, name) for name in _TOKEN} for ident, g in self.tokens.items()},
            "holders": {
                node: {name: getattr(h, name) for name in _HOLDER} | {"shown": list(h.shown)}
                for node, h in self.holders.items()
            },
        }

    @classmethod
    def of(cls, document: dict[str, Any], evicted: Container[bytes] = frozenset()) -> TokenRegister:
        """Read the records from a document. Raises LocalError."""
        made = cls(evicted)
        try:
            written = document.get("format", 1)
            made.tokens = {str(ident): TokenRecord(**g) for ident, g in document["tokens"].items()}
            made.holders = {str(node): Holder(**h) for node, h in document["holders"].items()}
            if written == 1:
                made.legacy = {str(node): str(name) for node, name in document["evicted"].items()}
        except (KeyError, TypeError, AttributeError):
            raise LocalError("the ledger of tokens and certificates is damaged") from None
        if written not in (1, FORMAT):
            raise LocalError(
                f"the ledger of tokens and certificates has format {written}, of a later release: update p2pcast"
            )
        if written == 1:
            made._take_names()
        made._names = {h.called: node for node, h in made.holders.items() if h.called}
        return made

    def _take_names(self) -> None:
        """Earlier releases gave a name to as many nodes as asked for it; those that one node alone has are that
        node's.
        """
        peers = [h for h in self.holders.values() if h.role == "peer"]
        count = Counter(h.name for h in peers)
        for found in peers:
            if count[found.name] == 1 and is_name(found.name):
                found.called, found.seen = found.name, found.until

    # -- tokens

    def own(self, now: float) -> str | None:
        """Return the ident of the hub's own token that expires last; None if none is valid."""
        found = [(g.expires, ident) for ident, g in self.tokens.items() if g.own and g.expires and g.fault(now) is None]
        return max(found)[1] if found else None

    def grant(
        self,
        secret: bytes,
        role: str,
        now: float,
        *,
        ttl_s: float | None = None,
        uses: int | None = None,
        own: bool = False,
    ) -> str:
        """Add a token and return its ident. ``ttl_s``: lifetime in seconds. Raises UsageError, RefusedError."""
        if role not in BOUGHT:
            raise UsageError(f"a token cannot give the role {role!r}: give {' or '.join(BOUGHT)}")
        self._forget(now)
        if len(self.tokens) >= limits.MAX_TOKENS and not own:
            raise RefusedError(f"the hub has {limits.MAX_TOKENS} tokens already: revoke some first")
        ident = JoinToken(b"", secret).ident.hex()
        expires = None if ttl_s is None else now + ttl_s
        self.tokens[ident] = TokenRecord(secret.hex(), role, now, expires, uses, own=own)
        return ident

    def bound_own(self, now: float) -> bool:
        """Set an expiry time for own tokens from earlier releases that have none. Returns whether there were any."""
        endless = [g for g in self.tokens.values() if g.own and g.expires is None]
        for found in endless:
            found.expires = now + LEGACY_TTL_S
        return bool(endless)

    def secret(self, ident: bytes) -> bytes:
        """Return a known token's secret. The token may be revoked or expired; ``admit`` checks. Raises RefusedError."""
        found = self.tokens.get(ident.hex())
        if found is None:
            raise RefusedError(UNKNOWN_TOKEN)
        return bytes.fromhex(found.secret)

    def revoke(self, ident: str) -> str:
        """Revoke a token by its ident or an unambiguous prefix, and return the ident. Raises UsageError."""
        found = (
            [ident]
            if ident in self.tokens
            else [i for i in self.tokens if i.startswith(ident.lower())]
            if ident
            else []
        )
        if len(found) != 1:
            raise UsageError(f"{ident[:IDENT_DIGITS]!r} is not a token's id: see `p2pcast token list`")
        self.tokens[found[0]].revoked = True
        return found[0]

    def strike(self, idents: Iterable[str]) -> None:
        """Revoke those of these tokens that are known."""
        for ident in idents:
            if ident in self.tokens:
                self.tokens[ident].revoked = True

    def rows(self, now: float) -> list[dict[str, Any]]:
        """Return the tokens as rows to show to people, without secrets."""
        return [
            {
                "id": ident, "role": g.role, "own": g.own, "created": g.created, "expires": g.expires,
                "uses": g.uses, "used": g.used, "usable": g.fault(now) is None, "fault": g.fault(now),
            }
            for ident, g in self.tokens.items()
        ]  # fmt: skip

    # -- certificates

    def admit(
        self, ident: bytes, node: bytes, role: str, key: str, name: str, now: float, until: float, *, local: bool
    ) -> None:
        """Admit a node on its first connection, before a certificate is issued. A known node needs no valid token,
        since its request has proved its key. Any other node uses up one admission of the token. ``local``: the request
        comes from the hub's machine, where the hub's own tokens give every role. Raises RefusedError.
        """
        if role not in BOUGHT:
            raise RefusedError(f"a token cannot give the role {role!r}")
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
        """Record the next certificate of a node that has presented its last one. Raises RefusedError."""
        self._may_hold(node, role, key)
        known = self.holders.get(node.hex())
        if known is None:
            raise RefusedError("this hub has no record of this node's certificate: join with a token")
        known.until, known.seen = max(known.until, until), now

    def adopt(self, node: bytes, key: str, name: str, now: float, until: float) -> bool:
        """Record a peer with a valid certificate that these records lack, because they were lost or are an old copy.
        Returns whether the peer was unknown. Raises RefusedError when there are too many.
        """
        known = self.holders.get(node.hex())
        if known is not None and (known.key or not key):
            return False
        self._drop(node.hex())
        self._make_room(now)
        self.holders[node.hex()] = Holder(key, "peer", name, "", until, seen=now)
        return True

    def came_with(self, node: bytes, ident: bytes) -> bool:
        """Record that a known node has used a token, which an eviction of the node will revoke. Returns whether that
        was new.
        """
        known = self.holders.get(node.hex())
        if known is None or ident.hex() not in self.tokens or ident.hex() in (known.token, *known.shown):
            return False
        known.shown = [*known.shown, ident.hex()][-limits.MAX_NODE_TOKENS :]
        return True

    def _usable(self, ident: bytes, role: str, now: float, *, local: bool) -> TokenRecord:
        self.secret(ident)
        found = self.tokens[ident.hex()]
        if fault := found.fault(now):
            raise RefusedError(f"the token {fault}: get a new one (the hub's token file, or `p2pcast token create`)")
        if role != found.role and not (found.own and local):
            raise RefusedError(
                f"this token admits as {found.role}, not as {role}: ask for another (`p2pcast token create --role "
                f"{role}`)"
            )
        return found

    def _may_hold(self, node: bytes, role: str, key: str) -> None:
        self.check_not_evicted(node)
        known = self.holders.get(node.hex())
        if known is not None and known.key and (known.key, known.role) != (key, role):
            raise RefusedError("this node's id belongs to another key: remove the state folder to join as a new node")

    def _make_room(self, now: float) -> None:
        self._forget(now)
        if len(self.holders) < limits.MAX_HOLDERS:
            return
        # Forget a node without a valid certificate first: it can join again with a token. Over plaintext no node has
        # one.
        idle = [(h.seen, n) for n, h in self.holders.items() if h.until <= now or not h.key]
        if not idle:
            raise RefusedError(f"{limits.MAX_HOLDERS} nodes hold certificates already")
        self._drop(min(idle)[1])

    def _drop(self, node: str) -> None:
        known = self.holders.pop(node, None)
        if known is not None and self._names.get(known.called) == node:
            del self._names[known.called]

    def rebase(self, now: float) -> None:
        """Records of a clock that was ahead count from ``now``, which is right: their tokens live no longer for it."""
        for token in self.tokens.values():
            if token.created > now:
                token.expires = None if token.expires is None else token.expires - (token.created - now)
                token.created = now
        for holder in self.holders.values():
            holder.seen = min(holder.seen, now)

    def newest(self) -> float | None:
        """The newest time in these records; None if there is none."""
        return max([*(h.seen for h in self.holders.values()), *(g.created for g in self.tokens.values())], default=None)

    def _forget(self, now: float) -> None:
        """Forget holders and tokens that can no longer have any effect."""
        if not self.ages_count:
            return
        for node in [n for n, h in self.holders.items() if h.until + (0.0 if h.role == "trainer" else KNOWN_S) <= now]:
            self._drop(node)
        bought = {t for h in self.holders.values() for t in (h.token, *h.shown)}
        crowded = len(self.tokens) >= limits.MAX_TOKENS

        def kept(ident: str, found: TokenRecord) -> bool:
            # Keep revoked tokens while there is room, so that the list and the error can say that a token was revoked.
            known = found.own and found.expires is not None and now < found.expires + KNOWN_S
            return ident in bought or found.fault(now) is None or known or (found.revoked and not crowded)

        self.tokens = {i: g for i, g in self.tokens.items() if kept(i, g)}

    # -- names

    def call(self, node: bytes, name: str, now: float, present: Callable[[str], bool]) -> str:
        """Assign a known peer's name: ``name``, or if another node has it, a name made from ``name`` and the node's id.
        ``present``: whether a node is connected. Returns the name. Raises RefusedError.
        """
        check_name(name)
        ident = node.hex()
        known = self.holders[ident]
        known.name = name
        self.saw(ident, now)
        if self._names.get(known.called) == ident:
            del self._names[known.called]
        # A node chooses its own id, so the beginning of an id may be ambiguous.
        tries = (name, *(disambiguated(name, ident, digits) for digits in (8, 16, len(ident))))
        known.called = next(t for t in tries if self._is_free(t, now, present))
        self._names[known.called] = ident
        return known.called

    def saw(self, node: str, now: float) -> None:
        """Record that a known node is connected at ``now``."""
        known = self.holders[node]
        known.seen = now
        if not known.key:
            known.until = now

    def _is_free(self, name: str, now: float, present: Callable[[str], bool]) -> bool:
        owner = self._names.get(name)
        if owner is None:
            return True
        if bytes.fromhex(owner) not in self._evicted and (
            present(owner) or now < self.holders[owner].seen + NAME_KEPT_S
        ):
            return False
        self.holders[owner].called = ""
        del self._names[name]
        return True

    def find(self, peer: str) -> tuple[str, str]:
        """The node to evict, by id or by name in use: its id and name. Accepts unknown ids, because the records may
        have been lost. Raises RefusedError.
        """
        if is_id(peer) or peer in self.holders:
            known = self.holders.get(peer)
            return peer, peer if known is None else known.called or known.name
        owner = self._names.get(peer)
        if owner is not None and bytes.fromhex(owner) not in self._evicted:
            return owner, peer
        # Trainers, and peers that have not joined yet. A node with another name in use does not count; otherwise
        # repeating the command would evict a second node.
        found = [
            n
            for n, h in self.holders.items()
            if h.name == peer and not h.called and bytes.fromhex(n) not in self._evicted
        ]
        if len(found) > 1:
            raise RefusedError(
                f"{len(found)} nodes have the name {quoted(peer)}: give one node's id, {' or '.join(found[:8])}"
            )
        if not found:
            raise RefusedError(f"no node of this run has the name or id {quoted(peer)}")
        return found[0], peer

    def others(self, node: str, name: str) -> list[str]:
        """Other nodes that have requested this name."""
        return [
            n for n, h in self.holders.items() if n != node and h.name == name and bytes.fromhex(n) not in self._evicted
        ]

    # -- evictions

    def check_not_evicted(self, node: bytes) -> None:
        """Raises RefusedError."""
        if node in self._evicted:
            raise RefusedError("this node was evicted from the run")

    def tokens_to_revoke(self, node: str, now: float) -> list[str]:
        """Valid tokens with which an evicted node could join under another id. A node that used one of the hub's own
        tokens may have read a later one in the same file, so all of the hub's own count.
        """
        known = self.holders.get(node)
        if known is None:
            return []
        shown = {i for i in (known.token, *known.shown) if i in self.tokens}
        own = any(self.tokens[i].own for i in shown)
        return [i for i, g in self.tokens.items() if g.fault(now) is None and (i in shown or (own and g.own))]
