"""The handshake: both sides know the secret, every word of the HELLO is bound, and each impersonation is refused."""

from __future__ import annotations

import msgpack
import pytest

from p2pcast.ground.errors import P2PCastError, RefusedError, RemoteError
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire import connection as module
from p2pcast.wire import messages
from p2pcast.wire.connection import HEADER, Connection, Established, Identity, Piece
from p2pcast.wire.connection_state import ConnectionState, Side
from p2pcast.wire.messages import Type


def reframed(frame: bytes, **changes):
    """A frame with some fields of its body replaced."""
    size, kind, handle, index = HEADER.unpack_from(frame)
    assert len(frame) == HEADER.size + size
    body = msgpack.packb(dict(sorted((msgpack.unpackb(frame[HEADER.size :]) | changes).items())))
    return HEADER.pack(len(body), kind, handle, index) + body


@pytest.mark.parametrize(
    ("purpose", "state"),
    [
        ("data", ConnectionState.DATA),
        ("control", ConnectionState.CONTROL),
        ("publish", ConnectionState.PUBLISH),
        ("engine", ConnectionState.ENGINE),
    ],
)
def test_both_sides_are_established_once(wires, purpose, state):
    d, li = wires.pair(purpose, stripe=2, stripes=3)
    at_dialer, at_listener = wires.shake(d, li)
    assert (d.state, li.state) == (state, state)
    (mine,), (theirs,) = at_dialer, at_listener
    assert isinstance(mine, Established)
    assert isinstance(theirs, Established)
    assert mine.remote == wires.listener.node
    assert theirs.remote == wires.dialer.node
    assert theirs.hello.name == "peer-1"
    assert (theirs.hello.stripe, theirs.hello.stripes, theirs.hello.purpose) == (2, 3, purpose)


def test_a_parent_that_dials_feeds_the_dialled_child(wires):
    """Once READY has been said the two have changed places: the listener asks, the dialer sends, and not the other way
    round.
    """
    parent, child = wires.pair(role="parent")
    wires.shake(parent, child)
    assert parent.state is child.state is ConnectionState.DATA
    (asked,) = parent.feed(child.send(messages.Want(bytes(16), [])))
    assert asked.type is Type.WANT
    *_, piece = child.feed(parent.piece_header(1, 0, 5) + b"piece")
    assert isinstance(piece, Piece)
    with pytest.raises(RemoteError, match="is not for a connection"):
        parent.send(messages.Want(bytes(16), []))
    with pytest.raises(RemoteError, match="is not for a connection"):
        child.send(messages.Path([]))


@pytest.mark.parametrize("purpose", ["control", "publish", "engine"])
def test_a_parent_dials_for_data_alone(wires, purpose):
    d, li = wires.pair(purpose, role="parent")
    with pytest.raises(RemoteError, match="a parent dials for data"):
        li.feed(d.take_output())


def test_another_secret_is_refused_by_name(wires):
    other = Identity(b"d" * 16, "x", JoinToken(wires.token.run, b"S" * 20))
    d, li = wires.pair(dialer=other)
    with pytest.raises(RefusedError, match="not one that this hub gave out"):
        li.feed(d.take_output())


def test_another_run_is_refused(wires):
    other = Identity(b"d" * 16, "x", JoinToken(b"R" * 16, wires.token.secret))
    d, li = wires.pair(dialer=other)
    with pytest.raises(RefusedError, match="another run"):
        li.feed(d.take_output())


def test_another_node_at_the_address_is_refused(wires):
    d, li = wires.pair(expect=b"?" * 16)
    with pytest.raises(RefusedError, match="another node"):
        wires.shake(d, li)
    d, li = wires.pair(expect=wires.listener.node)
    wires.shake(d, li)
    assert d.state is ConnectionState.DATA


def test_a_listener_without_the_secret_is_found_out(wires):
    """The listener can copy the token's name from the HELLO, but cannot prove the secret."""
    d, li = wires.pair()
    li.feed(d.take_output())
    with pytest.raises(RefusedError, match="does not know this run's token"):
        d.feed(reframed(li.take_output(), proof=b"\0" * 32))


def test_a_dialer_without_the_secret_is_found_out(wires):
    d, li = wires.pair()
    li.feed(d.take_output())
    d.feed(li.take_output())
    with pytest.raises(RefusedError, match="proof is wrong"):
        li.feed(reframed(d.take_output(), proof=b"\0" * 32))
    assert li.state is not ConnectionState.DATA


