"""Artifacts in the store: added, announced, and removed unless a peer needs them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from parts import Announcer, Background, Encoder

from p2pcast.ground.version import Version
from p2pcast.store.retention import RetentionCounts
from p2pcast.wire.messages import Catalog
from trainer_node.publish.artifact_announcer import ArtifactAnnouncer
from trainer_node.publish.sealed_artifacts import SealedArtifacts

V = Version


@pytest.fixture
def shelf(encoder: Encoder, background: Background) -> SimpleNamespace:
    """``staged``: versions that peers have; ``children``: artifacts being sent to them."""
    found = SimpleNamespace(staged=[], children=[], announcer=Announcer(), changes=[])
    found.artifacts = SealedArtifacts(
        encoder.node, encoder.store, encoder.staging, found.announcer,
        staged=lambda: found.staged, children=lambda: found.children,
        store_changed=lambda: found.changes.append(1), later=background,
    )  # fmt: skip
    return found


async def three(encoder: Encoder) -> dict[int, bytes]:
    """Three versions; step → artifact."""
    for step in range(3):
        await encoder.publish(step)
    return {s.version.step: s.id for s in encoder.store.artifacts.values()}


async def test_artifacts_on_the_way_of_a_peer_are_needed(encoder: Encoder, shelf) -> None:
    found = await three(encoder)
    shelf.staged = [V(0, 1), V(0, 2)]
    assert shelf.artifacts.needed() == {found[2]}
    shelf.staged = [None]
    assert shelf.artifacts.needed() == set(found.values())


async def test_artifacts_that_are_being_sent_are_needed(encoder: Encoder, shelf) -> None:
    found = await three(encoder)
    feed = SimpleNamespace(artifact=SimpleNamespace(id=found[1]))
    shelf.children = [SimpleNamespace(schedules=[feed])]
    assert shelf.artifacts.needed() == {found[1]}


async def test_retention_withdraws_removed_artifacts(encoder: Encoder, shelf) -> None:
    found = await three(encoder)
    await encoder.publish(3, shape=(3, 5))
    encoder.store._counts = RetentionCounts(1, 1)
    shelf.staged = [V(0, 3)]
    await shelf.artifacts.retain()
    removed = set(shelf.announcer.withdrawn)
    assert removed
    assert removed <= set(found.values())
    assert not removed & encoder.node.holdings.keys()
    assert shelf.changes == [1]
    await shelf.artifacts.retain()
    assert len(shelf.announcer.withdrawn) == len(removed)


async def test_an_artifact_made_beside_traffic_is_announced(encoder: Encoder, shelf, background) -> None:
    found = await three(encoder)
    stored = encoder.store.artifacts[found[2]]
    encoder.node.forget(stored.id)
    shelf.artifacts.add(stored)
    assert shelf.announcer.announced == [(V(0, 2), True)]
    assert background.names[-1] == "retention after 0.2"
    await background.settle()
    assert stored.id in encoder.node.holdings


async def test_a_catalog_lists_sealed_artifacts_and_a_withdrawal_forgets_sources(encoder: Encoder) -> None:
    found = await three(encoder)
    sent, gone = [], []
    sources = SimpleNamespace(gone=gone.append)
    announcer = ArtifactAnnouncer(encoder.store.artifacts.__contains__, sources, sent.append)
    announcer.announce([])
    assert sent == []
    announcer.announce(encoder.node.holdings.values())
    rows = {row.version.step: row for row in sent[0].artifacts}
    assert [rows[step].base for step in range(3)] == [None, (0, 0), (0, 1)]
    assert all(row.sealed for row in rows.values())
    assert rows[2].durable != b""
    unsealed = ArtifactAnnouncer(lambda artifact: False, sources, sent.append)
    assert {row.durable for row in unsealed.catalog(encoder.node.holdings.values()).artifacts} == {b""}
    announcer.withdraw([found[1]])
    assert gone == [found[1]]
    assert sent[-1] == Catalog([], [found[1]])
