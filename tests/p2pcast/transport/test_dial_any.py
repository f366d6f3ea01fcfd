"""Dialling a node with several addresses, in both families: the first address where that node answers wins, whichever
nodes have the others.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from netem.fleet.processes import free_port
from p2pcast.ground.errors import RefusedError
from p2pcast.process import event_loop
from p2pcast.transport import dial as module
from p2pcast.transport.dial import UnreachableError, dial, dial_any, probe, resolve
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import Path, Type, Want

TOKEN = JoinToken(bytes(16), bytes(20))
ME, THERE, STRANGER = (Identity(bytes([n]) * 16, f"node-{n}", TOKEN) for n in (1, 2, 3))
WHAT = {"purpose": "data", "role": "child", "stripes": 3, "expect": THERE.node}


class Owner(QuietOwner):
    def __init__(self) -> None:
        self.links: list[Link] = []
        self.heard: list[Type] = []
        self.spoken = asyncio.Event()

    def accept_link(self, link, hello) -> None:
        link.owner = self
        self.links.append(link)
        link.send(Want(bytes(16), ()) if hello.role == "parent" else Path(()))

    def on_link_event(self, link, stripe, event) -> None:
        self.heard.append(event.type)
        self.spoken.set()


@asynccontextmanager
async def listening(identity: Identity, host: str) -> AsyncIterator[tuple[tuple[str, int], Owner]]:
    owner = Owner()
    listener = Listener(owner, identity)
    await listener.start(host, 0)
    try:
        yield (host, listener.address[1]), owner
    finally:
        await listener.stop()


async def test_over_ipv6() -> None:
    async with listening(THERE, "::1") as (place, theirs):
        link = await dial(Owner(), *place, ME, **WHAT)
        assert link.name == link.address == f"[::1]:{place[1]}"
        assert link.dialled
        assert not theirs.links[0].dialled
        link.close()


async def test_an_ipv4_peer_of_a_dual_stack_socket_has_a_plain_address() -> None:
    async with listening(THERE, "") as ((_, port), theirs):
        link = await dial(Owner(), "127.0.0.1", port, ME, **WHAT)
        assert theirs.links[0].remote_host == "127.0.0.1"
        link.close()


async def test_dialling_skips_addresses_that_refuse_or_belong_to_another_node() -> None:
    async with listening(STRANGER, "127.0.0.1") as (other, _), listening(THERE, "::1") as (place, _):
        link = await dial_any(Owner(), [("127.0.0.1", free_port()), other, place], ME, **WHAT)
        assert link.remote == THERE.node
        assert len(link.stripes) == 3
        link.close()


async def test_an_unresponsive_address_costs_only_its_head_start(monkeypatch) -> None:
    monkeypatch.setattr(module, "NEXT_ADDRESS_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with listening(THERE, "::1") as (place, _):
            link = await dial_any(Owner(), [silent.getsockname()[:2], place], ME, **WHAT)
            assert link.remote == THERE.node
            link.close()


async def test_an_error_lists_all_unreachable_addresses_in_one_line() -> None:
    async with listening(STRANGER, "127.0.0.1") as (other, _):
        with pytest.raises(UnreachableError, match=r"cannot reach .*refused.*another node") as failed:
            await dial_any(Owner(), [("127.0.0.1", free_port()), other], ME, **WHAT)
        assert "\n" not in str(failed.value)
        with pytest.raises(UnreachableError, match="no address"):
            await dial_any(Owner(), [], ME, **WHAT)
        with pytest.raises(UnreachableError, match="invalid:1"):
            await dial_any(Owner(), [("x.invalid", 1)], ME, **WHAT)


async def test_a_refusal_is_raised_when_no_node_id_is_expected() -> None:
    stranger = Identity(ME.node, "me", JoinToken(bytes(16), b"S" * 20))
    async with listening(THERE, "127.0.0.1") as (place, _):
        with pytest.raises(RefusedError, match="not one that this hub gave out"):
            await dial_any(Owner(), [("127.0.0.1", free_port()), place], stranger, **WHAT | {"expect": None})


async def test_a_host_name_stands_for_all_its_addresses() -> None:
    found, errors = await resolve([("localhost", 1), ("::1", 2), ("no.such.name.invalid", 3), ("a" * 70, 4)])
    assert ("127.0.0.1", 1) in found
    assert found[-1] == ("::1", 2)
    assert len(errors) == 2


async def test_probe_reports_whether_the_node_answers() -> None:
    async with listening(THERE, "::1") as (place, _):
        assert await probe(place, ME, THERE.node)
        assert not await probe(place, ME, STRANGER.node)
        assert not await probe(("127.0.0.1", free_port()), ME, THERE.node)


async def test_a_dialling_parent_gets_the_link_before_its_first_message() -> None:
    async with listening(THERE, "127.0.0.1") as (place, child):
        mine = Owner()
        told: list[tuple[Link, int]] = []
        link = await dial_any(
            mine, [place], ME, **WHAT | {"role": "parent"}, made=lambda made: told.append((made, len(mine.heard)))
        )
        assert told == [(link, 0)]
        async with asyncio.timeout(600):
            await mine.spoken.wait()
        assert mine.heard == [Type.WANT]
        assert child.links[0].remote == ME.node
        link.close()


@pytest.mark.parametrize(
    "address", [("::1%" + "a" * 100, 7000), ("a" * 70, 1), ("x\0y", 1), ("127.0.0.1", 70_000), ("::1", -1), ("", 1)]
)
def test_an_address_that_no_event_loop_accepts_is_unreachable(address) -> None:
    """Sockets and resolvers raise different exceptions for it on each loop."""

    async def play() -> None:
        with pytest.raises(UnreachableError):
            await dial_any(Owner(), [address], ME, **WHAT)
        with pytest.raises(UnreachableError):
            await dial_any(Owner(), [address], ME, **(WHAT | {"stripes": lambda rtt_s: 2}))
        assert await probe(address, ME, THERE.node) is False

    for loop in (asyncio.new_event_loop, event_loop.new_event_loop):
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(play())


async def test_a_link_comes_up_beside_an_invalid_address() -> None:
    async with listening(THERE, "127.0.0.1") as (place, _):
        link = await dial_any(Owner(), [("127.0.0.1", 70_000), place], ME, **WHAT)
        assert not link.closed
        link.close()
