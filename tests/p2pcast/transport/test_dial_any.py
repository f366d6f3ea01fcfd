"""A node with several addresses, in both families: the first at which it answers is taken, whoever else lives at the others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from p2pcast import event_loop
from p2pcast.errors import RefusedError
from p2pcast.transport import dial as module
from p2pcast.transport.dial import UnreachableError, dial, dial_any, probe, resolve
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import Type
from p2pcast.wire.token import Token

TOKEN = Token(bytes(16), bytes(20))
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
        link.send(Type.WANT if hello["role"] == "parent" else Type.PATH, {"artifact": bytes(16), "have": [], "path": []})

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


def nobody() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return ("127.0.0.1", int(probe.getsockname()[1]))


async def test_over_ipv6() -> None:
    async with listening(THERE, "::1") as (place, theirs):
        link = await dial(Owner(), *place, ME, **WHAT)
        assert link.name == link.address == f"[::1]:{place[1]}"
        assert link.dialled
        assert not theirs.links[0].dialled
        link.close()


async def test_of_a_socket_for_both_families_an_ipv4_address_is_plain() -> None:
    async with listening(THERE, "") as ((_, port), theirs):
        link = await dial(Owner(), "127.0.0.1", port, ME, **WHAT)
        assert theirs.links[0].remote_host == "127.0.0.1"
        link.close()


async def test_who_refuses_and_who_is_somebody_else_is_passed_by() -> None:
    async with listening(STRANGER, "127.0.0.1") as (other, _), listening(THERE, "::1") as (place, _):
        link = await dial_any(Owner(), [nobody(), other, place], ME, **WHAT)
        assert link.remote == THERE.node
        assert len(link.stripes) == 3
        link.close()


async def test_one_that_does_not_answer_costs_its_head_start(monkeypatch) -> None:
    monkeypatch.setattr(module, "NEXT_ADDRESS_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with listening(THERE, "::1") as (place, _):
            link = await dial_any(Owner(), [silent.getsockname()[:2], place], ME, **WHAT)
            assert link.remote == THERE.node
            link.close()


async def test_when_nobody_answers_all_is_said_in_one_line() -> None:
    async with listening(STRANGER, "127.0.0.1") as (other, _):
        with pytest.raises(UnreachableError, match=r"cannot reach .*refused.*another node") as failed:
            await dial_any(Owner(), [nobody(), other], ME, **WHAT)
        assert "\n" not in str(failed.value)
        with pytest.raises(UnreachableError, match="no address"):
            await dial_any(Owner(), [], ME, **WHAT)
        with pytest.raises(UnreachableError, match="invalid:1"):
            await dial_any(Owner(), [("x.invalid", 1)], ME, **WHAT)


async def test_a_refusal_counts_where_nobody_in_particular_was_expected() -> None:
    stranger = Identity(ME.node, "me", Token(bytes(16), b"S" * 20))
    async with listening(THERE, "127.0.0.1") as (place, _):
        with pytest.raises(RefusedError, match="not one that this hub gave out"):
            await dial_any(Owner(), [nobody(), place], stranger, **WHAT | {"expect": None})


async def test_a_name_is_all_its_addresses() -> None:
    found, errors = await resolve([("localhost", 1), ("::1", 2), ("no.such.name.invalid", 3), ("a" * 70, 4)])
    assert ("127.0.0.1", 1) in found
    assert found[-1] == ("::1", 2)
    assert len(errors) == 2


async def test_whether_a_node_answers() -> None:
    async with listening(THERE, "::1") as (place, _):
        assert await probe(place, ME, THERE.node)
        assert not await probe(place, ME, STRANGER.node)
        assert not await probe(nobody(), ME, THERE.node)


async def test_a_parent_is_told_of_the_link_before_what_its_child_says() -> None:
    async with listening(THERE, "127.0.0.1") as (place, child):
        mine = Owner()
        told: list[tuple[Link, int]] = []
        link = await dial_any(
            mine, [place], ME, **WHAT | {"role": "parent"}, made=lambda made: told.append((made, len(mine.heard)))
        )
        assert told == [(link, 0)]
        async with asyncio.timeout(30):
            await mine.spoken.wait()
        assert mine.heard == [Type.WANT]
        assert child.links[0].remote == ME.node
        link.close()


@pytest.mark.parametrize(
    "address", [("::1%" + "a" * 100, 7000), ("a" * 70, 1), ("x\0y", 1), ("127.0.0.1", 70_000), ("::1", -1), ("", 1)]
)
def test_an_address_that_no_loop_takes_is_out_of_reach(address) -> None:
    """What sockets and resolvers raise for it is as many kinds as there are loops."""

    async def play() -> None:
        with pytest.raises(UnreachableError):
            await dial_any(Owner(), [address], ME, **WHAT)
        with pytest.raises(UnreachableError):
            await dial_any(Owner(), [address], ME, **(WHAT | {"stripes": lambda rtt_s: 2}))
        assert await probe(address, ME, THERE.node) is False

    for loop in (asyncio.new_event_loop, event_loop.new_event_loop):
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(play())


async def test_a_link_is_up_though_another_address_is_nonsense() -> None:
    async with listening(THERE, "127.0.0.1") as (place, _):
        link = await dial_any(Owner(), [("127.0.0.1", 70_000), place], ME, **WHAT)
        assert not link.closed
        link.close()
