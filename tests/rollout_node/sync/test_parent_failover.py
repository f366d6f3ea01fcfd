"""Order and frequency of a peer's attempts when no parent answers."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import pytest
from recorder import Recorder

from netem.fleet.processes import free_port
from p2pcast.ground.errors import RetryableError
from p2pcast.relay.node import Node
from p2pcast.transport.listener import Listener
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire import messages
from p2pcast.wire.connection import Identity
from rollout_node.sync import parent_failover
from rollout_node.sync.connector import Connector
from rollout_node.sync.parent_failover import ParentFailover, parent_dialler
from tests.support.until import until

TOKEN = JoinToken(bytes(16), bytes(20))
HUB, PARENT, BACKUP = (bytes([n]) * 16 for n in (1, 2, 3))


def dialling(identity: Identity) -> Connector:
    """Without a hub to call through."""
    return Connector(identity, lambda record: False, None)


def fake_hub(place) -> SimpleNamespace:
    return SimpleNamespace(place=place, hub=place[0], changed=lambda: None)


class Tried(ParentFailover):
    """Records the attempted parents, and the waits between attempts."""

    def __init__(self, port: int) -> None:
        me = Identity(bytes(16), "me", JoinToken(bytes(16), bytes(20)))
        node = Node(None, me.node, bytes(32))  # type: ignore[arg-type]
        dial = parent_dialler(node, dialling(me), 1)
        super().__init__(dial, lambda: False, fake_hub((HUB, "127.0.0.1", port)), Recorder(), Recorder())
        self.node = node
        self.tried: list[bytes | float] = []

    async def _attach(self, place):
        self.tried.append(place[0])
        return await super()._attach(place)


async def tries(monkeypatch, attach: Tried, until: int) -> list[bytes | float]:
    """Real connections to a port without a listener; waits are recorded instead of slept."""
    enough = asyncio.Event()
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        attach.tried.append(seconds)
        if len(attach.tried) >= until:
            enough.set()
        await real_sleep(0)

    monkeypatch.setattr(parent_failover.asyncio, "sleep", sleep)
    task = asyncio.create_task(attach._follow_plan())
    async with asyncio.timeout(600):
        await enough.wait()
    task.cancel()
    await asyncio.wait([task])
    attach.node.close()
    return attach.tried


async def test_a_hub_that_is_gone_is_tried_ever_less_often(monkeypatch):
    attach = Tried(free_port())
    attach.order((1, 1), None, [])
    tried = await tries(monkeypatch, attach, 16)
    assert tried[0::2] == [HUB] * (len(tried) // 2)
    waits = [w for w in tried[1::2] if isinstance(w, float)]
    assert len(waits) == len(tried) // 2
    assert waits[0] <= 1.5 * parent_failover.RETRY_MIN_S
    assert waits[-1] >= 0.5 * parent_failover.RETRY_MAX_S


async def test_every_candidate_is_tried_before_the_first_wait(monkeypatch):
    port = free_port()
    attach = Tried(port)
    attach.order((1, 1), (PARENT, "127.0.0.1", port), [(BACKUP, "127.0.0.1", port)])
    tried = await tries(monkeypatch, attach, 5)
    assert tried[:3] == [PARENT, BACKUP, HUB]
    assert isinstance(tried[3], float)


# -- with real parents


class Parent:
    """A node that others attach to, on a socket of its own. It never sends pieces."""

    def __init__(self, ident: bytes) -> None:
        self.ident = ident
        self.node = Node(None, ident, bytes(32))  # type: ignore[arg-type]
        self.downstream = self.node.downstream
        self.listener = Listener(self, Identity(ident, "parent", TOKEN))

    async def start(self) -> tuple[bytes, str, int]:
        await self.listener.start("127.0.0.1", 0)
        return (self.ident, *self.listener.address)

    def accept_link(self, link, hello) -> None:
        link.owner = self.downstream
        self.downstream.accept(link)

    async def stop(self) -> None:
        await self.listener.stop()
        self.downstream.close()
        self.node.close()


@pytest.fixture
async def parents():
    made = [Parent(i) for i in (HUB, PARENT, BACKUP)]
    places = [await p.start() for p in made]
    yield made, places
    for parent in made:
        await parent.stop()


class Attached(ParentFailover):
    def __init__(self, node, connector, hub, timeline) -> None:
        dial = parent_dialler(node, connector, 2)
        super().__init__(dial, lambda: bool(node.wants()), hub, timeline, Recorder())
        self.node, self.connector = node, connector


@pytest.fixture
async def attached(parents):
    """An attachment whose hub is the first of the parents, and its reports: the parent at each reported change."""
    _, places = parents
    node = Node(Quiet(), bytes([9]) * 16, bytes(32))
    reports: list[bytes | None] = []
    me = dialling(Identity(node.ident, "me", TOKEN))
    attach = Attached(node, me, fake_hub(places[0]), SimpleNamespace(attached=reports.append))
    task = asyncio.create_task(attach.run())
    yield attach, reports
    task.cancel()
    await asyncio.wait([task])
    node.close()


class Quiet:
    """Wants to know nothing of its node."""

    def on_offered(self, upstream) -> None: ...

    def on_upstream_lost(self, upstream, error) -> None: ...


async def test_older_plans_are_ignored(parents, attached):
    _, (_, parent, backup) = parents
    attach, _ = attached
    attach.order((1, 5), parent, [])
    await until(lambda: attach.parent == PARENT)
    attach.order((1, 5), backup, [])
    attach.order((1, 4), backup, [])
    assert attach.orders.parent == parent
    attach.order((2, 0), backup, [])
    await until(lambda: attach.parent == BACKUP)
    attach.order((2, 1), None, [])
    await until(lambda: attach.parent == HUB)


async def test_the_old_parent_goes_on_until_its_successor_answers(parents, attached):
    _, (_, place, backup) = parents
    attach, reports = attached
    attach.order((1, 1), place, [])
    await until(lambda: attach.parent == PARENT)
    left = attach.live
    with socket.create_server(("127.0.0.1", 0)) as mute:
        attach.order((1, 2), (BACKUP, *mute.getsockname()[:2]), [])
        (await asyncio.get_running_loop().run_in_executor(None, mute.accept))[0].close()
        # The new parent closed the link: the child stays at the old parent.
        await until(lambda: attach.settled == (1, 2))
    assert attach.feeding is left
    assert attach.parent == PARENT
    attach.order((1, 3), backup, [])
    assert attach.settled == (1, 2), "on the way: not a place that the hub may believe"
    await until(lambda: attach.parent == BACKUP)
    assert attach.settled == (1, 3)
    assert left.link.closed
    assert None not in reports[reports.index(PARENT) :]


async def test_an_order_superseded_while_dialling_leaves_no_link(parents, attached):
    (hub, _, _), (_, _place, backup) = parents
    attach, _ = attached
    attach.order((1, 1), None, [])
    await until(lambda: attach.parent == HUB)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        attach.order((1, 2), (PARENT, *mute.getsockname()[:2]), [])
        caller, _ = await asyncio.get_running_loop().run_in_executor(None, mute.accept)
        with caller:
            attach.order((1, 3), None, [])
            assert attach.settled == (1, 3)
    attach.order((1, 4), backup, [])
    await until(lambda: attach.parent == BACKUP)
    await until(lambda: not hub.downstream.children)


async def test_a_lost_parent_is_left_for_the_next_and_not_returned_to(parents, attached):
    (_, parent, _), (_, place, backup) = parents
    attach, reports = attached
    attach.order((1, 1), place, [backup])
    await until(lambda: attach.parent == PARENT)
    parent.downstream.close()
    await until(lambda: attach.parent == BACKUP)
    for _ in range(50):  # enough for a dial on loopback, which it must not make though the plan still names that parent
        await asyncio.sleep(0.001)
    assert [p for p in reports if p is not None] == [PARENT, BACKUP]


async def test_a_new_plan_lifts_the_blame(parents, attached):
    (_, parent, _), (_, place, backup) = parents
    attach, _ = attached
    attach.order((1, 1), place, [backup])
    await until(lambda: attach.parent == PARENT)
    parent.downstream.close()
    await until(lambda: attach.parent == BACKUP)
    attach.order((1, 2), place, [backup])
    await until(lambda: attach.parent == PARENT)


async def test_a_plan_received_while_dialling_is_followed(parents, attached, monkeypatch):
    _, (_, place, backup) = parents
    attach, reports = attached
    real = attach._attach

    async def meanwhile(where):
        upstream = await real(where)
        if where[0] == PARENT and attach.orders.epoch == (1, 1):
            attach.order((1, 2), backup, [])
        return upstream

    monkeypatch.setattr(attach, "_attach", meanwhile)
    attach.order((1, 1), place, [])
    await until(lambda: attach.parent == BACKUP)
    assert reports[-1] == BACKUP


async def test_a_hub_that_hangs_up_at_once_is_not_hammered(parents, attached, monkeypatch):
    (hub, _, _), _ = parents
    attach, _ = attached
    waits: list[float] = []
    enough = asyncio.Event()
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) >= 8:
            enough.set()
        await real_sleep(0)

    def hang_up(link, hello) -> None:
        raise RetryableError("not now")

    monkeypatch.setattr(hub, "accept_link", hang_up)
    monkeypatch.setattr(parent_failover.asyncio, "sleep", sleep)
    attach.order((1, 1), None, [])
    async with asyncio.timeout(600):
        await enough.wait()
    assert waits[0] < waits[-1]
    assert waits[-1] >= 0.5 * parent_failover.RETRY_MAX_S


async def test_a_silent_parent_does_not_delay_the_backup(parents, attached):
    """A frozen parent's kernel still accepts connections. The backup is dialled beside it."""
    _, (_, _, backup) = parents
    attach, _ = attached
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        attach.order((1, 1), (PARENT, "127.0.0.1", frozen.getsockname()[1]), [backup])
        await until(lambda: attach.parent == BACKUP)
        assert PARENT in attach._avoided


