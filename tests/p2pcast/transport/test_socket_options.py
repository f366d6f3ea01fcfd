"""Socket options of links, and the kernel's figures for them, on real connections."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from p2pcast.ground.errors import UsageError
from p2pcast.process import event_loop
from p2pcast.transport import socket_options as module
from p2pcast.transport.dial import UnreachableError, dial
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.link_status import link_row
from p2pcast.transport.listener import Listener
from p2pcast.transport.socket_options import (
    KEEP_IDLE_S,
    MAX_PACE,
    MIN_PACE,
    SO_MAX_PACING_RATE,
    USER_TIMEOUT_S,
    Sockets,
    available,
    choose_sockets,
    congestion_of,
    own_congestion,
    pace,
    set_close_timeout,
    window_bytes,
)
from p2pcast.transport.tcp_info import FIELDS, parse, read
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire.connection import Identity
from tests.support.until import until

TOKEN = JoinToken(bytes(16), bytes(20))
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
        said = link_row(link, "parent")
        assert (said["role"], said["stripes"], said["congestion"]) == ("parent", 2, "reno")
        assert said["stripes_in_use"] is None, "who sends knows"
        assert link_row(other.links[0], "child")["stripes_in_use"] == 2
        assert said["send_buffer_bytes"] > link_row(other.links[0], "child")["receive_buffer_bytes"] / 100
        assert said["received_bytes"] > 0
        assert said["rtt_ms"] > 0
        assert said["retransmitted"] == 0
        link.close()
        assert link_row(link, "parent")["congestion"] is None
    finally:
        await listener.stop()


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_closed_connection_to_a_vanished_host_times_out(how) -> None:
    """The kernel holds the queued bytes and would retry for many minutes."""
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


async def test_the_number_of_stripes_can_follow_the_round_trip_time() -> None:
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
        dialling = asyncio.ensure_future(
            dial(Owner(), *where, ME, purpose="data", role="child", stripes=lambda rtt_s: 2)
        )
        await asyncio.sleep(0)
        dialling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialling


def test_a_congestion_control_is_chosen_by_name() -> None:
    assert choose_sockets("reno") == Sockets("reno")
    with pytest.raises(UsageError, match=r"'nonsense' is unknown to this kernel; this kernel offers .*reno"):
        choose_sockets("nonsense")
    with pytest.raises(UsageError, match="is unknown to this kernel"):
        choose_sockets("ünsinn")
    assert choose_sockets(None).congestion in (None, "bbr")
    assert (choose_sockets(None).congestion is None) or "bbr" in available()


def test_bbr_is_chosen_only_where_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFERRED", "no-such")
    assert choose_sockets(None) == Sockets()


def test_kernel_defaults_are_read() -> None:
    assert own_congestion() in available()
    assert 4096 <= window_bytes() <= 1 << 31


def test_tcp_info_fields_are_read_at_their_offsets() -> None:
    raw = bytearray(FIELDS.size)
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


def test_missing_fields_of_an_older_kernel_read_as_zero() -> None:
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


def test_closing_a_connection_that_uvloop_has_closed_is_no_error():
    """A timer may close a connection whose reset has not been reported yet."""

    async def closed() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(
                asyncio.Protocol, *server.sockets[0].getsockname()
            )
            found = transport.get_extra_info("socket")
            transport.abort()
            await until(lambda: found.fileno() < 0)
            set_close_timeout(found)
        finally:
            server.close()

    event_loop.run(closed())
