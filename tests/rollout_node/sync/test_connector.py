"""A link is made from whichever side can dial, and an uncalled node is refused."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from functools import partial

import pytest

from netem.fleet.processes import free_port
from p2pcast.ground.errors import P2PCastError, RefusedError
from p2pcast.relay.node import Node
from p2pcast.relay.upstream import Upstream
from p2pcast.transport.dial import Stripes, UnreachableError, dial_any
from p2pcast.transport.link import Link
from p2pcast.transport.listener import Listener
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire import messages
from p2pcast.wire.connection import PARENT, Connection, ConnectionRequest, Identity
from p2pcast.wire.connection_state import Side
from rollout_node.sync import connector as module
from rollout_node.sync.connector import Connector
from tests.support.until import until

TOKEN = JoinToken(bytes(16), bytes(20))
STRIPES = 3


def suited(rtt_s: float) -> int:
    return 4


class Quiet:
    def on_offered(self, upstream) -> None: ...

    def on_upstream_lost(self, upstream, error) -> None: ...


class Peer:
    """As much of a peer as it takes to dial and be dialled. ``said``: to the hub."""

    def __init__(self, number: int) -> None:
        self.identity = Identity(bytes([number]) * 16, f"peer-{number}", TOKEN)
        self.node = Node(Quiet(), self.identity.node, bytes(32))  # type: ignore[arg-type]
        self.downstream = self.node.downstream
        self.connector = Connector(self.identity, self.say, None)
        self.listener = Listener(self, self.identity)
        self.said: list[messages.Record] = []
        self.hub = True
        self.spoken = asyncio.Event()
        self.asks: Peer | None = None
        """The peer that receives this peer's calls from the hub."""

    def say(self, record: messages.Record) -> bool:
        if not self.hub:
            return False
        self.said.append(record)
        self.spoken.set()
        if isinstance(record, messages.Call) and self.asks is not None:
            assert record.node == self.asks.identity.node
            self.asks.connector.dial_child(
                messages.Called(self.identity.node, record.stripes, [self.at]), self.asks.downstream
            )
        return True

    @property
    def at(self) -> tuple[str, int]:
        return self.listener.address

    def knows(self, other: Peer, *, likely: bool, ways: list[tuple[str, int]]) -> tuple[bytes, str, int]:
        self.connector.learn_addresses(messages.Addresses([(other.identity.node, likely, ways)]))
        return (other.identity.node, "no.such.name.invalid", 1)

    def accept_link(self, link, hello) -> None:
        if hello.role == PARENT:
            self.connector.accept(link, hello)
        else:
            link.owner = self.downstream
            self.downstream.accept(link)


@pytest.fixture(params=["127.0.0.1", "::1"])
async def pair(request):
    """A child and its parent-to-be."""
    peers = [Peer(1), Peer(2)]
    tasks = [asyncio.create_task(peer.connector.run()) for peer in peers]
    for peer in peers:
        await peer.listener.start(request.param, 0)
    yield peers
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for peer in peers:
        await peer.listener.stop()
        peer.downstream.close()
        peer.node.close()


async def reach(child: Peer, place, stripes: Stripes = STRIPES) -> Upstream:
    async with asyncio.timeout(600):
        return await child.connector.reach(partial(Upstream, child.node, live=True), place, stripes)


async def attaches(upstream: Upstream, child: Peer, parent: Peer) -> None:
    """The link works as any other: the child names its artifacts, the parent its position."""
    upstream.start()
    running = asyncio.create_task(upstream.run())
    async with asyncio.timeout(600):
        await upstream.attached.wait()
    assert child.node.path == [parent.identity.node, child.identity.node]
    (fed,) = parent.downstream.children.values()
    assert fed.attached
    assert len(fed.link.stripes) == len(upstream.link.stripes) == STRIPES
    upstream.link.close()
    await running


async def test_a_child_that_can_dial_does(pair) -> None:
    child, parent = pair
    upstream = await reach(child, child.knows(parent, likely=True, ways=[parent.at]))
    assert upstream.link.dialled
    assert child.said == []
    await attaches(upstream, child, parent)


async def test_a_parent_without_known_addresses_is_dialled_at_the_plans_address(pair) -> None:
    child, parent = pair
    upstream = await reach(child, (parent.identity.node, *parent.at))
    assert upstream.link.dialled
    upstream.link.close()


