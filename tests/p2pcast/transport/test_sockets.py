"""What links' sockets are set to, and what they show of themselves, on real connections."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from p2pcast.errors import UsageError
from p2pcast.transport import sockets as module
from p2pcast.transport.dial import UnreachableError, dial
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.transport.shown import shown
from p2pcast.transport.sockets import (
    KEEP_IDLE_S,
    MAX_PACE,
    MIN_PACE,
    SO_MAX_PACING_RATE,
    USER_TIMEOUT_S,
    Sockets,
    available,
    congestion_of,
    own_congestion,
    pace,
    settled,
    window_bytes,
)
from p2pcast.transport.tcp_info import SIZE, parse, read
from p2pcast.wire.connection import Identity
from p2pcast.wire.token import Token

TOKEN = Token(bytes(16), bytes(20))
ME, THERE = (Identity(bytes([n]) * 16, f"node-{n}", TOKEN) for n in (1, 2))


class Owner(QuietOwner):
    def __init__(self) -> None:
        self.links: list[Link] = []
        self.writable = asyncio.Event()

    def accept_link(self, link, hello) -> None:
        link.owner = self
        self.links.append(link)

    def on_link_writable(self, link, stripe) -> None:
        self.writable.set()


async def test_both_ends_are_tuned_and_shown() -> None:
    other = Owner()
    listener = Listener(other, THERE, sockets=Sockets("reno"))
    await listener.start("127.0.0.1", 0)
    try:
        link = await dial(
            Owner(), *listener.address, ME, purpose="data", role="child", stripes=2, sockets=Sockets("reno", 300_000)
        )
        for stripe in [*link.stripes.values(), *other.links[0].stripes.values()]:
            assert congestion_of(stripe.socket) == "reno"
            assert stripe.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
            assert stripe.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert stripe.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert stripe.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == KEEP_IDLE_S
        said = shown(link, "parent")
        assert (said["role"], said["stripes"], said["congestion"]) == ("parent", 2, "reno")
        assert said["stripes_in_use"] is None, "who sends knows"
        assert shown(other.links[0], "child")["stripes_in_use"] == 2
        assert said["send_buffer_bytes"] > shown(other.links[0], "child")["receive_buffer_bytes"] / 100
        assert said["received_bytes"] > 0
        assert said["rtt_ms"] > 0
        assert said["retransmitted"] == 0
        link.close()
        assert shown(link, "parent")["congestion"] is None
    finally:
        await listener.stop()


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_connection_that_ends_is_not_kept_for_somebody_who_has_vanished(how) -> None:
    """What was queued is in the kernel's hands, which would try for many minutes."""
    other = Owner()
    listener = Listener(other, THERE)
    await listener.start("127.0.0.1", 0)
    try:
        link = await dial(Owner(), *listener.address, ME, purpose="data", role="child", stripes=2)
        sockets = [stripe.socket for stripe in link.stripes.values()]
        getattr(link, how)()
        for sock in sockets:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == USER_TIMEOUT_S * 1000
    finally:
        await listener.stop()


async def test_the_number_of_stripes_may_be_left_to_the_round_trip() -> None:
    asked: list[float] = []

    def three(rtt_s: float) -> int:
        asked.append(rtt_s)
        return 3

    other = Owner()
    listener = Listener(other, THERE)
    await listener.start("127.0.0.1", 0)
    try:
        link = await dial(Owner(), *listener.address, ME, purpose="data", role="child", stripes=three)
        assert len(link.stripes) == link.expected == 3
        assert link.reserve
        while len(other.links[0].stripes) < 3:
            await other.writable.wait()
            other.writable.clear()
        assert len(asked) == 1
        assert 0 <= asked[0] < 10
        link.close()
    finally:
        await listener.stop()
    with pytest.raises(UnreachableError, match="cannot reach"):
        await dial(Owner(), *listener.address, ME, purpose="data", role="child", stripes=three)
    assert len(asked) == 1


async def test_dialling_that_is_cancelled_leaves_no_socket() -> None:
    """A ResourceWarning would be an error here."""

    def never(rtt_s: float) -> int:
        raise RuntimeError("no number")

    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
        with pytest.raises(RuntimeError, match="no number"):
            await dial(Owner(), *where, ME, purpose="data", role="child", stripes=never)
        dialling = asyncio.ensure_future(dial(Owner(), *where, ME, purpose="data", role="child", stripes=lambda rtt_s: 2))
        await asyncio.sleep(0)
        dialling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialling


def test_a_congestion_control_is_chosen_by_name() -> None:
    assert settled("reno") == Sockets("reno")
    with pytest.raises(UsageError, match=r"'nonsense' is not known here; this kernel offers .*reno"):
        settled("nonsense")
    with pytest.raises(UsageError, match="is not known here"):
        settled("ünsinn")
    assert settled(None).congestion in (None, "bbr")
    assert (settled(None).congestion is None) or "bbr" in available()


def test_bbr_is_left_out_where_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFERRED", "no-such")
    assert settled(None) == Sockets()


def test_what_the_kernel_does_by_itself() -> None:
    assert own_congestion() in available()
    assert 4096 <= window_bytes() <= 1 << 31


def test_tcp_info_is_read_where_it_lies() -> None:
    raw = bytearray(SIZE)
    struct.pack_into("=I", raw, 68, 150_000)
    struct.pack_into("=I", raw, 148, 140_000)
    struct.pack_into("=I", raw, 80, 10)
    struct.pack_into("=I", raw, 16, 1448)
    struct.pack_into("=QQ", raw, 120, 1, 2)
    struct.pack_into("=Q", raw, 160, 1_000_000)
    struct.pack_into("=QQQ", raw, 168, 10_000_000, 2_000_000, 500_000)
    struct.pack_into("=QQ", raw, 200, 3, 4)
    info = parse(bytes(raw))
    assert (info.rtt_s, info.min_rtt_s, info.window_packets, info.segment_bytes) == (0.15, 0.14, 10, 1448)
    assert (info.acked_bytes, info.received_bytes, info.sent_bytes, info.retransmitted_bytes) == (1, 2, 3, 4)
    assert info.delivery_bps == 8e6
    assert (info.busy_s, info.held_back_s) == (10.0, 2.5)


def test_an_older_kernel_says_less() -> None:
    info = parse(bytes(104))
    assert (info.acked_bytes, info.sent_bytes, info.min_rtt_s) == (0, 0, 0.0)
    not_tcp, other = socket.socketpair()
    with not_tcp, other:
        assert read(not_tcp) is None
        assert congestion_of(not_tcp) is None
    assert read(None) is None


def test_a_pace_is_set_and_lifted_again_and_congestion_control_stays() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        before = congestion_of(sock)
        for given, found in ((50_000, 50_000), (1, MIN_PACE), (1 << 40, MAX_PACE), (None, -1)):
            pace(sock, given)
            assert sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == found
            assert congestion_of(sock) == before
    pace(None, 1)
    other, one = socket.socketpair()
    with other, one:
        pace(one, 1)
