"""Who is at the other end: by certificates, or by both knowing a token's secret (docs/wire-protocol.md, section 2). Pure.

Promises: nothing is proved to a listener before it is known to be whom the token pins (behind TLS), or while it has not proved as much itself; behind TLS nobody speaks for another
node, or in a role that its certificate does not give, and without a certificate there is nothing to do but to ask for one; whoever was evicted is refused by either side.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Protocol

from p2pcast.errors import RefusedError, RemoteError, UntrustedError
from p2pcast.trust.certificates import certified, fingerprint
from p2pcast.trust.roles import DIALERS, ENROL, LISTENERS, Certified
from p2pcast.wire import messages, versions
from p2pcast.wire.messages import Body, Type
from p2pcast.wire.state import Side
from p2pcast.wire.token import DIALER_LABEL, LISTENER_LABEL, Token
from p2pcast.wire.versions import SPOKEN, Speaks

PARENT = "parent"
"""The role of a dialer who feeds the listener."""


class Gate(Protocol):
    """What a hub knows and nobody else: whom it admits. ``leaf`` and ``authority``: its certificates, DER."""

    @property
    def leaf(self) -> bytes: ...
    @property
    def authority(self) -> bytes: ...
    def secret(self, ident: bytes) -> bytes:
        """Of a token that it gave out. Raises RefusedError."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who we are. ``evicted``: nodes that we have nothing to do with. ``gate``: where first connections are answered. ``vouch``: where one is begun; takes the
    listener's certificate and its authority's, and raises RefusedError unless the token pins them, else says whom the first names. ``speaks``: protocols."""

    node: bytes
    name: str
    token: Token
    evicted: Container[bytes] = frozenset()
    gate: Gate | None = None
    vouch: Callable[[bytes, bytes], Certified] | None = None
    speaks: Speaks = SPOKEN


@dataclass(frozen=True, slots=True)
class Established:
    """The handshake is done; ``hello`` is the dialer's HELLO, ``remote`` the other side's node, ``protocol`` what both speak from now on."""

    hello: Body
    remote: bytes
    protocol: int


Answer = tuple[Type, bytes]
"""A message's type and body."""


