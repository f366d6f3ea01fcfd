"""Invalid input of peers and ranks: it ends their own link, or is ignored, and ends no daemon."""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import replace

import pytest

from p2pcast.cli.status import table
from p2pcast.ground import limits
from p2pcast.ground.errors import P2PCastError, RemoteError
from p2pcast.ground.version import Version
from p2pcast.transport.dial import dial
from p2pcast.transport.link import QuietOwner
from p2pcast.trust.certificates import new_key, request
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire import messages
from p2pcast.wire.connection import HEADER, Identity
from p2pcast.wire.messages import Type, encode_map

SCOPED = "::1%" + "a" * 100
"""`ipaddress` takes it for an address; uvloop raises UnicodeError when it is dialled."""
JOIN = {"name": "stolen", "region": "", "listen": ["", 9], "held": None, "engine": None}
REPORT = {"parent": None, "staged": None, "committed": None}


LIMIT_S = 600.0
"""Only to end a test that hangs."""


class Nobody(QuietOwner):
    def __init__(self):
        self.said = []
        self.over = asyncio.get_running_loop().create_future()
        self.heard = asyncio.Event()

    async def ended(self):
        async with asyncio.timeout(LIMIT_S):
            return await self.over

    def on_link_event(self, link, stripe, event):
        self.said.append(event)
        self.heard.set()

    def on_link_closed(self, link, error):
        if not self.over.done():
            self.over.set_result(error)


async def stolen(swarm, owner, *, at=None, **options):
    """A link by a dialer that has the token."""
    token = JoinToken.parse((swarm.folder / "token").read_text())
    given = {"purpose": "control", "role": "peer"} | options
    return await dial(owner, *(at or swarm.address), Identity(secrets.token_bytes(16), "stolen", token), **given)


async def pinging(swarm, **options):
    """The error of a link that says no more than PING. It may end before its dialler knows that it is up."""
    owner = Nobody()
    try:
        link = await stolen(swarm, owner, **options)
    except P2PCastError as error:
        return str(error)
    link.send(messages.Ping(1))
    return str(await owner.ended())


async def answered(link, owner):
    """Wait until all earlier messages were processed."""
    owner.heard.clear()
    link.send(messages.Ping(1))
    while not (owner.over.done() or any(getattr(e, "type", None) is Type.PONG for e in owner.said)):
        owner.heard.clear()
        await asyncio.wait([owner.over, asyncio.ensure_future(owner.heard.wait())], return_when=asyncio.FIRST_COMPLETED)


@pytest.mark.parametrize(
    "said",
    [{"ways": [[SCOPED, 7000]]}, {"listen": [SCOPED, 7000]}, {"listen": ["a" * 64, 1]}, {"ways": [["127.1", 1]]}],
)
async def test_one_join_does_not_kill_the_hub(swarm, states, said):
    await swarm.hub_up()
    await swarm.peer_up("a")
    owner = Nobody()
    link = await stolen(swarm, owner)
    link.send(messages.Join(**JOIN | said))
    error = await owner.ended()
    assert isinstance(error, RemoteError)
    assert "malformed or out of range" in str(error)
    swarm.publish(0, states.first())
    await swarm.live("0.0")


async def test_a_report_that_makes_no_sense_is_left_out(swarm, states, caplog):
    hub = await swarm.hub_up()
    await swarm.peer_up("a")
    owner = Nobody()
    link = await stolen(swarm, owner)
    link.send(messages.Join(**JOIN | {"name": "[/stolen]"}))
    odd = {
        "transfer": [1 << 63, 0],
        "inflow": [-1, 1, 1],
        "epoch": [{}, b""],
        "engines": [{"name": b"x"}, {"name": "e", "pause_s": float("nan"), "committed": [0, 1], "detail": {"a": [1]}}],
        "http": [SCOPED, "x"],
        "link": [1],
        "cores": -1,
        "progress": {"version": 1},
        "error": [],
        "state": None,
        "bytes_received": "x",
        "another": {"a": [b"\xff"]},
    }
    for _ in range(2):
        data = encode_map(REPORT | odd)
        link.stripes[0].write(HEADER.pack(len(data), Type.REPORT, 0, 0) + data)
    await answered(link, owner)
    assert not owner.over.done()
    assert hub.control.report_handler.invalid_reports == 2
    assert len([r for r in caplog.records if "invalid values" in r.getMessage()]) == 1, "once for each peer"
    (row,) = [p for p in (await swarm.status(hub))["peers"] if p["name"] == "[/stolen]"]
    [engine] = row["engines"]
    assert {key: engine[key] for key in engine.keys() - {"verdict"}} == {"name": "e", "detail": {}}
    assert engine["verdict"]["level"] == "watch"
    assert (row["progress"], row["error"], row["link"], row["http"], row["bytes_received"]) == (
        None,
        None,
        None,
        None,
        None,
    )
    json.dumps(row, allow_nan=False)
    table(await swarm.status(hub))
    status, text = await swarm.get(hub, "/metrics")
    assert status == 200
    assert "p2pcast_hub_odd_reports_total 2.0" in text
    swarm.publish(0, states.first())
    await swarm.live("0.0")


