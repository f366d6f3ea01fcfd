"""Authenticates both ends of a connection: by certificates, or by a token's secret that both know
(docs/formats/wire-protocol.md, section 2). Pure.

Promises:

- With TLS, a dialer proves nothing before it knows that the listener's certificate is the one that the token pins.
- Without TLS, a dialer proves nothing before the listener has.

With TLS, a node can act only as itself, in its certificate's role. A node without a certificate can only ask for one.
Both sides refuse evicted nodes.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Protocol

from p2pcast.ground.errors import RefusedError, RemoteError, UntrustedError
from p2pcast.trust.certificates import certified, fingerprint
from p2pcast.trust.dial_permissions import DIALERS, ENROL, LISTENERS, Certified
from p2pcast.trust.join_token import DIALER_LABEL, LISTENER_LABEL, UNKNOWN_TOKEN, JoinToken
from p2pcast.wire import messages, protocol_versions
from p2pcast.wire.connection_state import Side
from p2pcast.wire.messages import Challenge, Hello, Proof, Ready, Type
from p2pcast.wire.protocol_versions import SPOKEN, ProtocolRange

PARENT = "parent"
"""The role of a dialer that feeds the listener."""


Greeting = Hello | Challenge | Proof | Ready
"""The messages of a handshake, except ERROR."""


@dataclass(frozen=True, slots=True)
class ConnectionRequest:
    """What a dialer says about the connection in its HELLO. ``link`` is the same for all stripes of a link."""

    purpose: str
    role: str
    link: bytes
    stripe: int
    stripes: int


class Gate(Protocol):
    """Admits nodes without a certificate. ``leaf`` and ``authority``: the hub's certificates (DER)."""

    @property
    def leaf(self) -> bytes: ...
    @property
    def authority(self) -> bytes: ...
    def secret(self, ident: bytes) -> bytes:
        """Return the secret of a token that the hub has issued. Raises RefusedError."""


@dataclass(frozen=True, slots=True)
class Identity:
    """This node's identity on its connections. ``evicted``: nodes to refuse. ``gate``: set only at the hub. ``speaks``:
    the supported protocols.

    ``verify_authority``: set only while a node enrols. It takes the listener's certificate and that of its authority,
    and returns the former's holder. It raises RefusedError unless the token pins the latter.
    """

    node: bytes
    name: str
    token: JoinToken
    evicted: Container[bytes] = frozenset()
    gate: Gate | None = None
    verify_authority: Callable[[bytes, bytes], Certified] | None = None
    speaks: ProtocolRange = SPOKEN


@dataclass(frozen=True, slots=True)
class Established:
    """The handshake is complete. ``hello``: the dialer's HELLO. ``remote``: the other side's node."""

    hello: Hello
    remote: bytes
    protocol: int


Answer = tuple[Type, bytes]
"""A message's type and body."""