class Handshake:
    """One side's. ``begin`` and ``take`` give what is to be said; ``established`` is set at the end. The order of messages is ``wire.state``'s to watch."""

    def __init__(self, side: Side, identity: Identity, nonce: bytes, hello: Body | None, expect: bytes | None) -> None:
        self.hello: Body = {}
        """The dialer's."""
        self.established: Established | None = None
        self.protocol: int | None = None
        """What both sides have settled on, once they have."""
        self._side = side
        self._identity = identity
        self._nonce = nonce
        self._expect = expect
        self._raw = b""
        """The HELLO's body."""
        self._remote = b""
        self._leaf: bytes | None = None
        """Behind TLS: the listener's certificate, DER."""
        self._certified: Certified | None = None
        """Behind TLS: whom the other side's certificate names."""
        self._token = identity.token
        """Which proofs are made with."""
        if side is Side.DIALER:
            if hello is None:
                raise ValueError("a dialer needs a hello")
            self.hello = {
                "v": identity.speaks.greatest,
                "least": identity.speaks.least,
                "greatest": identity.speaks.greatest,
                "run": identity.token.run,
                "node": identity.node,
                "name": identity.name,
                "nonce": nonce,
                "token": identity.token.ident,
                **hello,
            }
            self._raw = messages.encode(Type.HELLO, self.hello)

    @property
    def begin(self) -> Answer:
        return Type.HELLO, self._raw

    @property
    def needs_no_proof(self) -> bool:
        """Certificates have shown who is who."""
        return self._certified is not None and self.hello["purpose"] != ENROL

    def secured(self, theirs: bytes | None, *, proven: bool) -> None:
        """There is TLS, and nothing else was said yet. ``theirs``: the other side's certificate (DER), for a key that it has shown to hold; ``proven``: TLS has found it to be
        of the run's authority. Raises RefusedError when the other side is not whom we want."""
        if theirs is not None and proven:
            self._certified = certified(theirs)
            if self._certified.run != self._identity.token.run:
                raise RefusedError("the other side's certificate is of another run")
        if self._side is Side.LISTENER:
            self._leaf = b"" if self._identity.gate is None else self._identity.gate.leaf
            return
        self._leaf = theirs or b""
        purpose, found = self.hello["purpose"], self._certified
        if purpose == ENROL:
            return
        if found is None or found.role not in LISTENERS[purpose]:
            who = "stranger" if found is None else found.role
            raise UntrustedError(f"a {who} answers at this address, who has no business with a {purpose} connection")
        self._know(found.node)

    def greeted(self, unchecked: Body) -> None:
        """A HELLO has come, and nobody has looked at it yet: what is in it of a protocol that is not spoken here is no fault. Raises IncompatibleError."""
        if (theirs := versions.offered(unchecked)) is not None:
            called = versions.sides(unchecked.get("purpose"), unchecked.get("role"))
            self.protocol = versions.settle(theirs, self._identity.speaks, called)

    def refusal(self, message: str) -> RefusedError:
        """What a refusal by the other side amounts to."""
        if self._side is Side.DIALER and self.established is None:
            called = versions.sides(self.hello["purpose"], self.hello["role"])
            return versions.refusal(message, self._identity.speaks, called)
        return RefusedError(f"the other side says: {message}")

    def take(self, kind: Type, content: Body, body: bytes) -> Answer | None:
        """A message of the handshake. Raises RefusedError, RemoteError."""
        if kind in (Type.HELLO, Type.CHALLENGE) and content["run"] != self._identity.token.run:
            raise RefusedError("that token belongs to another run: take the one that this hub wrote")
        if kind is Type.HELLO:
            return self._on_hello(content, body)
        if kind is Type.CHALLENGE:
            return self._on_challenge(content)
        if kind is Type.PROOF:
            if not hmac.compare_digest(self._proof(DIALER_LABEL, self._nonce, self._identity.node), content["proof"]):
                raise RefusedError("the token's proof is wrong")
            return self._ready()
        self._settle(versions.settled(content))
        self.established = Established(self.hello, self._remote, versions.settled(content))
        return None

    # -- the listener

    def _on_hello(self, content: Body, body: bytes) -> Answer:
        self.hello, self._raw, self._remote = content, body, content["node"]
        if self.protocol is None:
            raise RemoteError("HELLO: the least protocol is above the greatest")
        if content["role"] == PARENT and content["purpose"] != "data":
            raise RemoteError(f"a parent dials for data, not for {content['purpose']}")
        if self._remote in self._identity.evicted:
            raise RefusedError("this node was evicted from the run")
        stranger = self._leaf is not None and self._certified is None
        if stranger and content["purpose"] != ENROL:
            raise RefusedError("without a certificate there is nothing to do here but to ask for one")
        if not stranger and content["purpose"] == ENROL:
            raise RefusedError("there is nothing to enrol for: links are not encrypted here, or a certificate was shown")
        if self._certified is not None:
            self._check(self._certified)
            return self._ready()
        gate = self._identity.gate
        if not stranger:
            if content["token"] != self._token.ident:
                raise RefusedError("the token is not one that this hub gave out")
        elif gate is None:
            raise RefusedError("this node admits nobody: dial the hub")
        else:
            self._token = Token(self._identity.token.run, gate.secret(content["token"]))
        answer: dict[str, Any] = {
            "v": self.protocol,
            "run": self._identity.token.run,
            "node": self._identity.node,
            "nonce": self._nonce,
            "proof": self._proof(LISTENER_LABEL, self._nonce, self._identity.node),
        }
        if stranger and gate is not None:
            answer["authority"] = gate.authority
        return Type.CHALLENGE, messages.encode(Type.CHALLENGE, answer)

    def _check(self, who: Certified) -> None:
        """What a HELLO claims against its sender's certificate. Raises RefusedError."""
        purpose = self.hello["purpose"]
        if who.node != self._remote:
            raise RefusedError("the certificate is another node's")
        if who.role not in DIALERS[purpose]:
            raise RefusedError(f"a {who.role}'s certificate is not for a {purpose} connection")

    def _ready(self) -> Answer:
        assert self.protocol is not None, "settled when HELLO came"
        self.established = Established(self.hello, self._remote, self.protocol)
        return Type.READY, messages.encode(Type.READY, {"v": self.protocol})

    # -- the dialer

    def _on_challenge(self, content: Body) -> Answer:
        node, nonce = content["node"], content["nonce"]
        self._settle(content["v"])
        if self._leaf is not None:
            if self._identity.vouch is None or self.hello["purpose"] != ENROL:
                raise RemoteError("CHALLENGE where certificates have been shown")
            # Before anything is proved to it: this may be somebody on the way.
            if self._identity.vouch(self._leaf, content.get("authority", b"")).node != node:
                raise UntrustedError("the hub's certificate is another node's")
        if not hmac.compare_digest(self._proof(LISTENER_LABEL, nonce, node), content["proof"]):
            raise RefusedError("the other side does not know this run's token")
        self._know(node)
        return Type.PROOF, messages.encode(Type.PROOF, {"proof": self._proof(DIALER_LABEL, nonce, node)})

    def _settle(self, protocol: int) -> None:
        """Raises RemoteError."""
        versions.check_settled(protocol, self._identity.speaks, self.protocol)
        self.protocol = protocol

    def _know(self, node: bytes) -> None:
        """Whom we deal with. Raises RefusedError."""
        if self._expect is not None and node != self._expect:
            raise RefusedError("another node answers at this address")
        if node in self._identity.evicted:
            raise RefusedError("the node at this address was evicted from the run")
        self._remote = node

    def _proof(self, label: bytes, nonce: bytes, node: bytes) -> bytes:
        channel = b"" if self._leaf is None else fingerprint(self._leaf)
        label %= self.protocol
        return self._token.proof(label, self._raw, nonce, node, channel)
