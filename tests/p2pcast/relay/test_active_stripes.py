"""As many stripes carry pieces as the path needs: by rule, and on real connections."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.artifact.assembly import Assembly
from p2pcast.relay import child as module
from p2pcast.relay.active_stripes import ActiveStripes, initial_stripes
from p2pcast.relay.node import Node
from p2pcast.relay.tuning import NARROW_BPS, NARROW_STRIPES, RATE_SAMPLE_ROUND_TRIPS, RATE_SAMPLES
from p2pcast.relay.upstream import Upstream
from p2pcast.store.artifact_store import ArtifactStore
from p2pcast.transport.dial import dial
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.link_status import link_row
from p2pcast.transport.listener import Listener
from p2pcast.transport.socket_options import Sockets
from p2pcast.transport.stripe import Stripe
from p2pcast.transport.stripe_count import FEWEST
from p2pcast.transport.tcp_info import TcpInfo
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire import messages
from p2pcast.wire.connection import Identity, Message
from p2pcast.wire.messages import Type

TOKEN = JoinToken(bytes(16), bytes(20))
LIMIT_S = 600.0
STRIPES = 16
STATE = [131_072] * 64
"""Sizes of cells: together more than the sockets take."""
SMALL = Sockets(buffer_bytes=65536)


def infos(*times_s: tuple[float, float], acked_bytes: int = 0, rtt_s: float = 0.1) -> list[TcpInfo]:
    return [
        TcpInfo(rtt_s, rtt_s, 10, 1448, acked_bytes, 0, 0, 0, 0.0, busy_s, held_back_s)
        for busy_s, held_back_s in times_s
    ]


class Sending:
    """A link that always has data to send, on stripes that share the path evenly."""

    def __init__(self) -> None:
        self.active_stripes, self.in_use, self.at_s, self.acked_bytes = ActiveStripes(), FEWEST, 0.0, 0

    def at(self, rate_bps: float, rtt_s: float, for_s: float = 20.0) -> list[int]:
        """The number of stripes in use, choice by choice, at a given rate."""
        used = []
        for _ in range(int(for_s * 4)):
            self.at_s += 0.25
            self.acked_bytes += int(rate_bps * 0.25 / 8 / self.in_use)
            each = infos(*[(self.at_s, 0.0)] * self.in_use, acked_bytes=self.acked_bytes, rtt_s=rtt_s)
            self.in_use = self.active_stripes.choose(self.in_use, 16, each)
            used.append(self.in_use)
        return used


def test_without_bbr_all_stripes_are_used_at_first() -> None:
    assert initial_stripes(16, "cubic") == initial_stripes(16, "reno") == initial_stripes(16, None) == 16
    assert initial_stripes(16, "bbr") == FEWEST
    assert initial_stripes(2, "bbr") == 2


def test_stripes_double_while_windows_are_the_limit() -> None:
    active = ActiveStripes()
    assert active.choose(4, 16, infos((1.0, 0.9), (1.0, 0.3))) == 4, "the first statistics have no predecessor"
    assert active.choose(4, 16, infos((2.0, 1.8), (2.0, 0.6))) == 8
    assert active.choose(8, 16, infos((3.0, 2.7), (3.0, 0.9), (0.2, 0.0))) == 16
    assert active.choose(16, 16, infos((4.0, 3.6), (4.0, 1.2), (0.4, 0.0))) == 16, "the link has no more stripes"
    assert active.choose(16, 16, infos((5.0, 3.6), (5.0, 1.2), (0.6, 0.0))) == 16, "the number never falls again"


def test_only_the_time_since_the_last_choice_counts() -> None:
    active = ActiveStripes()
    assert active.choose(4, 16, infos((10.0, 9.0))) == 4
    assert active.choose(4, 16, infos((20.0, 9.5), acked_bytes=60_000_000)) == 4
    assert active.choose(4, 16, infos((20.0, 9.5), acked_bytes=60_000_000)) == 4, "there was nothing to send"
    assert active.choose(4, 16, []) == 4, "the kernel gives no statistics"


@pytest.mark.parametrize(
    ("rate_bps", "rtt_s", "used"),
    [
        (10e6, 0.1, NARROW_STRIPES), (10e6, 0.15, NARROW_STRIPES), (10e6, 0.3, FEWEST),
        (30e6, 0.15, FEWEST), (15e6, 0.01, NARROW_STRIPES),
        (100e6, 0.0002, FEWEST), (1e6, 0.0002, NARROW_STRIPES), (1e9, 0.3, FEWEST),
    ],
)  # fmt: skip
def test_a_narrow_path_gets_few_stripes(rate_bps: float, rtt_s: float, used: int) -> None:
    assert Sending().at(rate_bps, rtt_s)[-1] == used


def test_nothing_is_concluded_from_slow_start() -> None:
    used = Sending().at(1e6, 0.2)
    assert used[: used.index(NARROW_STRIPES)] == [FEWEST] * int(
        RATE_SAMPLES * (RATE_SAMPLE_ROUND_TRIPS * 0.2 * 4 + 0.9)
    )


def test_the_fastest_of_several_rate_samples_counts() -> None:
    sending = Sending()
    for _ in range(5):
        assert set(sending.at(1e6, 0.1, 2.0)) == {FEWEST}
        assert set(sending.at(50e6, 0.1, 2.0)) == {FEWEST}
    assert sending.at(1e6, 0.1, 5.0)[-1] == NARROW_STRIPES


def test_one_sample_above_the_limit_raises_the_number_for_good() -> None:
    sending = Sending()
    assert sending.at(10e6, 0.05)[-1] == NARROW_STRIPES
    assert set(sending.at(1.1 * NARROW_BPS, 0.05)) == {NARROW_STRIPES}
    assert sending.at(2 * NARROW_BPS, 0.05)[-1] == FEWEST
    assert set(sending.at(10e6, 0.05)) == {FEWEST}, "two stripes were too few before"


def test_a_number_raised_for_windows_stays_at_any_rate() -> None:
    sending = Sending()
    sending.active_stripes.choose(4, 16, infos(*[(0.0, 0.0)] * 4))
    sending.in_use = sending.active_stripes.choose(4, 16, infos(*[(0.1, 0.1)] * 4))
    assert set(sending.at(1e6, 0.05)) == {8}


times = st.tuples(st.floats(0, 1e6), st.floats(0, 1e6))


@given(st.integers(1, 16), st.integers(0, 16), st.lists(st.lists(times, max_size=5), max_size=5))
def test_the_choice_is_at_least_one_and_at_most_all(
    in_use: int, more: int, looks: list[list[tuple[float, float]]]
) -> None:
    active, most = ActiveStripes(), min(16, in_use + more)
    for each in looks:
        in_use = active.choose(in_use, most, infos(*each))
        assert 1 <= in_use <= most


class End(QuietOwner):
    """A parent, or a child that may stop reading."""

    def __init__(self, maker, root: Path, number: int) -> None:
        self.maker = maker
        self.identity = Identity(bytes([number]) * 16, f"n{number}", TOKEN)
        self.store = ArtifactStore(root / str(number), maker.key.public)
        self.node = Node(self, bytes([number]) * 16, maker.key.public)
        self.node.add_layout(maker.layout)
        self.downstream = self.node.downstream
        self.whole = asyncio.Event()

    def make_log(self, open_, layout, *, excerpt):
        return self.store.begin(open_, layout)

    def on_opened(self, holding): ...

    def on_complete(self, holding):
        self.whole.set()

    def on_offered(self, upstream): ...
    def on_upstream_lost(self, upstream, error): ...

    def accept_link(self, link: Link, hello) -> None:
        link.owner = self.downstream
        self.downstream.accept(link)

    def publish(self, made) -> None:
        record = Assembly(made.open, self.maker.key.public, self.maker.layout).open
        log = self.store.begin(record, self.maker.layout)
        holding = self.node.open(made.open, None, log)
        log.write(0, [made.log])
        for batch in made.batches:
            self.node.add_local(holding, batch)
        self.node.seal(holding, made.manifest)


@pytest.fixture
async def pair(maker, tmp_path: Path):
    parent, child = End(maker, tmp_path, 1), End(maker, tmp_path, 2)
    listener = Listener(parent, parent.identity, sockets=SMALL)
    await listener.start("127.0.0.1", 0)
    running = [asyncio.ensure_future(work) for work in (parent.node.run(), parent.downstream.run(), child.node.run())]

    async def attach(stripes) -> tuple[Link, Link, Upstream]:
        where = listener.address
        link = await dial(
            QuietOwner(), *where, child.identity, purpose="data", role="child", stripes=stripes, sockets=SMALL
        )
        upstream = Upstream(child.node, link, live=True)
        upstream.start()
        running.append(asyncio.ensure_future(upstream.run()))
        await upstream.attached.wait()
        (above,) = parent.downstream.children
        return above, link, upstream

    async with asyncio.timeout(LIMIT_S):
        yield parent, child, attach
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    await listener.stop()
    for end in (parent, child):
        end.downstream.close()
        end.node.close()


def carried(link: Link) -> list[int]:
    """The numbers of stripes on which pieces came."""
    infos = {number: stripe.info() for number, stripe in link.stripes.items()}
    return [number for number, info in infos.items() if info is not None and info.received_bytes > 65536]


@pytest.mark.parametrize(
    ("stripes", "used"), [(STRIPES, STRIPES), (lambda rtt_s: STRIPES, FEWEST)], ids=["stated", "chosen"]
)
async def test_chosen_stripes_are_held_in_reserve_and_stated_stripes_are_all_used(
    pair, maker, monkeypatch, stripes, used
) -> None:
    monkeypatch.setattr(module, "congestion_of", lambda sock: "bbr")
    monkeypatch.setattr(ActiveStripes, "choose", lambda self, in_use, most, infos: in_use)
    filled = asyncio.Event()
    pause = Stripe.pause_writing
    monkeypatch.setattr(Stripe, "pause_writing", lambda self: (pause(self), filled.set()))
    parent, child, attach = pair
    above, below, _ = await attach(stripes)
    assert (len(below.stripes), link_row(above, "child")["stripes_in_use"]) == (STRIPES, used)
    below.pause_reading()
    parent.publish(maker.make(STATE))
    while sum(not stripe.writable for stripe in above.stripes.values()) < used:
        await filled.wait()
        filled.clear()
    assert [stripe.number for stripe in above.stripes.values() if stripe.writable] == list(range(used, STRIPES))
    below.resume_reading()
    await child.whole.wait()
    assert carried(below) == list(range(used))


async def test_a_link_limited_by_receive_buffers_uses_all_its_stripes(pair, maker, monkeypatch) -> None:
    monkeypatch.setattr(module, "congestion_of", lambda sock: "bbr")
    widened = asyncio.Event()
    choose = ActiveStripes.choose

    def chosen(*arguments) -> int:
        widened.set()
        return choose(*arguments)

    monkeypatch.setattr(ActiveStripes, "choose", chosen)
    parent, child, attach = pair
    above, below, _ = await attach(lambda rtt_s: STRIPES)
    below.pause_reading()
    parent.publish(maker.make(STATE))
    while above.in_use < STRIPES:
        await widened.wait()
        widened.clear()
    below.resume_reading()
    await child.whole.wait()


async def test_an_attach_over_another_stripe_than_the_first_is_served(maker, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "congestion_of", lambda sock: None if sock is None else "bbr")
    end = End(maker, tmp_path, 1)
    for stripes, used in (
        ({}, 8),
        ({5: SimpleNamespace(socket=object(), closed=False, writable=False, close=lambda *_: None)}, FEWEST),
    ):
        link = Link(end.downstream, b"c" * 16, "child", 8)
        link.stripes = stripes
        end.downstream.accept(link)
        end.downstream.on_link_event(
            link, None, Message(Type.ATTACH, messages.Attach(live=False, layouts=[], want=[], reserve=True))
        )
        assert end.downstream.children[link].attached
        assert link.in_use == used
    end.node.close()


async def test_on_a_long_path_each_stripe_gets_an_alive_behind_its_last_piece(pair, maker, monkeypatch) -> None:
    def far(self) -> None:
        self.rtt_s = self.path_rtt_s = LIMIT_S

    monkeypatch.setattr(module.Child, "choose_stripes", far)
    others, event = asyncio.Event(), Upstream.on_link_event

    def heard(self, link, stripe, said) -> None:
        event(self, link, stripe, said)
        if isinstance(said, Message) and said.type is Type.ALIVE and stripe.number:
            others.set()

    monkeypatch.setattr(Upstream, "on_link_event", heard)
    parent, child, attach = pair
    await attach(4)
    parent.publish(maker.make(STATE))
    await child.whole.wait()
    others.clear()
    await others.wait()
