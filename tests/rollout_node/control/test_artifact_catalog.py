"""A peer's memory of the hub's artifact lists."""

from __future__ import annotations

from p2pcast.ground.version import Version
from p2pcast.wire import messages
from rollout_node.control.artifact_catalog import ArtifactCatalog

X, Y, Z = (bytes([n]) * 16 for n in (1, 2, 3))
LAYOUT = bytes(32)


def entry(
    artifact: bytes,
    base,
    version,
    *,
    size: int = 10,
    state: int = 7,
    sealed: bool = True,
    identity: bytes | None = None,
):
    kind = "anchor" if base is None else "delta"
    return messages.Listed(artifact, kind, base, version, size, LAYOUT, state, sealed, identity, b"")


def test_only_sealed_artifacts_are_edges():
    catalog = ArtifactCatalog()
    assert not catalog.complete.is_set()
    assert catalog.update(
        messages.Catalog([entry(X, None, Version(0, 1)), entry(Y, Version(0, 1), Version(0, 2), sealed=False)], []), 1.0
    )
    assert catalog.complete.is_set()
    assert [(e.base, e.version, e.bytes) for e in catalog.edges().values()] == [(None, Version(0, 1), 10)]
    assert catalog.states() == {Version(0, 1): 7}
    assert catalog.whole() == [(Version(0, 1), (LAYOUT, 7))]
    assert not catalog.update(messages.Catalog([entry(Y, Version(0, 1), Version(0, 2), size=3, state=8)], []), 2.0)
    assert catalog.edges()[Y].bytes == 3
    assert catalog.states()[Version(0, 2)] == 8


def test_the_catalog_notes_when_an_artifact_was_sealed():
    catalog = ArtifactCatalog()
    catalog.update(messages.Catalog([entry(X, None, Version(0, 1), sealed=False)], []), 1.0)
    catalog.update(messages.Catalog([entry(X, None, Version(0, 1))], []), 5.0)
    catalog.update(messages.Catalog([entry(X, None, Version(0, 1))], []), 9.0)
    found = catalog.get(X)
    assert found is not None
    assert found.sealed_at == 5.0


def test_sealed_versions_with_a_hash_are_listed():
    catalog = ArtifactCatalog()
    sealed, unsealed = (
        entry(X, None, Version(0, 1), identity=LAYOUT),
        entry(Y, Version(0, 1), Version(0, 2), sealed=False, identity=LAYOUT),
    )
    catalog.update(messages.Catalog([sealed, unsealed, entry(Z, Version(0, 1), Version(0, 3))], []), 1.0)
    assert catalog.identities() == {Version(0, 1): LAYOUT}


def test_dropped_artifacts_are_removed():
    catalog = ArtifactCatalog()
    catalog.update(messages.Catalog([entry(X, None, Version(0, 1)), entry(Y, Version(0, 1), Version(0, 2))], []), 1.0)
    assert not catalog.update(messages.Catalog([], [X, Z]), 2.0)
    assert catalog.get(X) is None
    assert list(catalog.edges()) == [Y]


def test_after_a_welcome_the_list_is_the_whole_truth():
    catalog = ArtifactCatalog()
    catalog.update(messages.Catalog([entry(X, None, Version(0, 1)), entry(Y, Version(0, 1), Version(0, 2))], []), 1.0)
    catalog.begin()
    assert catalog.get(X) is not None  # until the list is there
    assert catalog.update(
        messages.Catalog([entry(Y, Version(0, 1), Version(0, 2)), entry(Z, None, Version(0, 2))], []), 2.0
    )
    assert catalog.get(X) is None
    assert catalog.edges().keys() == {Y, Z}
    assert catalog.get(Y).sealed_at == 1.0
    assert not catalog.update(messages.Catalog([], []), 3.0)
