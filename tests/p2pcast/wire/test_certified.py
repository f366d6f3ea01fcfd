"""The handshake behind TLS: certificates identify both sides; a first connection proves its token, and only to the
run's hub.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from p2pcast.ground.errors import RefusedError, RemoteError
from p2pcast.trust.certificate_authority import Authority
from p2pcast.trust.certificates import new_key
from p2pcast.trust.credentials import pinned
from p2pcast.trust.dial_permissions import Certified, Role
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire.connection import Connection, ConnectionRequest, Identity
from p2pcast.wire.connection_state import ConnectionState, Side

NOW = 1_800_000_000.0
RUN, SECRET = b"r" * 16, b"s" * 20
AUTHORITY = Authority.create(RUN, NOW)
OTHERS = Authority.create(RUN, NOW)
TOKEN = JoinToken(RUN, SECRET, AUTHORITY.fingerprint)
HUB, PEER, TRAINER = b"h" * 16, b"p" * 16, b"t" * 16
PURPOSES = {"control": "peer", "data": "child", "publish": "rank", "engine": "member"}


def leaf(node: bytes, role: str, *, run: bytes = RUN, authority: Authority = AUTHORITY) -> bytes:
    return authority.issue(new_key().public_key(), Certified(run, node, role), NOW, 900)


class Gate:
    """A hub's, with one token."""

    def __init__(self) -> None:
        self.leaf, self.authority = leaf(HUB, "hub"), AUTHORITY.certificate

    def secret(self, ident: bytes) -> bytes:
        if ident != TOKEN.ident:
            raise RefusedError("the token is not one that this hub gave out")
        return SECRET


def verify_authority(hub: bytes, authority: bytes) -> Certified:
    return pinned(hub, authority, TOKEN.authority, RUN, NOW)


def asked(purpose: str, role: str | None = None) -> ConnectionRequest:
    return ConnectionRequest(purpose, role or PURPOSES[purpose], b"k" * 16, stripe=0, stripes=1)


def pair(purpose, dialer: bytes, listener: bytes, *, role=None, expect=None, **more):
    """Of nodes ``dialer`` and ``listener``, with no certificates looked at yet."""
    mine = replace(Identity(dialer, "mine", TOKEN, verify_authority=verify_authority), **more.get("mine", {}))
    theirs = replace(Identity(listener, "theirs", JoinToken(RUN, b"x" * 20)), **more.get("theirs", {}))
    d = Connection(Side.DIALER, mine, b"1" * 32, asked(purpose, role), expect)
    return d, Connection(Side.LISTENER, theirs, b"2" * 32)


def met(purpose, dialer: tuple[bytes, str], listener: tuple[bytes, str], **options):
    d, li = pair(purpose, dialer[0], listener[0], **options)
    d.secured(leaf(*listener), proven=True)
    li.secured(leaf(*dialer), proven=True)
    return d, li


@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("dialer", get_args(Role))
@pytest.mark.parametrize("listener", get_args(Role))
def test_roles_by_certificate(wires, purpose, dialer, listener):
    """A peer is no hub and cannot publish; a trainer can only publish; no node takes orders from a peer. Workers and a
    ledger have no connection of this protocol.
    """
    may = {
        ("control", "peer", "hub"),
        ("data", "peer", "hub"),
        ("data", "peer", "peer"),
        ("publish", "trainer", "hub"),
        ("engine", "peer", "peer"),
        ("data", "hub", "peer"),
        ("data", "hub", "hub"),
    }
    d, li = pair(purpose, PEER, HUB)
    li.secured(leaf(PEER, dialer), proven=True)
    try:
        d.secured(leaf(HUB, listener), proven=True)
        wires.shake(d, li)
    except RefusedError:
        assert (purpose, dialer, listener) not in may
        return
    assert (purpose, dialer, listener) in may
    assert d.state is li.state is ConnectionState[purpose.upper()]


def test_authentication_takes_one_round_trip(wires):
    d, li = met("data", (PEER, "peer"), (HUB, "hub"), expect=HUB)
    (theirs,) = li.feed(d.take_output())
    (mine,) = d.feed(li.take_output())
    assert (theirs.remote, mine.remote) == (PEER, HUB)
    assert d.take_output() == b""


def test_a_hello_in_another_nodes_name_is_refused(wires):
    d, li = pair("data", b"victim".ljust(16), HUB)
    d.secured(leaf(HUB, "hub"), proven=True)
    li.secured(leaf(PEER, "peer"), proven=True)
    with pytest.raises(RefusedError, match="another node's"):
        wires.shake(d, li)
    assert li.state is not ConnectionState.DATA


def test_another_node_at_the_address_is_left(wires):
    d, _ = pair("data", PEER, HUB, expect=HUB)
    with pytest.raises(RefusedError, match="another node answers"):
        d.secured(leaf(b"o" * 16, "peer"), proven=True)


def test_certificates_of_other_runs_do_not_count():
    d, li = pair("data", PEER, HUB)
    for connection in (d, li):
        with pytest.raises(RefusedError, match="another run"):
            connection.secured(leaf(HUB, "hub", run=b"R" * 16), proven=True)


def test_certificates_without_a_tls_proof_are_refused(wires):
    d, li = pair("data", PEER, HUB)
    with pytest.raises(RefusedError, match="stranger answers"):
        d.secured(leaf(HUB, "hub"), proven=False)
    d, li = pair("data", PEER, HUB, theirs={"gate": Gate()})
    li.secured(leaf(PEER, "peer"), proven=False)
    with pytest.raises(RefusedError, match="nothing to do here but to ask"):
        li.feed(d.take_output())