async def test_an_unreachable_parent_is_called_through_the_hub_first(pair) -> None:
    child, parent = pair
    child.asks = parent
    upstream = await reach(child, child.knows(parent, likely=False, ways=[]))
    assert not upstream.link.dialled
    assert upstream.link.remote == parent.identity.node
    assert child.said == [messages.Call(parent.identity.node, STRIPES)]
    await attaches(upstream, child, parent)


@pytest.mark.parametrize(("likely", "stripes"), [(True, STRIPES), (True, suited), (False, STRIPES), (False, suited)])
async def test_stripes_are_a_reserve_unless_their_number_is_stated(pair, likely, stripes) -> None:
    child, parent = pair
    child.asks = parent
    upstream = await reach(child, child.knows(parent, likely=likely, ways=[parent.at] if likely else []), stripes)
    assert upstream.link.dialled == likely
    assert upstream.link.reserve == (stripes is suited)
    upstream.link.close()


async def test_the_end_of_a_second_link_does_not_end_the_first(pair, monkeypatch) -> None:
    """Both attempts may succeed at one time; the link that is not needed is dropped."""
    child, parent = pair
    child.asks = parent
    links: list[Link] = []

    async def both(attempts, head_start_s, undo):
        links.extend(await asyncio.gather(*(attempt() for attempt in attempts)))
        undo(links[1])
        return links[0], []

    monkeypatch.setattr(module, "race", both)
    upstream = await reach(child, child.knows(parent, likely=True, ways=[parent.at]))
    assert [link.closed for link in links] == [False, True]
    assert upstream.link is links[0]
    assert not upstream.ended.done()
    upstream.link.close()


async def test_a_parent_that_cannot_be_dialled_is_called_and_reported(pair) -> None:
    child, parent = pair
    child.asks = parent
    upstream = await reach(child, child.knows(parent, likely=True, ways=[("127.0.0.1", free_port())]))
    assert not upstream.link.dialled
    assert messages.Unreachable(parent.identity.node) in child.said
    upstream.link.close()


async def test_a_parent_wrongly_marked_unreachable_is_dialled(pair, monkeypatch) -> None:
    child, parent = pair
    monkeypatch.setattr(module, "CALL_S", 0.01)
    upstream = await reach(child, child.knows(parent, likely=False, ways=[parent.at]))
    assert upstream.link.dialled
    assert isinstance(child.said[0], messages.Call)
    upstream.link.close()


async def test_without_any_route_the_attempt_fails_at_the_hubs_message(pair) -> None:
    child, parent = pair
    child.asks = parent
    place = child.knows(parent, likely=True, ways=[("127.0.0.1", free_port())])
    child.listener.address = ("127.0.0.1", free_port())
    task = asyncio.create_task(reach(child, place))
    async with asyncio.timeout(600):
        await parent.spoken.wait()
    assert parent.said == [messages.Unreachable(child.identity.node)]
    child.connector.stop_waiting(messages.Unreachable(parent.identity.node))
    with pytest.raises(UnreachableError):
        await task


async def test_without_a_hub_no_parent_can_be_called(pair) -> None:
    child, parent = pair
    child.hub = False
    with pytest.raises(UnreachableError, match="refused"):
        await reach(child, child.knows(parent, likely=True, ways=[("127.0.0.1", free_port())]))
    with pytest.raises(UnreachableError):
        await reach(child, child.knows(parent, likely=False, ways=[]))


async def test_a_failed_dial_is_reported_while_the_call_is_pending(pair) -> None:
    child, parent = pair
    doubts = asyncio.Event()
    build = partial(Upstream, child.node, live=True)
    place = child.knows(parent, likely=True, ways=[("127.0.0.1", free_port())])
    task = asyncio.create_task(child.connector.reach(build, place, STRIPES, on_dial_failed=doubts.set))
    async with asyncio.timeout(600):
        await doubts.wait()
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    calls = [type(said) for said in child.said].count(messages.Call)
    with pytest.raises(UnreachableError):
        await child.connector.reach(build, place, STRIPES, call=False)
    assert [type(said) for said in child.said].count(messages.Call) == calls


async def test_a_parent_that_was_not_called_is_shown_out(pair) -> None:
    child, parent = pair
    what = {"purpose": "data", "role": "parent", "stripes": 1, "made": parent.downstream.accept}
    try:
        link = await dial_any(parent.downstream, [child.at], parent.identity, **what)
    except RefusedError as error:
        refused: Exception | None = error
    else:
        await until(lambda: link.closed)
        refused = link.error
    assert "was not asked to dial" in str(refused)
    assert not parent.downstream.children


