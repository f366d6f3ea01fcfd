"""A parent that lives, answers, and does not send what the hub has sealed: it holds nobody up for long, and loses its place."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from p2pcast.relay.feed import Do
from p2pcast.version import Version
from p2pcast.wire.messages import Type
from rollout_node import lacking

BIG = {"w": ("bfloat16", (400_000,))}
"""Deltas of it have a dozen pieces."""


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr(lacking, "WITHHELD_S", 2.0)


async def chain(swarm, states, *names, shapes=BIG):
    """The hub and a chain of peers below it, in this order, at version 0.0."""
    hub = await swarm.hub_up(chains=1)
    peers = await swarm.peers_up(*names)
    state = states.first(shapes=shapes)
    swarm.publish(0, state)
    await swarm.live("0.0")
    for above, below in itertools.pairwise(peers):
        await swarm.until(lambda a=above, b=below: b.attachment.parent == a.ident, "the chain stands")
    return hub, peers, state


def lie(liar, withholds) -> None:
    """From now on it drops what ``withholds`` says, claims that it holds nothing more than it has sent, and that what is asked back is on its way."""
    down = liar.downstream

    def keep_alive(child, now):
        if child.attached:
            child.link.send(Type.ALIVE, {"high": []})

    def recall(child, artifact, pieces):
        child.link.send(Type.UNSENT, {"artifact": artifact, "pieces": []})

    def filtered(feeds):
        honest = feeds.next

        def following(stripe):
            while sends := honest(stripe):
                if kept := [send for send in sends if not withholds(send)]:
                    return kept
            return []

        feeds.next = following

    down._keep_alive, down._recall, down.confirmed = keep_alive, recall, lambda holding: None
    accept = down.accept

    def accept_and_lie(link):
        accept(link)
        filtered(down.children[link].feeds)

    down.accept = accept_and_lie
    for child in down.children.values():
        filtered(child.feeds)


LIES = {
    "no pieces": lambda send: send.what is Do.PIECE,
    "nothing but the opening": lambda send: send.what is not Do.OPEN,
    "never the last piece": lambda send: send.what is Do.PIECE and send.index == 3,
    "no seal": lambda send: send.what is Do.SEAL,
}


async def test_a_parent_that_keeps_the_durable_record_to_itself_holds_up_nobody(swarm, states):
    """The hub has said so before the seal has come, and does not say it again."""
    _, (liar, child), state = await chain(swarm, states, "liar", "child")
    lie(liar, lambda send: send.what is Do.CONFIRM)
    seal, loop = child.node.seal, asyncio.get_running_loop()

    def late(holding, signed):
        entry = child.catalog.get(holding.id)
        if entry is not None and entry.sealed:
            seal(holding, signed)
        else:
            loop.call_later(0.01, late, holding, bytes(signed))

    child.node.seal = late
    swarm.publish(1, states.trained(state, 1, share=1))
    await swarm.live("0.1")
    assert child.lacking.withheld == 0


@pytest.mark.parametrize("what", LIES)
async def test_what_a_parent_withholds_comes_from_elsewhere_and_it_loses_its_place(swarm, states, what):
    hub, (liar, child), state = await chain(swarm, states, "liar", "child")
    lie(liar, LIES[what])
    swarm.publish(1, states.trained(state, 1, share=1))
    await swarm.live("0.1")
    assert child.lacking.withheld == 1
    assert what == "no seal" or child.pulling.bytes_received > 0
    ident = liar.ident.hex()
    await swarm.until(lambda: ident in hub.membership.muted(time.monotonic()), "the hub blames it")
    await swarm.until(lambda: child.attachment.parent == hub.ident, "the child is moved")
    [row] = [row for row in (await swarm.status(hub))["peers"] if row["node"] == ident]
    assert (row["withheld_from"], row["quarantined"]) == (1, False)
    metric = (await swarm.get(child, "/metrics"))[1]
    assert "p2pcast_peer_withheld_versions_total 1.0" in metric


async def test_a_parent_that_calls_off_what_the_hub_has_sealed_holds_up_nobody(swarm, states):
    """Each ABORT would undo what came from elsewhere meanwhile, and look like progress."""
    hub, (liar, child), state = await chain(swarm, states, "liar", "child")
    lie(liar, lambda send: send.what is not Do.OPEN)
    beneath = next(c.link for c in liar.downstream.children.values() if c.link.remote == child.ident)

    async def call_off() -> None:
        for handle in itertools.count(30_000):
            await asyncio.sleep(0.05)
            for holding in [h for h in liar.node.holdings.values() if h.open.version == Version(0, 1)]:
                if not beneath.closed:
                    beneath.stripes[0].write(
                        beneath.stripes[0].connection.send_signed(Type.OPEN, holding.assembly.open_signed, handle)
                    )
                    beneath.send(Type.ABORT, {}, handle)

    calling = asyncio.create_task(call_off())
    swarm.publish(1, states.trained(state, 1, share=1))
    await swarm.live("0.1")
    await swarm.until(lambda: liar.ident.hex() in hub.membership.muted(time.monotonic()), "the hub blames it")
    calling.cancel()
    await asyncio.wait([calling])


async def test_a_parent_that_opens_nothing_loses_its_place(swarm, states):
    hub, (liar, child), state = await chain(swarm, states, "liar", "child")
    lie(liar, lambda send: True)
    for step in range(1, lacking.MISSES + 1):
        state = states.trained(state, step, share=1)
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
    await swarm.until(lambda: liar.ident.hex() in hub.membership.muted(time.monotonic()), "the hub blames it")
    await swarm.until(lambda: child.attachment.parent == hub.ident, "the child is moved")


async def test_a_parent_that_offers_what_it_does_not_send_is_not_waited_for(swarm, states):
    """A child that comes late asks its parent for what is small, and gets no answer."""
    _hub, (liar, child), state = await chain(swarm, states, "liar", "child", shapes=states.shapes)
    await swarm.down(child)
    swarm.publish(1, states.trained(state, 1))
    await swarm.live("0.1", liar)
    await swarm.published("0.1")
    lie(liar, lambda send: True)
    child = await swarm.peer_up("child")
    await swarm.until(lambda: child.attachment.parent == liar.ident, "it is below the liar again")
    await swarm.live("0.1", child)


async def test_what_was_never_sealed_can_not_be_complained_of(swarm, states):
    hub, (liar, child), _ = await chain(swarm, states, "parent", "liar", shapes=states.shapes)
    child.lacking._rows[bytes(16)] = (liar.ident, 0.0)
    child.lacking._forget = lambda now: None
    child.control.changed()
    ident = child.ident.hex()
    await swarm.until(lambda: "lacking" in hub.membership.peers[ident].report, "the hub has heard it")
    assert hub.membership.withholding._complaints == {}


async def test_who_stands_between_a_liar_and_those_that_wait_is_not_blamed(swarm, states):
    hub, (liar, middle, _child), state = await chain(swarm, states, "liar", "middle", "child")
    lie(liar, LIES["no pieces"])
    swarm.publish(1, states.trained(state, 1, share=1))
    await swarm.live("0.1")
    await swarm.until(lambda: liar.ident.hex() in hub.membership.muted(time.monotonic()), "the hub blames the liar")
    held = hub.membership.withholding
    await swarm.until(lambda: all(c.judged for c in held._complaints.values()), "all that was said is judged")
    assert middle.ident.hex() not in hub.membership.muted(time.monotonic())
    assert held.witnesses(middle.ident.hex()) == 0


async def test_a_parent_that_is_slow_is_left_in_peace(swarm, states, monkeypatch):
    """It gets its pieces late, one after the other, and passes each on: that is progress."""
    monkeypatch.setattr(lacking, "WITHHELD_S", 1.0)
    hub, (slow, child), state = await chain(swarm, states, "slow", "child")
    for link in [c.link for c in hub.downstream.children.values() if c.link.remote == slow.ident]:
        for stripe in link.stripes.values():
            stripe.pace(100_000)
    swarm.publish(1, states.trained(state, 1, share=1))
    await swarm.live("0.1")
    assert child.lacking.withheld == 0
    assert hub.membership.withholding.muted(time.monotonic()) == frozenset()
