"""Artifacts in reports: held, lacking, corrupt, and wrong on the mirror."""

from __future__ import annotations

from parts import emitted, ident, node
from recorded_fleet import REPORT, Fleet

from p2pcast.wire.messages import Type


async def test_only_artifacts_of_the_run_are_remembered(fleet: Fleet) -> None:
    link = fleet.join("a")
    link.hears(Type.REPORT, **REPORT | {"held": [b"artifact", b"foreign"]})
    assert fleet.sources._held[ident("a")] == {b"artifact"}
    link.hears(Type.REPORT, **REPORT | {"dropped": [b"artifact"]})
    assert fleet.sources._held[ident("a")] == set()


async def test_missing_artifacts_count_only_once_sealed(fleet: Fleet) -> None:
    link, lacking = fleet.join("a"), []
    fleet.membership.note_lacking = lambda witness, rows, now: lacking.append(list(rows))  # type: ignore[method-assign]
    link.hears(Type.REPORT, **REPORT | {"lacking": [[b"sealed", node("b")], [b"sealed", None], [b"other", node("b")]]})
    assert lacking == [[(b"sealed", ident("b")), (b"sealed", None)]]


async def test_evictions_wrong_objects_and_garbage_are_passed_on(fleet: Fleet) -> None:
    first, link = fleet.join("b"), fleet.join("a")
    link.hears(Type.REPORT, **REPORT | {"evicted": [b"signed"], "spoilt": ["ready/1"], "garbled": [[node("b"), 30]]})
    assert fleet.trust.learnt == [b"signed"]
    assert fleet.wrong == ["ready/1"]
    assert [e["peer"] for e in emitted(fleet.events, "garbled")] == ["b"]
    assert not first.closed
