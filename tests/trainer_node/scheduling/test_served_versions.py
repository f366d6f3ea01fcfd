"""The version that an engine is taken to serve."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.version import Version
from trainer_node.scheduling.served_versions import Believed, KnownEngine, believed

OLD, NEW, FORK = Version(0, 3), Version(0, 4), Version(1, 3)
versions = st.builds(Version, st.integers(0, 2), st.integers(0, 5))
maybe = st.none() | versions


def test_an_engine_that_the_hub_does_not_know_counts_as_stated() -> None:
    assert believed(NEW, None, None) == Believed(NEW, None, True)
    assert believed(OLD, NEW, None) == Believed(OLD, NEW, True)


def test_the_older_of_two_versions_counts() -> None:
    assert believed(NEW, None, KnownEngine(OLD, NEW)) == Believed(OLD, None, False)
    assert believed(OLD, NEW, KnownEngine(NEW, NEW)) == Believed(OLD, NEW, False)
    assert believed(FORK, FORK, KnownEngine(NEW, FORK)) == Believed(NEW, FORK, False)


def test_equal_versions_agree() -> None:
    assert believed(NEW, NEW, KnownEngine(NEW, OLD)) == Believed(NEW, OLD, True)


def test_an_engine_without_weights_serves_nothing() -> None:
    assert believed(NEW, NEW, KnownEngine(None, None)) == Believed(None, None, False)


@given(versions, maybe, st.none() | st.builds(KnownEngine, maybe, maybe))
def test_no_statement_makes_an_engine_newer(served: Version, staged: Version | None, known: KnownEngine | None) -> None:
    found = believed(served, staged, known)
    limits = [served] if known is None else [served, *([] if known.served is None else [known.served])]
    assert found.served is None or (found.served in limits and all(found.served <= one for one in limits))
    assert (found.served is None) == (known is not None and known.served is None)
    assert found.agreed == (known is None or known.served == served)
    if found.staged is not None:
        assert staged is not None
        assert found.staged <= staged
        assert known is None or (known.staged is not None and found.staged <= known.staged)
