"""The hub's durable record passes down the chain, whenever it comes and whichever node dies meanwhile."""

from __future__ import annotations

import pytest
from chain_members import MEGABYTES, Swarm

from p2pcast.artifact.signed_records import OWN
from p2pcast.ground.errors import IntegrityError


def whole(member, made) -> bool:
    holding = member.node.holdings.get(made.id)
    return holding is not None and holding.artifact.complete


def confirmed(member, made) -> bool:
    holding = member.node.holdings.get(made.id)
    return holding is not None and holding.confirmed


@pytest.mark.parametrize("stripes", [1, 3])
def test_a_complete_version_is_confirmed_only_by_the_hubs_record(swarm, maker, stripes):
    made = maker.make(MEGABYTES, version_hash=OWN)

    async def play(swarm: Swarm) -> None:
        members = await swarm.chain(4)
        holding = await members[0].publish(made)
        await swarm.until(lambda: all(whole(m, made) for m in members))
        assert not any(confirmed(m, made) for m in members)
        members[0].node.confirm(holding, made.durable)
        await swarm.until(lambda: all(confirmed(m, made) for m in members))
        late = await swarm.add(members[-1])
        late.node.add_layout(maker.layout)
        await swarm.until(lambda: confirmed(late, made))

    swarm(play, stripes=stripes)


def test_a_child_without_confirmation_asks_its_next_parent(swarm, maker):
    """1 → 2 → 3: node 2 dies between seal and confirmation, node 3 gets the record from node 1."""
    made = maker.make(MEGABYTES, version_hash=OWN)

    async def play(swarm: Swarm) -> None:
        first, second, third = await swarm.chain(3)
        holding = await first.publish(made)
        await swarm.until(lambda: whole(third, made))
        await second.stop()
        first.node.confirm(holding, made.durable)
        await swarm.until(lambda: confirmed(third, made))
        assert third.sent_twice == 0

    swarm(play)


def test_a_confirmation_needs_the_runs_key_and_the_right_manifest(maker):
    made = maker.make([1000], version_hash=OWN)
    other = maker.make([1000], version_hash=OWN, seed=1)
    assembly = maker.artifact(made, sealed=False).assembly
    with pytest.raises(IntegrityError, match="received before the manifest"):
        assembly.add_durable(made.durable)
    assembly.add_manifest(made.manifest)
    assert not assembly.confirmed
    with pytest.raises(IntegrityError, match="artifact"):
        assembly.add_durable(other.durable)
    with pytest.raises(IntegrityError, match="signature"):
        assembly.add_durable(made.durable[:-1] + bytes([made.durable[-1] ^ 1]))
    assembly.add_durable(made.durable)
    assert assembly.confirmed
