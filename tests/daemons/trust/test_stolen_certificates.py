"""A stolen peer as a parent: it cannot change the weights."""

from __future__ import annotations

import secrets

import p2pcast.artifact.assembly as assembly
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import DELTA, Open
from p2pcast.ground import limits
from p2pcast.ground.version import Version
from p2pcast.wire.messages import Type


async def chain(swarm, states):
    """The hub, ``thief`` below it, ``child`` below that, at version 0.0."""
    swarm.plaintext = False
    hub = await swarm.hub_up(chains=1)
    thief, child = await swarm.peers_up("thief", "child")
    state = states.first()
    swarm.publish(0, state)
    await swarm.live("0.0")
    await swarm.until(lambda: child.relay.parent_failover.parent == thief.ident, "the child hangs below the thief")
    return hub, thief, child, state


async def test_a_parent_that_makes_its_own_versions_is_left(swarm, states, monkeypatch):
    """The thief has a certificate, a child and the run's public records, but not the run's key."""
    hub, thief, child, state = await chain(swarm, states)
    forger, (layout,) = RunKey.generate(), thief.node.layouts.values()
    record = Open(
        secrets.token_bytes(16),
        Version(0, 0),
        DELTA,
        layout.layout_id,
        limits.PIECE_BYTES,
        hub.token.run,
        Version(0, 9),
    )
    # The thief's own daemon is in its hands: there the forger's key passes for the run's.
    run_id = assembly.run_id
    monkeypatch.setattr(assembly, "run_id", lambda public: hub.token.run if public == forger.public else run_id(public))
    thief.node.run_key = forger.public
    thief.node.open(record.to_signed(forger), None, thief.relay.store.begin(record, layout))
    await swarm.until(lambda: child.relay.parent_failover.parent == hub.ident, "the child is with the hub")
    assert record.artifact in thief.node.holdings
    assert record.artifact not in child.node.holdings
    swarm.publish(1, states.trained(state, 1))
    await swarm.live("0.1", child)
    assert child.staged == Version(0, 1)


async def test_replayed_old_versions_move_no_engine(swarm, states):
    """Old artifacts are signed correctly, but no engine goes back to them, and the run continues."""
    _, thief, child, state = await chain(swarm, states)
    for step in (1, 2):
        swarm.publish(step, states.trained(state, step))
        await swarm.live(f"0.{step}")
    seen: list[Version | None] = []
    moved = child.engine.engines.on_staged
    child.engine.engines.on_staged = lambda version: (seen.append(version), moved(version))
    old = [s for s in thief.relay.store.artifacts.values() if s.version < Version(0, 2)]
    assert old
    for stored in old:
        thief.node.add_stored(stored.assembly, thief.relay.store.open_log(stored), push=True)
    swarm.publish(3, states.trained(state, 3))
    await swarm.live("0.3", child)
    assert seen == [Version(0, 3)]
    assert [r.committed for r in child.runners] == [Version(0, 3)]


async def test_unlisted_artifacts_of_a_parent_are_bounded(swarm, states):
    """A long run has any number of signed records, and the hub no longer confirms artifacts removed by retention."""
    hub, thief, child, state = await chain(swarm, states)
    state = states.trained(state, 1)
    swarm.publish(1000, state)
    await swarm.live("0.1000")
    (layout,) = thief.node.layouts.values()
    link = next(c.link for c in thief.node.downstream.children.values() if c.link.remote == child.ident)
    stripe, most = link.stripes[0], 4 * limits.MAX_UNLISTED
    for number in range(1, most + 1):
        ident, version = secrets.token_bytes(16), Version(0, number)
        old = Open(ident, Version(0, 0), DELTA, layout.layout_id, limits.PIECE_BYTES, hub.token.run, version)
        stripe.write(stripe.connection.send_signed(Type.OPEN, old.to_signed(hub.state.key), 30_000 + number))
    await swarm.until(
        lambda: Version(0, most) in {h.open.version for h in child.node.holdings.values()}, "all have been heard"
    )
    await swarm.until(
        lambda: len(list((swarm.folder / "child" / "partial").iterdir())) <= limits.MAX_UNLISTED, "most are gone"
    )
    assert len(child.node.holdings) <= limits.MAX_UNLISTED + 2
    assert not link.closed
    swarm.publish(1001, states.trained(state, 2))
    await swarm.live("0.1001", child)


async def test_an_unlisted_artifact_is_not_waited_for(swarm, states):
    """A squash that came to nothing, signed and shorter than the deltas beside it, opened and never sent."""
    hub, thief, child, state = await chain(swarm, states)
    (layout,) = thief.node.layouts.values()
    link = next(c.link for c in thief.node.downstream.children.values() if c.link.remote == child.ident)
    old = Open(
        secrets.token_bytes(16),
        Version(0, 0),
        DELTA,
        layout.layout_id,
        limits.PIECE_BYTES,
        hub.token.run,
        Version(0, 2),
    )
    link.stripes[0].write(link.stripes[0].connection.send_signed(Type.OPEN, old.to_signed(hub.state.key), 30_000))
    await swarm.until(lambda: old.artifact in child.node.holdings, "the child has heard of it")
    for step in (1, 2):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