async def test_an_orphan_uses_its_neighbour_until_an_ancestor_answers(parents, attached):
    (hub, _, neighbour), (place, _, beside) = parents
    attach, _ = attached
    await hub.listener.stop()
    attach.introduce([(PARENT, "127.0.0.1", free_port()), beside])
    attach.order((1, 1), None, [])
    await until(lambda: attach.beside is not None and neighbour.downstream.children)
    assert attach.parent is None
    assert attach.node.path == [attach.node.ident], "that is no place in the tree"
    await hub.listener.start("127.0.0.1", place[2])
    await until(lambda: attach.parent == HUB and attach.beside is None)
    await until(lambda: not neighbour.downstream.children)


async def test_a_neighbour_that_hangs_below_us_is_left_for_the_next(parents, attached):
    (hub, below, neighbour), (_, lower, beside) = parents
    attach, _ = attached
    below.node.path = [HUB, attach.node.ident, PARENT]
    await hub.listener.stop()
    attach.introduce([lower, beside])
    attach.order((1, 1), None, [])
    await until(lambda: neighbour.downstream.children)
    await until(lambda: not below.downstream.children)


async def test_a_loop_is_left_without_blame(parents, attached):
    """Two plans cross: the parent is still below this child. The child retries until the parent has moved."""
    (_, parent, _), (_, place, backup) = parents
    attach, _ = attached
    parent.node.path = [HUB, attach.node.ident, PARENT]
    attach.order((1, 1), place, [backup])
    await until(lambda: not parent.downstream.children and attach.parent is None and attach.moved_at > 0)
    parent.node.path = [HUB, PARENT]
    await until(lambda: attach.parent == PARENT and attach.node.path == [HUB, PARENT, attach.node.ident])
    assert PARENT not in attach._avoided