class Handshake:
    """One side of the handshake. ``begin`` and ``take`` return the message to send; ``established`` is set once it is
    complete. ``wire.connection_state`` checks the order of messages.
    """

    def __init__(
        self, side: Side, identity: Identity, nonce: bytes, request: ConnectionRequest | None, expect: bytes | None
    ) -> None:
        self.hello: Hello
        """The dialer's."""
        self.established: Established | None = None
        self.protocol: int | None = None
        """The protocol that both sides settled on."""
        self._side = side
        self._identity = identity
        self._nonce = nonce
        self._expect = expect
        self._raw = b""
        """The HELLO's body."""
        self._remote = b""
        self._leaf: bytes | None = None
        """With TLS, the listener's certificate (DER)."""
        self._certified: Certified | None = None
        """With TLS, the holder of the other side's certificate."""
        self._token = identity.token
        """The token on which the proofs are based."""
        if side is Side.DIALER:
            if request is None:
                raise ValueError("a dialer needs a request")
            self.hello = Hello(
                v=identity.speaks.greatest,
                least=identity.speaks.least,
                greatest=identity.speaks.greatest,
                run=identity.token.run,
                node=identity.node,
                name=identity.name,
                nonce=nonce,
                token=identity.token.ident,
                purpose=request.purpose,
                role=request.role,
                link=request.link,
                stripe=request.stripe,
                stripes=request.stripes,
            )
            self._raw = messages.encode(self.hello)

    @property
    def begin(self) -> Answer:
        return Type.HELLO, self._raw

    @property
    def needs_no_proof(self) -> bool:
        """Whether both sides have presented certificates and the dialer does not enrol."""
        return self._certified is not None and self.hello.purpose != ENROL

    def secured(self, theirs: bytes | None, *, proven: bool) -> None:
        """Record that TLS is up, before any message. ``theirs``: the other side's certificate (DER), whose key TLS has
        verified. ``proven``: the run's authority issued it. Raises RefusedError if the node may not answer.
        """
        if theirs is not None and proven:
            self._certified = certified(theirs)
            if self._certified.run != self._identity.token.run:
                raise RefusedError("the other side's certificate is of another run")
        if self._side is Side.LISTENER:
            self._leaf = b"" if self._identity.gate is None else self._identity.gate.leaf
            return
        self._leaf = theirs or b""
        purpose, found = self.hello.purpose, self._certified
        if purpose == ENROL:
            return
        if found is None or found.role not in LISTENERS[purpose]:
            who = "stranger" if found is None else found.role
            raise UntrustedError(f"a {who} answers at this address; its role does not accept {purpose} connections")
        self._know(found.node)

    def greeted(self, unchecked: dict[str, Any]) -> None:
        """Settle on a protocol from a HELLO that has not been checked, since later protocols may change its other keys.
        Raises IncompatibleError.
        """
        if (theirs := protocol_versions.offered(unchecked)) is not None:
            called = protocol_versions.sides(unchecked.get("purpose"), unchecked.get("role"))
            self.protocol = protocol_versions.settle(theirs, self._identity.speaks, called)

    def refusal(self, message: str) -> RefusedError:
        """Return the error for a refusal by the other side."""
        if self._side is Side.DIALER and self.established is None:
            called = protocol_versions.sides(self.hello.purpose, self.hello.role)
            return protocol_versions.refusal(message, self._identity.speaks, called)
        return RefusedError(f"the other side says: {message}")

    def take(self, received: Greeting, body: bytes) -> Answer | None:
        """Handle a message of the handshake and return the answer, if any. Raises RefusedError and RemoteError."""
        if isinstance(received, Hello | Challenge) and received.run != self._identity.token.run:
            raise RefusedError("that token belongs to another run: take the one that this hub wrote")
        match received:
            case Hello():
                return self._on_hello(received, body)
            case Challenge():
                return self._on_challenge(received)
            case Proof():
                if not hmac.compare_digest(self._proof(DIALER_LABEL, self._nonce, self._identity.node), received.proof):
                    raise RefusedError("the token's proof is wrong")
                return self._ready()
            case Ready():
                protocol = protocol_versions.settled(received.v)
                self._settle(protocol)
                self.established = Established(self.hello, self._remote, protocol)
                return None

    # -- the listener

    def _on_hello(self, hello: Hello, body: bytes) -> Answer:
        self.hello, self._raw, self._remote = hello, body, hello.node
        if self.protocol is None:
            raise RemoteError("HELLO: the least protocol is above the greatest")
        if hello.role == PARENT and hello.purpose != "data":
            raise RemoteError(f"a parent dials for data, not for {hello.purpose}")
        if self._remote in self._identity.evicted:
            raise RefusedError("this node was evicted from the run")
        stranger = self._leaf is not None and self._certified is None
        if stranger and hello.purpose != ENROL:
            raise RefusedError("without a certificate there is nothing to do here but to ask for one")
        if not stranger and hello.purpose == ENROL:
            raise RefusedError(
                "there is nothing to enrol for: links are not encrypted here, or a certificate was shown"
            )
        if self._certified is not None:
            self._check(self._certified)
            return self._ready()
        gate = self._identity.gate
        if not stranger:
            if hello.token != self._token.ident:
                raise RefusedError(UNKNOWN_TOKEN)
        elif gate is None:
            raise RefusedError("this node does not admit nodes: dial the hub")
        else:
            self._token = JoinToken(self._identity.token.run, gate.secret(hello.token))
        challenge = Challenge(
            v=self.protocol,
            run=self._identity.token.run,
            node=self._identity.node,
            nonce=self._nonce,
            proof=self._proof(LISTENER_LABEL, self._nonce, self._identity.node),
            authority=gate.authority if stranger and gate is not None else None,
        )
        return Type.CHALLENGE, messages.encode(challenge)

    def _check(self, who: Certified) -> None:
        """Check a HELLO against its sender's certificate. Raises RefusedError."""
        purpose = self.hello.purpose
        if who.node != self._remote:
            raise RefusedError("the certificate is another node's")
        if who.role not in DIALERS[purpose]:
            raise RefusedError(f"a {who.role}'s certificate is not for a {purpose} connection")

    def _ready(self) -> Answer:
        assert self.protocol is not None, "settled when HELLO came"
        self.established = Established(self.hello, self._remote, self.protocol)
        return Type.READY, messages.encode(Ready(self.protocol))

    # -- the dialer

    def _on_challenge(self, challenge: Challenge) -> Answer:
        node, nonce = challenge.node, challenge.nonce
        self._settle(challenge.v)
        if self._leaf is not None:
            if self._identity.verify_authority is None or self.hello.purpose != ENROL:
                raise RemoteError("CHALLENGE where certificates have been shown")
            # Verify the listener before proving anything: an attacker on the path may be the one that answered.
            if self._identity.verify_authority(self._leaf, challenge.authority or b"").node != node:
                raise UntrustedError("the hub's certificate is another node's")
        if not hmac.compare_digest(self._proof(LISTENER_LABEL, nonce, node), challenge.proof):
            raise RefusedError("the other side does not know this run's token")
        self._know(node)
        return Type.PROOF, messages.encode(Proof(self._proof(DIALER_LABEL, nonce, node)))

    def _settle(self, protocol: int) -> None:
        """Raises RemoteError."""
        protocol_versions.check_settled(protocol, self._identity.speaks, self.protocol)
        self.protocol = protocol

    def _know(self, node: bytes) -> None:
        """Record the other side's node. Raises RefusedError if it is not the expected one or is evicted."""
        if self._expect is not None and node != self._expect:
            raise RefusedError("another node answers at this address")
        if node in self._identity.evicted:
            raise RefusedError("the node at this address was evicted from the run")
        self._remote = node

    def _proof(self, label: bytes, nonce: bytes, node: bytes) -> bytes:
        channel = b"" if self._leaf is None else fingerprint(self._leaf)
        label %= self.protocol
        return self._token.proof(label, self._raw, nonce, node, channel)
