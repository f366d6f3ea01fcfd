"""What a peer remembers of what the hub has said."""

from __future__ import annotations

from p2pcast.version import Version
from rollout_node.catalog import Catalog

X, Y, Z = (bytes([n]) * 16 for n in (1, 2, 3))
LAYOUT = bytes(32)


def entry(artifact: bytes, base, version, *, size: int = 10, state: int = 7, sealed: bool = True, identity: bytes | None = None):
    return [artifact, "anchor" if base is None else "delta", base, version, size, LAYOUT, state, sealed, identity, b""]


def test_only_what_is_sealed_is_a_way():
    catalog = Catalog()
    assert not catalog.complete.is_set()
    assert catalog.update({"artifacts": [entry(X, None, [0, 1]), entry(Y, [0, 1], [0, 2], sealed=False)], "dropped": []}, 1.0)
    assert catalog.complete.is_set()
    assert [(e.base, e.version, e.bytes) for e in catalog.edges().values()] == [(None, Version(0, 1), 10)]
    assert catalog.states() == {Version(0, 1): 7}
    assert catalog.whole() == [(Version(0, 1), (LAYOUT, 7))]
    assert not catalog.update({"artifacts": [entry(Y, [0, 1], [0, 2], size=3, state=8)], "dropped": []}, 2.0)
    assert catalog.edges()[Y].bytes == 3
    assert catalog.states()[Version(0, 2)] == 8


def test_when_it_was_heard_that_an_artifact_is_sealed():
    catalog = Catalog()
    catalog.update({"artifacts": [entry(X, None, [0, 1], sealed=False)], "dropped": []}, 1.0)
    catalog.update({"artifacts": [entry(X, None, [0, 1])], "dropped": []}, 5.0)
    catalog.update({"artifacts": [entry(X, None, [0, 1])], "dropped": []}, 9.0)
    found = catalog.get(X)
    assert found is not None
    assert found.sealed_at == 5.0


def test_hashes_of_sealed_versions_as_far_as_they_have_one():
    catalog = Catalog()
    sealed, unsealed = entry(X, None, [0, 1], identity=LAYOUT), entry(Y, [0, 1], [0, 2], sealed=False, identity=LAYOUT)
    catalog.update({"artifacts": [sealed, unsealed, entry(Z, [0, 1], [0, 3])], "dropped": []}, 1.0)
    assert catalog.identities() == {Version(0, 1): LAYOUT}


def test_what_was_dropped_is_gone():
    catalog = Catalog()
    catalog.update({"artifacts": [entry(X, None, [0, 1]), entry(Y, [0, 1], [0, 2])], "dropped": []}, 1.0)
    assert not catalog.update({"artifacts": [], "dropped": [X, Z]}, 2.0)
    assert catalog.get(X) is None
    assert list(catalog.edges()) == [Y]


def test_after_a_welcome_the_list_is_the_whole_truth():
    catalog = Catalog()
    catalog.update({"artifacts": [entry(X, None, [0, 1]), entry(Y, [0, 1], [0, 2])], "dropped": []}, 1.0)
    catalog.begin()
    assert catalog.get(X) is not None  # until the list is there
    assert catalog.update({"artifacts": [entry(Y, [0, 1], [0, 2]), entry(Z, None, [0, 2])], "dropped": []}, 2.0)
    assert catalog.get(X) is None
    assert catalog.edges().keys() == {Y, Z}
    assert catalog.get(Y).sealed_at == 1.0
    assert not catalog.update({"artifacts": [], "dropped": []}, 3.0)
