"""Evictions from a run, as statements signed with the run's key (docs/formats/wire-protocol.md, section 2). Pure.

Guarantees: a statement from a peer counts only if the run's key has signed it. Of two statements about one node, the
later one counts, in any order of arrival. So no empty, short or old list makes a node forget an eviction. Only the hub
can undo an eviction, by a later statement.

    statement   node (16 bytes) | token (8) | serial (u64, little-endian) | flag (1) | Ed25519 signature (64)
    flag        1: evicted, 0: may join again
    signed      "p2pcast eviction 1\\0" and the 33 bytes before the signature
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError, RefusedError
from p2pcast.trust.node_names import quoted

Record = dict[str, Any]
DOMAIN = b"p2pcast eviction 1\0"
NODE_BYTES, TOKEN_BYTES, SERIAL_BYTES, SIGNATURE_BYTES = 16, 8, 8, 64
BODY_BYTES = NODE_BYTES + TOKEN_BYTES + SERIAL_BYTES + 1
NO_TOKEN = bytes(TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class Statement:
    """``token``: ident of the token that admitted the node; a hub that learns of the eviction again revokes that token
    again. ``signature`` empty: the statement comes from a hub that signs none; such a statement has serial 0 and is
    never passed on.
    """

    node: bytes
    token: bytes
    serial: int
    evicted: bool
    signature: bytes = b""

    @property
    def body(self) -> bytes:
        return self.node + self.token + self.serial.to_bytes(SERIAL_BYTES, "little") + bytes([self.evicted])

    @property
    def packed(self) -> bytes:
        return self.body + self.signature

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Decode a statement, signed or not, without verifying it. Raises IntegrityError."""
        if len(data) not in (BODY_BYTES, limits.STATEMENT_BYTES) or data[BODY_BYTES - 1] > 1:
            raise IntegrityError("not a statement about an eviction: wrong length or flag")
        at = NODE_BYTES + TOKEN_BYTES
        serial = int.from_bytes(data[at : BODY_BYTES - 1], "little")
        return cls(data[:NODE_BYTES], data[NODE_BYTES:at], serial, data[BODY_BYTES - 1] == 1, data[BODY_BYTES:])

    def signed(self, sign: Callable[[bytes], bytes]) -> Self:
        return replace(self, signature=sign(DOMAIN + self.body))

    def genuine(self, public: bytes) -> bool:
        """Whether the run's key has signed the statement."""
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(self.signature, DOMAIN + self.body)
        except (InvalidSignature, ValueError):
            return False
        return True