@pytest.mark.parametrize(
    "change",
    [
        {"name": "y"},
        {"node": b"e" * 16},
        {"purpose": "control"},
        {"link": b"K" * 16},
        {"stripe": 0, "stripes": 9},
        {"extra": 1},
    ],
    ids=str,
)
def test_every_word_of_the_hello_is_bound(wires, change):
    """The dialer notices a HELLO altered on the path at once; else the listener notices it."""
    d, li = wires.pair()
    li.feed(reframed(d.take_output(), **change))
    with pytest.raises(RefusedError):
        d.feed(li.take_output())


def test_an_altered_challenge_is_noticed(wires):
    for change in ({"nonce": b"9" * 32}, {"node": b"e" * 16}):
        d, li = wires.pair()
        li.feed(d.take_output())
        with pytest.raises(RefusedError):
            d.feed(reframed(li.take_output(), **change))


def test_a_recorded_dialer_can_not_be_played_again(wires):
    d, li = wires.pair()
    hello = d.take_output()
    li.feed(hello)
    d.feed(li.take_output())
    proof = d.take_output()
    fresh = Connection(Side.LISTENER, wires.listener, b"3" * 32)
    fresh.feed(hello)
    with pytest.raises(RefusedError):
        fresh.feed(proof)


def test_a_proof_does_not_pass_for_the_other_sides(wires):
    """The labels differ, so a listener's own proof can't be reflected."""
    d, li = wires.pair()
    li.feed(d.take_output())
    challenge = msgpack.unpackb(li.take_output()[HEADER.size :])
    body = msgpack.packb({"proof": challenge["proof"]})
    with pytest.raises(RefusedError):
        li.feed(HEADER.pack(len(body), Type.PROOF, 0, 0) + body)


def frames(wires):
    d, li = wires.pair()
    hello = d.take_output()
    li.feed(hello)
    challenge = li.take_output()
    d.feed(challenge)
    proof = d.take_output()
    li.feed(proof)
    return {"hello": hello, "challenge": challenge, "proof": proof, "ready": li.take_output()}


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("first", ["hello", "challenge", "proof", "ready"])
@pytest.mark.parametrize("second", ["hello", "challenge", "proof", "ready"])
def test_frames_out_of_order_or_twice_are_refused(wires, side, first, second):
    right = {Side.LISTENER: ("hello", "proof"), Side.DIALER: ("challenge", "ready")}[side]
    known = frames(wires)
    d, li = wires.pair()
    target = d if side is Side.DIALER else li
    if (first, second) == right:
        target.feed(known[first] + known[second])
        assert target.state is ConnectionState.DATA
        return
    with pytest.raises(RemoteError):
        target.feed(known[first] + known[second])


def test_handshake_messages_after_the_handshake_are_refused(wires):
    known = frames(wires)
    d, li = wires.open()
    for frame in known.values():
        for target in (d, li):
            with pytest.raises(RemoteError, match="is not for a connection that is data"):
                target.feed(frame)


def test_a_refusal_reaches_the_other_side(wires):
    other = Identity(b"d" * 16, "x", JoinToken(wires.token.run, b"S" * 20))
    d, li = wires.pair(dialer=other)
    with pytest.raises(RefusedError) as refused:
        li.feed(d.take_output())
    li.fail(refused.value)
    assert li.state is ConnectionState.CLOSED
    with pytest.raises(RefusedError, match="the other side says: the token is not one"):
        d.feed(li.take_output())
    assert d.state is ConnectionState.CLOSED
    d.fail(RemoteError("not sent"))
    assert d.take_output() == b""


def test_an_error_may_hold_any_text(wires):
    d, li = wires.open()
    li.fail(RemoteError("\udcff" + "\N{SNOWMAN}\N{GRINNING FACE}" * 4000))
    with pytest.raises(RemoteError, match="the other side says"):
        d.feed(li.take_output())


def test_the_secret_is_shown_nowhere(wires):
    secret = wires.token.secret
    text = str(wires.token).split("-")[2]
    d, li = wires.pair(dialer=Identity(b"d" * 16, "x", JoinToken(wires.token.run, b"S" * 20)))
    with pytest.raises(P2PCastError) as refused:
        li.feed(d.take_output())
    shown = [repr(wires.token), repr(wires.dialer), repr(d), repr(li), str(refused.value), repr(refused.value)]
    for line in shown:
        assert text not in line
        assert repr(secret)[2:-1] not in line
        assert secret.hex() not in line
    for frame in frames(wires).values():
        assert secret not in frame


def test_a_dialer_needs_a_request(wires):
    with pytest.raises(ValueError, match="request"):
        Connection(Side.DIALER, wires.dialer, b"1" * 32)


def test_scratch_is_all_that_a_stranger_costs():
    assert module.SCRATCH_BYTES <= 64 * 1024