async def test_a_silent_parent_is_not_called(pair, monkeypatch) -> None:
    """The parent accepts connections, so it is busy or frozen: a call through the hub would not help."""
    child, parent = pair
    stands = asyncio.Event()

    async def dialled(*args, on_connect, **kwargs):
        return await dial_any(*args, on_connect=lambda: (on_connect(), stands.set()), **kwargs)

    async def once_it_stands(attempts, head_start_s, undo):
        dialling = asyncio.create_task(attempts[0]())
        await stands.wait()
        calling = asyncio.create_task(attempts[1]())
        await asyncio.wait([calling], timeout=0.1)
        dialling.cancel()
        calling.cancel()
        raise UnreachableError("the race is over")

    monkeypatch.setattr(module, "dial_any", dialled)
    monkeypatch.setattr(module, "race", once_it_stands)
    with socket.create_server(("127.0.0.1", 0)) as frozen, pytest.raises(UnreachableError, match="the race is over"):
        await reach(child, child.knows(parent, likely=True, ways=[frozen.getsockname()[:2]]))
    assert child.said == []


async def test_a_cancelled_attempt_leaves_nothing_behind(pair) -> None:
    child, parent = pair
    task = asyncio.create_task(reach(child, child.knows(parent, likely=False, ways=[])))
    async with asyncio.timeout(600):
        await child.spoken.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    # A call that has been given up is not answered any more.
    parent.connector.dial_child(messages.Called(child.identity.node, STRIPES, [child.at]), parent.downstream)
    await until(lambda: not (parent.connector._tasks or parent.downstream.children))


async def test_after_a_faster_call_the_dial_is_still_judged(pair, monkeypatch) -> None:
    """As with a firewall that drops: no answer, no error."""
    child, parent = pair
    child.asks = parent
    monkeypatch.setattr(module, "CALL_S", 0.01)

    async def dropped(*args, **kwargs):
        if kwargs["role"] == "child":
            await asyncio.Event().wait()
        return await dial_any(*args, **kwargs)

    async def unanswered(*args) -> bool:
        return False

    monkeypatch.setattr(module, "dial_any", dropped)
    monkeypatch.setattr(module, "probe", unanswered)
    upstream = await reach(child, child.knows(parent, likely=True, ways=[("192.0.2.1", 7)]))
    assert not upstream.link.dialled
    await until(lambda: messages.Unreachable(parent.identity.node) in child.said)
    upstream.link.close()


async def test_one_node_keeps_only_so_many_calls_under_way(pair):
    """Each is a dial that may take seconds, and there are only so many of them for all children."""
    greedy, parent = pair
    with socket.create_server(("127.0.0.1", 0)) as silent:
        way = list(silent.getsockname())
        for _ in range(module.MAX_CALLED):
            parent.connector.dial_child(messages.Called(greedy.identity.node, 1, [way]), parent.downstream)
        assert len(parent.connector._tasks) == module.MAX_CALLS_PER_NODE
        parent.connector.dial_child(messages.Called(b"x" * 16, 1, [way]), parent.downstream)
        assert len(parent.connector._tasks) == module.MAX_CALLS_PER_NODE + 1


async def test_a_parent_that_brings_some_of_its_stripes_is_not_waited_for(pair, monkeypatch):
    child, parent = pair
    monkeypatch.setattr(module, "DIAL_S", 600.0)
    place = child.knows(parent, likely=False, ways=[])
    reaching = asyncio.create_task(reach(child, place))
    await child.spoken.wait()  # CALL
    monkeypatch.setattr(module, "DIAL_S", 0.1)
    reader, writer = await asyncio.open_connection(*child.at)
    request = ConnectionRequest("data", PARENT, bytes(16), stripe=0, stripes=STRIPES)
    connection = Connection(Side.DIALER, parent.identity, bytes(32), request)
    heard = bytearray()
    async with asyncio.timeout(600):
        writer.write(connection.take_output())
        while data := await reader.read(4096):
            heard += data
            if connection.state.value.startswith("waiting"):
                with contextlib.suppress(P2PCastError):  # the link's end may come with its beginning
                    connection.feed(data)
                writer.write(connection.take_output())
    assert b"no other stripes within" in heard
    writer.transport.abort()
    child.connector.stop_waiting(messages.Unreachable(parent.identity.node))
    with pytest.raises(UnreachableError):
        await reaching
    with pytest.raises(UnreachableError):
        await reach(child, place)