@pytest.mark.parametrize(
    ("purpose", "role", "what"), [("control", "peer", "JOIN"), ("publish", "rank", "RANK"), ("data", "child", "ATTACH")]
)
async def test_a_link_that_says_nothing_ends(swarm, monkeypatch, purpose, role, what):
    await swarm.hub_up()
    monkeypatch.setattr(limits, "FIRST_MESSAGE_S", 0.05)
    assert f"no {what} within" in await pinging(swarm, purpose=purpose, role=role)


async def test_a_link_to_a_peer_that_says_nothing_ends(swarm, monkeypatch):
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    monkeypatch.setattr(limits, "FIRST_MESSAGE_S", 0.05)
    at = peer.startup.listener.address
    assert "no ATTACH within" in await pinging(swarm, at=at, purpose="data", role="child")


async def test_planning_that_fails_does_not_end_the_hub(swarm, states, monkeypatch):
    """Invalid numbers from peers make planning fail; the hub is unhealthy from then on."""
    swarm.expects_failures = True
    hub = await swarm.hub_up()
    await swarm.peer_up("a")
    failed = asyncio.Event()

    def fail():
        failed.set()
        raise OverflowError("an unforeseen number")

    monkeypatch.setattr(hub.control.plan_upkeep, "settle", fail)
    async with asyncio.timeout(600):
        await failed.wait()
    monkeypatch.undo()
    await swarm.until(lambda: not hub.tasks.healthy()[0], "the hub is unhealthy")
    assert hub.tasks.status()[0] == {"task": "planning", "why": "OverflowError: an unforeseen number"}
    swarm.publish(0, states.first())
    await swarm.live("0.0")


async def test_a_report_that_is_too_long_does_not_end_its_peer(swarm, states, monkeypatch):
    """Engines name themselves and what ails them; a worker on another host may have said it."""
    hub = await swarm.hub_up()
    peer = await swarm.peer_up("a")
    report = peer.reporter._status
    monkeypatch.setattr(
        peer.reporter,
        "_status",
        lambda *stated: replace(report(*stated), engines=[{"name": f"e{n}", "error": "x" * 5000} for n in range(64)]),
    )
    swarm.publish(0, states.first())
    await swarm.live("0.0")
    await swarm.until(
        lambda: hub.fleet.membership.peers[peer.ident.hex()].staged == Version(0, 0), "the hub has heard of it"
    )


async def test_one_renewal_at_a_time(swarm, monkeypatch):
    """Each costs the hub a signature and its ledger on disk."""
    swarm.plaintext = False
    hub = await swarm.hub_up()
    peer = await swarm.peer_up("a")
    begun, go = asyncio.Event(), asyncio.Event()
    renew = hub.state.admission.renew

    async def slow(link, wanted):
        begun.set()
        await go.wait()
        await renew(link, wanted)

    monkeypatch.setattr(hub.state.admission, "renew", slow)
    link = peer.startup.hub_session._link
    asked = messages.Enrol(request(new_key()))
    link.send(asked)
    await begun.wait()
    link.send(asked)
    await swarm.until(lambda: link.closed, "its link has ended")
    go.set()
    assert "ENROL while the one before" in str(link.error)
    await swarm.until(lambda: peer.startup.hub_session.connected, "it is back")


async def test_one_peer_has_only_so_many_squashes_made(swarm, states):
    hub = await swarm.hub_up(squashes=True)
    state = states.first()
    for step in range(8):
        swarm.publish(step, state := states.trained(state, step))
        await swarm.published(f"0.{step}")
    keeping = hub.publishing.anchors_and_squashes
    keeping._next = keeping._wakeup.wait  # type: ignore[method-assign]  # nothing is made while this looks
    promised = [keeping.ask(Version(0, n), b"a" * 16) for n in range(6)]
    others = [keeping.ask(Version(0, n), b"b" * 16) for n in range(6)]
    made = [p for p in promised if p is not None and p.wait_s > 0]
    assert len(made) == limits.MAX_SQUASHES_PER_NODE
    assert all(p is not None for p in others[: limits.MAX_SQUASHES_PER_NODE])
    assert keeping.ask(made[0].base, b"a" * 16) is not None, "a squash on its way is promised to every peer"


async def test_a_frame_of_another_state_ends_its_link_alone(swarm, states):
    """In every state, a message of another purpose ends its connection, and the hub goes on."""
    await swarm.hub_up()
    await swarm.peer_up("a")
    for purpose, role in (("control", "peer"), ("data", "child"), ("publish", "rank")):
        for kind, body in (
            (Type.CELL, {}),
            (Type.SEAL, {}),
            (Type.FREEZE, {"version": None, "round": 0}),
            (Type.JOIN, JOIN),
        ):
            owner = Nobody()
            link = await stolen(swarm, owner, purpose=purpose, role=role)
            data = encode_map(body)
            link.stripes[0].write(2 * (HEADER.pack(len(data), kind, 0, 0) + data))
            assert isinstance(await owner.ended(), RemoteError)
    swarm.publish(0, states.first())
    await swarm.live("0.0")
