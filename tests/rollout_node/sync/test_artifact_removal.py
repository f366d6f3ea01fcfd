from __future__ import annotations

from fake_holding import FakeHolding, FakeNode
from recorder import Background, Recorder, blocking

from rollout_node.sync.artifact_removal import ArtifactRemoval


class Peer:
    def __init__(self) -> None:
        self.node, self.store, self.background = FakeNode(), Recorder(), Background()
        self.removal = ArtifactRemoval(self.node, self.store, blocking, self.background)


async def test_the_log_of_an_aborted_artifact_is_removed_in_the_background():
    peer, version, excerpt = Peer(), FakeHolding(0, 1), FakeHolding(1, 2, excerpt=True)
    peer.removal.remove_aborted(version)
    peer.removal.remove_aborted(excerpt)
    assert peer.store.calls == []
    assert await peer.background.run() == ["abandon 0.1", "end 0.2"]
    assert peer.store.named("abandon") == [(version.log, version.id)]
    assert peer.store.named("end_excerpt") == [(excerpt.log, excerpt.id)]


async def test_an_artifact_that_is_given_up_leaves_the_node_at_once():
    peer, holding = Peer(), FakeHolding(0, 1)
    peer.removal.give_up(holding)
    assert peer.node.named("give_up") == [holding]
    assert await peer.background.run() == ["give up 0.1"]
    assert peer.store.named("abandon") == [(holding.log, holding.id)]


async def test_an_excerpt_ends_in_node_and_store():
    peer, holding = Peer(), FakeHolding(0, 1, excerpt=True)
    await peer.removal.end_excerpt(holding)
    assert peer.node.named("give_up") == [holding]
    assert peer.store.named("end_excerpt") == [(holding.log, holding.id)]


async def test_a_damaged_artifact_leaves_node_and_store():
    peer = Peer()
    await peer.removal.discard(b"a")
    await peer.removal.discard(b"b", contradicted=True)
    assert peer.node.named("forget") == [b"a", b"b"]
    assert [(args, options) for _, args, options in peer.store.calls] == [
        ((b"a",), {"contradicted": False}),
        ((b"b",), {"contradicted": True}),
    ]