async def test_a_parent_whose_link_has_just_closed_is_lost_at_that_moment(parents, attached):
    """The loss counts at once, so another source can send the parent's artifacts while the next parent is dialled."""
    _, (_, place, _) = parents
    attach, _ = attached
    attach.order((1, 1), place, [])
    await until(lambda: attach.parent == PARENT)
    found_at = attach.moved_at
    attach.live.link.abort()
    assert attach.moved_at > found_at


async def test_nothing_is_asked_of_a_parent_that_was_just_left(parents, attached):
    """Between the end of a link and the next parent: a node that is asked at that moment would never answer."""
    _, (_, place, backup) = parents
    attach, _ = attached
    attach.order((1, 1), place, [])
    await until(lambda: attach.parent == PARENT)
    left = attach.live
    assert attach.feeding is left
    left.lag.begin(0.0, 0)
    left.lag.sample(1.0, 0, 1)  # the child lags, so it leaves before the next parent has answered
    attach.order((1, 2), backup, [])
    await until(lambda: left.link.closed)
    assert attach.feeding is not left
    left.want(bytes(16))
    assert left.wanted == set()
    await until(lambda: attach.parent == BACKUP)


async def test_a_parent_that_can_only_be_called_does_not_delay_the_backup(parents, attached, monkeypatch):
    """Dialling the parent is refused, and the call through the hub gets no answer: the backup is dialled at once,
    without a head start.
    """
    _, (_, _, backup) = parents
    attach, _ = attached
    monkeypatch.setattr(parent_failover, "CALM_S", 3600.0)
    monkeypatch.setattr(attach.connector, "_send", lambda record: True)
    attach.connector.learn_addresses(messages.Addresses([(PARENT, True, [("127.0.0.1", free_port())])]))
    attach.order((1, 1), (PARENT, "127.0.0.1", free_port()), [backup])
    await until(lambda: attach.parent == BACKUP)
