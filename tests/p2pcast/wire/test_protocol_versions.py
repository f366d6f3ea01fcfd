"""Which protocol two nodes speak: ranges against brute force, in the handshake with and without certificates, and
refusals that say which side to update.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import IncompatibleError, RefusedError, RemoteError
from p2pcast.wire import messages, protocol_versions
from p2pcast.wire.connection import HEADER, Connection
from p2pcast.wire.connection_state import Side
from p2pcast.wire.messages import Type
from p2pcast.wire.protocol_versions import SPOKEN, ProtocolRange
from tests.p2pcast.wire.test_handshake import reframed

SPANS = st.tuples(st.integers(0, 12), st.integers(0, 5)).map(lambda span: ProtocolRange(span[0], span[0] + span[1]))


@given(SPANS, SPANS)
def test_two_sides_settle_on_the_greatest_protocol_of_both(dialer, listener):
    common = [n for n in range(20) if n in dialer and n in listener]
    if common:
        assert protocol_versions.settle(dialer, listener, ("peer", "hub")) == max(common)
        return
    older = "peer" if dialer.greatest < listener.least else "hub"
    with pytest.raises(
        IncompatibleError, match=f"hub .*speaks {listener}, the peer {dialer}: update p2pcast on the {older}$"
    ):
        protocol_versions.settle(dialer, listener, ("peer", "hub"))


def speaking(wires, dialer: ProtocolRange, listener: ProtocolRange, purpose: str = "control"):
    return wires.pair(
        purpose,
        dialer=replace(wires.dialer, speaks=dialer),
        listener=replace(wires.listener, speaks=listener),
        role="peer",
    )


def certified(d: Connection, li: Connection, monkeypatch) -> None:
    """As behind TLS, where both ends have shown certificates."""
    for end, other, role in ((d, b"l" * 16, "hub"), (li, b"d" * 16, "peer")):
        who = type("Who", (), {"node": other, "role": role, "run": end._handshake._identity.token.run})()
        monkeypatch.setattr("p2pcast.wire.handshake.certified", lambda _, who=who: who)
        end.secured(b"leaf", proven=True)


@pytest.mark.parametrize("tls", [False, True], ids=["by proof", "by certificate"])
@pytest.mark.parametrize(
    ("dialer", "listener", "protocol"),
    [
        (SPOKEN, SPOKEN, SPOKEN.greatest),
        (ProtocolRange(2, 4), ProtocolRange(1, 3), 3),
        (ProtocolRange(1, 3), ProtocolRange(2, 9), 3),
        (SPOKEN, ProtocolRange(2, 7), 2),
    ],
)
def test_connections_of_different_releases_agree(wires, monkeypatch, dialer, listener, protocol, tls):
    d, li = speaking(wires, dialer, listener)
    if tls:
        certified(d, li, monkeypatch)
    assert d.protocol is li.protocol is None
    (mine,), (theirs,) = wires.shake(d, li)
    assert d.protocol == li.protocol == mine.protocol == theirs.protocol == protocol


@pytest.mark.parametrize(
    ("purpose", "names"),
    [("control", ("peer", "hub")), ("publish", ("trainer", "hub")), ("engine", ("engine's member", "engine's lead"))],
)
@pytest.mark.parametrize(
    ("dialer", "listener", "older"),
    [(ProtocolRange(2, 2), ProtocolRange(3, 4), 0), (ProtocolRange(5, 6), ProtocolRange(2, 4), 1)],
)
def test_without_a_protocol_in_common_both_sides_hear_which_to_update(wires, dialer, listener, older, purpose, names):
    d, li = speaking(wires, dialer, listener, purpose)
    said = rf"the {names[1]} .*speaks {listener}, the {names[0]} {dialer}: update p2pcast on the {names[older]}"
    with pytest.raises(IncompatibleError, match=said) as refused:
        li.feed(d.take_output())
    assert refused.value.exit_code == 3
    li.fail(refused.value)
    with pytest.raises(IncompatibleError, match=f"the other side says: {said}"):
        d.feed(li.take_output())


def test_p2pcast_0_1_names_the_side_to_update(wires):
    d, _ = wires.pair("control", role="peer")
    d.take_output()
    said = "this side speaks protocol 1, the other 2: use one release of p2pcast"
    body = messages.encode(messages.Error("refused", said))
    with pytest.raises(
        IncompatibleError, match=r"the hub speaks protocol 1, this peer .*protocol 2: update p2pcast on the hub$"
    ):
        d.feed(HEADER.pack(len(body), Type.ERROR, 0, 0) + body)


def test_a_refusal_for_another_reason_is_no_matter_of_releases(wires):
    d, _ = wires.pair("control", role="peer")
    d.take_output()
    body = messages.encode(messages.Error("refused", "this node was evicted from the run"))
    with pytest.raises(RefusedError) as refused:
        d.feed(HEADER.pack(len(body), Type.ERROR, 0, 0) + body)
    assert not isinstance(refused.value, IncompatibleError)


@pytest.mark.parametrize(
    "change",
    [{"purpose": "new", "role": 7}, {"token": None, "nonce": b""}, {"purpose": ["control"], "name": b"\xff"}],
    ids=str,
)
def test_a_later_protocols_hello_may_have_any_form(wires, change):
    """Other changes of the HELLO must not hide which side is to be updated."""
    d, li = wires.pair("control", role="peer")
    with pytest.raises(IncompatibleError, match=r"protocols 7 to 9: update p2pcast on the"):
        li.feed(reframed(d.take_output(), v=9, least=7, greatest=9, **change))


@pytest.mark.parametrize(
    "change", [{"least": 3, "greatest": 2}, {"v": None}, {"least": -1}, {"greatest": 1 << 32}, {"least": "2"}], ids=str
)
def test_a_malformed_offer_is_an_error(wires, change):
    d, li = wires.pair("control", role="peer")
    with pytest.raises(RemoteError, match="HELLO"):
        li.feed(reframed(d.take_output(), **change))


@pytest.mark.parametrize("protocol", [1, 3, 9])
def test_a_listener_keeps_to_one_offered_version(wires, protocol):
    d, li = speaking(wires, SPOKEN, SPOKEN)
    li.feed(d.take_output())
    with pytest.raises(RemoteError, match=f"settled on protocol {protocol}"):
        d.feed(reframed(li.take_output(), v=protocol))
    d, li = speaking(wires, ProtocolRange(1, 9), ProtocolRange(1, 2))
    li.feed(d.take_output())
    d.feed(li.take_output())
    li.feed(d.take_output())
    with pytest.raises(RemoteError, match=f"settled on protocol {protocol}, but settled on protocol 2 before"):
        d.feed(reframed(li.take_output(), v=protocol))


def test_a_node_on_the_path_cannot_force_an_older_protocol(wires):
    """The proofs bind the offer and its outcome."""
    both = ProtocolRange(1, 3)
    d, li = speaking(wires, both, both)
    li.feed(reframed(d.take_output(), greatest=2))
    with pytest.raises(RefusedError, match="does not know this run's token"):
        d.feed(li.take_output())
    d, li = speaking(wires, both, both)
    li.feed(d.take_output())
    with pytest.raises(RefusedError, match="does not know this run's token"):
        d.feed(reframed(li.take_output(), v=2))


def test_a_dialers_hello_lets_p2pcast_0_1_refuse(wires):
    d, _ = wires.pair("control", role="peer")
    frame = d.take_output()
    body: Any = messages.decode(Type.HELLO, frame[HEADER.size :])
    assert (body.v, body.least, body.greatest) == (SPOKEN.greatest, SPOKEN.least, SPOKEN.greatest)
    assert d.side is Side.DIALER