class Evictions:
    """``nodes``: the evicted nodes; the same set for as long as this object lives. ``tokens``: idents of tokens that
    count as revoked.

    ``pending``: records for an append-only file that were not yet put there.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        """Read the records of an append-only file. Raises LocalError."""
        self.nodes: set[bytes] = set()
        self.tokens: dict[str, None] = {}
        self.pending: list[Record] = []
        self._known: dict[bytes, Statement] = {}
        self._names: dict[bytes, str] = {}
        self._stated: dict[bytes, int] = {}
        self._untold: list[Statement] = []
        for record in records:
            try:
                if "token" in record:
                    self._strike(str(record["token"]))
                else:
                    self._keep(Statement.parse(bytes.fromhex(record["statement"])), str(record.get("name", "")))
            except (KeyError, TypeError, ValueError, IntegrityError):
                raise LocalError("the record of evictions is damaged") from None

    def __repr__(self) -> str:
        return f"Evictions({len(self.nodes)} nodes of {len(self._known)} known)"

    @property
    def records(self) -> list[Record]:
        """Return the shortest list of records with the same effect. Thread-safe."""
        kept = [_record(s, self._names.get(s.node, "")) for s in list(self._known.values())]
        return kept + [{"token": ident} for ident in list(self.tokens)]

    def packed(self) -> list[bytes]:
        """Return all signed statements."""
        return [s.packed for s in self._known.values() if s.signature]

    def knows(self, node: bytes) -> bool:
        return node in self._known

    def is_news(self, statement: Statement) -> bool:
        known = self._known.get(statement.node)
        return known is None or statement.serial > known.serial

    def take(self, statement: Statement, name: str = "") -> bool:
        """Record a verified statement. Returns whether it was new. Raises RefusedError if there are too many."""
        if not self.is_news(statement):
            return False
        if statement.node not in self._known and len(self._known) >= limits.MAX_EVICTED:
            readmitted = next((n for n, s in self._known.items() if not s.evicted), None)
            if readmitted is None:
                raise RefusedError(f"{limits.MAX_EVICTED} nodes are evicted already")
            del self._known[readmitted]
            self._names.pop(readmitted, None)
        name = name or self._names.get(statement.node, "")
        self._keep(statement, name)
        self.pending.append(_record(statement, name))
        return True

    def accept(self, packed: Iterable[bytes], public: bytes) -> list[Statement]:
        """Take statements from another node; returns the new ones. Raises IntegrityError at the first that the run's
        key has not signed; known statements cost nothing.
        """
        news = []
        for data in packed:
            statement = Statement.parse(data)
            if not self.is_news(statement):
                continue
            if not statement.genuine(public):
                raise IntegrityError("a statement about an eviction is not signed by this run's key")
            try:
                self.take(statement)
            except RefusedError:
                break
            news.append(statement)
        return news

    def revoke(self, ident: str) -> None:
        """Revoke a token for good."""
        if ident not in self.tokens:
            self._strike(ident)
            self.pending.append({"token": ident})

    # -- at the hub

    def decide(
        self, node: bytes, token: bytes, *, evicted: bool, name: str, now: float, sign: Callable[[bytes], bytes]
    ) -> Statement:
        """A new signed statement with a serial above all known ones. ``NO_TOKEN``: keep the token of the node's earlier
        statement. Raises RefusedError when there are too many.
        """
        # The clock is a lower bound: a hub with an old copy of its file must not reuse serials that peers know.
        latest = max((s.serial for s in self._known.values()), default=0)
        if token == NO_TOKEN and node in self._known:
            token = self._known[node].token
        made = Statement(node, token, max(latest + 1, int(now * 1000)), evicted).signed(sign)
        self.take(made, name)
        return made

    def find(self, peer: str) -> tuple[bytes, str]:
        """Return the id and name of the evicted node with this id or name. Raises RefusedError."""
        found = [n for n in self.nodes if n.hex() == peer] or [n for n in self.nodes if self._names.get(n) == peer]
        if len(found) != 1:
            many = f"several evicted nodes have this name; give an id: {' or '.join(n.hex() for n in found[:8])}"
            raise RefusedError(many if found else f"{quoted(peer)} is not evicted")
        return found[0], self._names.get(found[0], "") or found[0].hex()

    # -- at a peer

    def connected(self) -> None:
        """Start a new connection to the hub, on which the hub has not sent any statements yet."""
        self._stated, self._untold = {}, []

    def note_stated(self, packed: Iterable[bytes]) -> None:
        """Record that the hub has sent these statements, which ``accept`` has taken."""
        for data in packed:
            statement = Statement.parse(data)
            self._stated[statement.node] = max(statement.serial, self._stated.get(statement.node, 0))
        self._untold = [s for s in self._known.values() if s.signature and s.serial > self._stated.get(s.node, -1)]

    def untold(self, public: bytes) -> list[bytes]:
        """The next statements for the hub, at most MAX_RELAYED: those that the hub has not sent on this connection.
        Each is returned once per connection.
        """
        if not self._untold:
            return []
        some, self._untold = self._untold[: limits.MAX_RELAYED], self._untold[limits.MAX_RELAYED :]
        self._stated |= {s.node: s.serial for s in some}
        # Statements of another run may be left in the state folder.
        return [s.packed for s in some if s.genuine(public)]

    def _keep(self, statement: Statement, name: str) -> None:
        self._known[statement.node] = statement
        if name:
            self._names[statement.node] = name
        (self.nodes.add if statement.evicted else self.nodes.discard)(statement.node)
        if statement.evicted and statement.token != NO_TOKEN:
            self._strike(statement.token.hex())

    def _strike(self, ident: str) -> None:
        if len(self.tokens) >= limits.MAX_REVOKED:
            del self.tokens[next(iter(self.tokens))]
        self.tokens[ident] = None


def unsigned(node: bytes) -> Statement:
    """An eviction from a hub that does not sign statements."""
    return Statement(node, NO_TOKEN, 0, evicted=True)


def _record(statement: Statement, name: str) -> Record:
    return {"statement": statement.packed.hex()} | ({"name": name} if name else {})
