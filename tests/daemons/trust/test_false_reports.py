"""A parent that is alive, answers, and withholds sealed artifacts: it delays no peer for long, and is demoted."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from p2pcast.ground.version import Version
from p2pcast.relay.send_schedule import FrameKind
from p2pcast.wire import messages
from p2pcast.wire.messages import Type
from rollout_node.sync import missing_versions

BIG = {"w": ("bfloat16", (400_000,))}
"""Deltas of it have a dozen pieces."""


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr(missing_versions, "WITHHELD_S", 2.0)


async def chain(swarm, states, *names, shapes=BIG):
    """The hub and a chain of peers below it, in this order, at version 0.0."""
    hub = await swarm.hub_up(chains=1)
    peers = await swarm.peers_up(*names)
    state = states.first(shapes=shapes)
    swarm.publish(0, state)
    await swarm.live("0.0")
    for above, below in itertools.pairwise(peers):
        await swarm.until(lambda a=above, b=below: b.relay.parent_failover.parent == a.ident, "the chain stands")
    return hub, peers, state


def lie(liar, withholds) -> None:
    """From now on it drops the messages that ``withholds`` names. It claims that it holds nothing more than it has
    sent, and that pieces that are asked again are on their way.
    """
    down = liar.node.downstream

    def keep_alive(child, now):
        if child.attached:
            child.link.send(messages.Alive([]))

    def cancel(child, artifact, pieces):
        child.link.send(messages.Cancelled(artifact, []))

    def filtered(feeds):
        honest = feeds.next

        def following(stripe):
            while sends := honest(stripe):
                if kept := [send for send in sends if not withholds(send)]:
                    return kept
            return []

        feeds.next = following

    down._keep_alive, down._cancel, down.confirmed = keep_alive, cancel, lambda holding: None
    accept = down.accept

    def accept_and_lie(link):
        accept(link)
        filtered(down.children[link].schedules)

    down.accept = accept_and_lie
    for child in down.children.values():
        filtered(child.schedules)


LIES = {
    "no pieces": lambda send: send.kind is FrameKind.PIECE,
    "nothing but the opening": lambda send: send.kind is not FrameKind.OPEN,
    "never the last piece": lambda send: send.kind is FrameKind.PIECE and send.index == 3,
    "no seal": lambda send: send.kind is FrameKind.SEAL,
}
SAMPLE = "never the last piece"


async def test_a_parent_that_withholds_the_durable_record_delays_no_peer(swarm, states):
    """The hub has said so before the seal has come, and does not say it again."""
    _, (liar, child), state = await chain(swarm, states, "liar", "child")
    lie(liar, lambda send: send.kind is FrameKind.CONFIRM)
    seal, loop = child.node.seal, asyncio.get_running_loop()

    def late(holding, signed):
        entry = child.startup.catalog.get(holding.id)
        if entry is not None and entry.sealed:
            seal(holding, signed)
        else:
            loop.call_later(0.01, late, holding, bytes(signed))

    child.node.seal = late
    swarm.publish(1, states.trained(state, 1, share=1))
    await swarm.live("0.1")
    assert child.sync.missing_versions.withheld == 0


@pytest.mark.parametrize("what", [pytest.param(n, marks=[pytest.mark.prove] * (n != SAMPLE)) for n in LIES])
async def test_a_withheld_version_comes_from_elsewhere_and_the_parent_is_demoted(swarm, states, what):
    hub, (liar, child), state = await chain(swarm, states, "liar", "child")
    lie(liar, LIES[what])
    swarm.publish(1, states.trained(state, 1, share=1))
    await swarm.live("0.1")
    assert child.sync.missing_versions.withheld == 1
    assert what == "no seal" or child.relay.downloader.bytes_received > 0
    ident = liar.ident.hex()
    await swarm.until(lambda: ident in hub.fleet.membership.demoted(time.monotonic()), "the hub blames it")
    await swarm.until(lambda: child.relay.parent_failover.parent == hub.ident, "the child is moved")
    [row] = [row for row in (await swarm.status(hub))["peers"] if row["node"] == ident]
    assert (row["withheld_from"], row["quarantined"]) == (1, False)
    metric = (await swarm.get(child, "/metrics"))[1]
    assert "p2pcast_peer_withheld_versions_total 1.0" in metric


async def test_a_parent_that_aborts_sealed_versions_delays_no_peer(swarm, states, monkeypatch):
    """Each ABORT would undo what came from elsewhere meanwhile, and look like progress."""
    hub, (liar, child), state = await chain(swarm, states, "liar", "child")
    lie(liar, lambda send: send.kind is not FrameKind.OPEN)
    beneath = next(c.link for c in liar.node.downstream.children.values() if c.link.remote == child.ident)
    missing, complained = child.sync.missing_versions, set()
    complain = missing.complain

    def recorded(artifact, live, now):
        complain(artifact, live, now)
        complained.update(parent for _, parent in missing.rows())

    monkeypatch.setattr(missing, "complain", recorded)

    async def call_off() -> None:
        for handle in itertools.count(30_000):
            await asyncio.sleep(0.05)
            for holding in [h for h in liar.node.holdings.values() if h.open.version > Version(0, 0)]:
                if not beneath.closed:
                    beneath.stripes[0].write(
                        beneath.stripes[0].connection.send_signed(Type.OPEN, holding.assembly.open_signed, handle)
                    )
                    beneath.send(messages.Abort(), handle)

    calling = asyncio.create_task(call_off())
    # On a busy machine the OPEN may come so late that the child has pulled the version: this counts against the liar
    # at the third version only.
    for step in range(1, missing_versions.MISSES + 1):
        state = states.trained(state, step, share=1)
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
        if liar.ident in complained or beneath.closed:
            break
    await swarm.until(
        lambda: beneath.closed or liar.ident.hex() in hub.fleet.membership.demoted(time.monotonic()),
        "the hub blames the liar",
    )
    calling.cancel()
    await asyncio.wait([calling])


async def test_a_parent_that_opens_no_version_is_demoted(swarm, states):
    hub, (liar, child), state = await chain(swarm, states, "liar", "child")
    lie(liar, lambda send: True)
    for step in range(1, missing_versions.MISSES + 1):
        state = states.trained(state, step, share=1)
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
    await swarm.until(lambda: liar.ident.hex() in hub.fleet.membership.demoted(time.monotonic()), "the hub blames it")
    await swarm.until(lambda: child.relay.parent_failover.parent == hub.ident, "the child is moved")


async def test_a_parent_that_offers_and_does_not_send_is_not_waited_for(swarm, states):
    """A child that comes late asks its parent for what is small, and gets no answer."""
    _hub, (liar, child), state = await chain(swarm, states, "liar", "child", shapes=states.shapes)
    await swarm.down(child)
    swarm.publish(1, states.trained(state, 1))
    await swarm.live("0.1", liar)
    await swarm.published("0.1")
    lie(liar, lambda send: True)
    child = await swarm.peer_up("child")
    await swarm.until(lambda: child.relay.parent_failover.parent == liar.ident, "it is below the liar again")
    await swarm.live("0.1", child)


async def test_complaints_about_unsealed_artifacts_are_ignored(swarm, states):
    hub, (liar, child), _ = await chain(swarm, states, "parent", "liar", shapes=states.shapes)
    child.sync.missing_versions._complaints[bytes(16)] = (liar.ident, 0.0)
    child.sync.missing_versions._forget = lambda now: None
    child.startup.hub_session.changed()
    ident = child.ident.hex()
    await swarm.until(lambda: hub.fleet.membership.peers[ident].report.lacking is not None, "the hub has heard it")
    assert hub.fleet.membership.withholding._complaints == {}


async def test_a_peer_below_a_withholding_parent_is_not_blamed(swarm, states):
    hub, (liar, middle, _child), state = await chain(swarm, states, "liar", "middle", "child")
    lie(liar, LIES["no pieces"])
    swarm.publish(1, states.trained(state, 1, share=1))
    await swarm.live("0.1")
    await swarm.until(
        lambda: liar.ident.hex() in hub.fleet.membership.demoted(time.monotonic()), "the hub blames the liar"
    )
    held = hub.fleet.membership.withholding
    await swarm.until(lambda: all(c.judged for c in held._complaints.values()), "all that was said is judged")
    assert middle.ident.hex() not in hub.fleet.membership.demoted(time.monotonic())
    assert held.witnesses(middle.ident.hex()) == 0


async def test_a_slow_parent_is_not_blamed(swarm, states, monkeypatch):
    """The parent receives its pieces late and one by one, and forwards each: this counts as progress."""
    monkeypatch.setattr(missing_versions, "WITHHELD_S", 1.0)
    monkeypatch.setattr("rollout_node.sync.stalls.LATE_S", 0.75)  # checks are 0.5 s apart
    hub, (_, child), state = await chain(swarm, states, "slow", "child", shapes={"w": ("bfloat16", (1_000_000,))})
    down, turn = hub.publishing.downstream, []
    burst = down._burst
    monkeypatch.setattr(down, "_burst", lambda child, stripe: turn and turn.pop() and burst(child, stripe))

    async def turns():
        while True:
            await asyncio.sleep(0.2)
            turn[:] = [True]
            for fed in list(down.children.values()):
                down._pump_all(fed)

    swarm.publish(1, states.trained(state, 1, share=1))
    giving = asyncio.create_task(turns())
    await swarm.live("0.1")
    giving.cancel()
    assert child.sync.missing_versions.withheld == 0
    assert hub.fleet.membership.withholding.demoted(time.monotonic()) == frozenset()