@pytest.mark.parametrize("purpose", PURPOSES)
def test_without_a_certificate_there_is_nothing_but_enrolment(purpose):
    d, li = pair(purpose, PEER, HUB, theirs={"gate": Gate()})
    li.secured(None, proven=True)
    with pytest.raises(RefusedError, match="nothing to do here but to ask"):
        li.feed(d.take_output())


@pytest.mark.parametrize("side", ["dialer", "listener"])
def test_the_evicted_are_refused_by_either_side(wires, side):
    more = {"mine": {"evicted": {HUB}}} if side == "dialer" else {"theirs": {"evicted": {PEER}}}
    with pytest.raises(RefusedError, match="was evicted"):
        wires.shake(*met("data", (PEER, "peer"), (HUB, "peer"), **more))
    d, li = pair("data", PEER, HUB, mine={"token": TOKEN}, theirs={"token": TOKEN} | more.get("theirs", {}))
    if side == "listener":
        with pytest.raises(RefusedError, match="was evicted"):
            wires.shake(d, li)


# -- first connections


def first(**more):
    d, li = pair("enrol", PEER, HUB, role="peer", theirs={"gate": Gate()} | more.pop("theirs", {}), **more)
    d.secured(li._handshake._identity.gate.leaf, proven=False)
    li.secured(None, proven=True)
    return d, li


def test_a_token_opens_a_first_connection(wires):
    d, li = first()
    (mine,), (theirs,) = wires.shake(d, li)
    assert d.state is li.state is ConnectionState.ENROL
    assert (mine.remote, theirs.remote, theirs.hello.role) == (HUB, PEER, "peer")


def test_the_secret_does_not_travel(wires):
    d, li = first()
    said = []
    for _ in range(2):
        for one, other in ((d, li), (li, d)):
            said.append(one.take_output())
            other.feed(said[-1])
    assert d.state is ConnectionState.ENROL
    assert SECRET not in b"".join(said)


@pytest.mark.parametrize("secret", [b"S" * 20, b""])
def test_without_the_secret_there_is_no_enrolment(wires, secret):
    d, li = first(mine={"token": JoinToken(RUN, secret, TOKEN.authority)})
    with pytest.raises(RefusedError, match="not one that this hub gave out"):
        wires.shake(d, li)


def test_a_dialer_without_the_tokens_secret_is_refused(wires):
    class Named(JoinToken):
        ident = TOKEN.ident

    d, li = first(mine={"token": Named(RUN, b"S" * 20, TOKEN.authority)})
    li.feed(d.take_output())
    with pytest.raises(RefusedError, match="does not know this run's token"):
        d.feed(li.take_output())


@pytest.mark.parametrize("impostor", ["other authority", "peer", "hub's papers"])
def test_an_impostor_of_the_hub_receives_no_proof(wires, impostor):
    """A node that answers in the hub's place, with any certificate, receives no proof to attack or to pass on."""
    gate = Gate()
    if impostor == "other authority":
        gate.leaf, gate.authority = leaf(HUB, "hub", authority=OTHERS), OTHERS.certificate
    elif impostor == "peer":
        gate.leaf = leaf(PEER, "peer")
    d, li = first(theirs={"gate": gate})
    if impostor == "hub's papers":
        # TLS shows that it holds another key than the hub's: its certificate is its own, the authority's is copied.
        d.secured(leaf(HUB, "hub", authority=OTHERS), proven=False)
    li.feed(d.take_output())
    with pytest.raises(RefusedError):
        d.feed(li.take_output())
    assert d.take_output() == b""


def test_a_proof_is_bound_to_its_channel(wires):
    """A hub's challenge passed on over another TLS connection is of no use, even if both ends are the hub's own."""
    d, li = first()
    d.secured(leaf(HUB, "hub"), proven=False)
    li.feed(d.take_output())
    with pytest.raises(RefusedError, match="does not know this run's token"):
        d.feed(li.take_output())


def test_a_peer_does_not_admit_nodes(wires):
    d, li = pair("enrol", PEER, HUB, role="peer")
    d.secured(leaf(HUB, "peer"), proven=False)
    li.secured(None, proven=True)
    with pytest.raises(RefusedError, match="dial the hub"):
        li.feed(d.take_output())


def test_enrolment_is_for_strangers_behind_tls_alone(wires):
    d, li = pair("enrol", PEER, HUB, role="peer", theirs={"gate": Gate()})
    with pytest.raises(RefusedError, match="nothing to enrol for"):
        li.feed(d.take_output())
    d, li = pair("enrol", PEER, HUB, role="peer", theirs={"gate": Gate()})
    li.secured(leaf(PEER, "peer"), proven=True)
    with pytest.raises(RefusedError, match="nothing to enrol for"):
        li.feed(d.take_output())


def test_ready_comes_after_certificates_or_proofs_alone(wires):
    """A listener without either can't talk a dialer into going on."""
    d, li = met("data", (PEER, "peer"), (HUB, "hub"))
    li.feed(d.take_output())
    ready = li.take_output()
    plain, _ = wires.pair()
    plain.take_output()
    with pytest.raises(RemoteError, match="before anything was proved"):
        plain.feed(ready)
    mine, _ = first()
    mine.take_output()
    with pytest.raises(RemoteError, match="before anything was proved"):
        mine.feed(ready)


def test_a_challenge_where_certificates_were_shown_is_not_answered(wires):
    d, _ = met("data", (PEER, "peer"), (HUB, "hub"))
    other, li = first()
    li.feed(other.take_output())
    d.take_output()
    with pytest.raises(RemoteError, match="where certificates have been shown"):
        d.feed(li.take_output())
