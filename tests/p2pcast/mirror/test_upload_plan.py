"""Uploads and removals over histories with branches, squashes, crashes and wrong listings: a newcomer always finds a
path, and the plan ends.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.limits import KIB, MIB
from p2pcast.ground.version import Version
from p2pcast.mirror.object_names import (
    SLICE_BYTES,
    ListedObject,
    ReadyMarker,
    slice_bytes,
    slice_name,
    slice_of,
    slices,
    tail_name,
)
from p2pcast.mirror.upload_plan import LEFT_OVER_S, Inventory, head, removals, spans, uploads
from p2pcast.relay.artifact_path import Edge
from p2pcast.store.retention import RetentionCounts, expendable


def ident(number: int) -> bytes:
    return number.to_bytes(16, "big")


def edge(number: int, base: int | None, step: int, size: int = 1000) -> Edge:
    return Edge(ident(number), None if base is None else Version(0, base), Version(0, step), size)


def here(*edges: Edge) -> dict[bytes, Edge]:
    return {e.artifact: e for e in edges}


class Bucket:
    """Does what the plan says, one object at a time, until told to stop."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[int, float]] = {}
        self.now_s = 0.0
        self.writes: list[str] = []

    def listing(self) -> list[ListedObject]:
        return [ListedObject(name, size, when) for name, (size, when) in self.objects.items()]

    def put(self, name: str, size: int) -> None:
        self.now_s += 1
        self.objects[name] = (size, self.now_s)
        self.writes.append(name)

    def work(self, store: dict[bytes, Edge], steps: int = 10_000) -> bool:
        """True when no work was left; the work always ends."""
        mirror = Inventory.of(self.listing())
        for _ in range(steps):
            if lacking := uploads(store, mirror):
                first = lacking[0]
                if missing := mirror.missing(first):
                    self.put(slice_name(first.artifact, missing[0]), slice_bytes(first.bytes, missing[0]))
                    mirror.wrote_slice(first.artifact, missing[0], slice_bytes(first.bytes, missing[0]))
                elif first.artifact not in mirror.tails:
                    self.put(tail_name(first.artifact), 100)
                    mirror.wrote_tail(first.artifact)
                else:
                    marker = ReadyMarker(first.version, first.base, first.artifact)
                    self.put(str(marker), 100)
                    mirror.wrote_marker(marker)
            elif names := removals(store, mirror)[:1]:
                self.objects.pop(names[0])
                mirror.gone(names)
            else:
                return True
        return False

    def check(self) -> set[bytes]:
        """Check that every artifact with a marker is complete; return their ids."""
        ready = {m.id for name in self.objects if (m := ReadyMarker.parse(name)) is not None}
        for artifact in ready:
            assert tail_name(artifact) in self.objects
            assert any((s := slice_of(name)) is not None and s[0] == artifact for name in self.objects)
        return ready


def test_the_path_to_the_newest_version_is_uploaded_first() -> None:
    store = here(
        edge(0, None, 0, 100_000),
        edge(50, None, 50, 100_000),
        *(edge(n, n - 1, n) for n in range(1, 50)),
        edge(51, 50, 51),
    )
    assert [e.version.step for e in uploads(store, Inventory())][:4] == [50, 51, 49, 48]


def test_an_existing_path_is_extended_if_that_takes_fewer_bytes() -> None:
    store = here(edge(0, None, 0, 100_000), *(edge(n, n - 1, n) for n in range(1, 9)), edge(100, None, 8, 100_000))
    mirror = Inventory()
    for number in (0, 1, 2):
        mirror.wrote_slice(ident(number), 0, store[ident(number)].bytes)
        mirror.wrote_tail(ident(number))
        mirror.wrote_marker(ReadyMarker(store[ident(number)].version, store[ident(number)].base, ident(number)))
    assert head(store, mirror) == Version(0, 2)
    assert [e.version.step for e in uploads(store, mirror)] == [3, 4, 5, 6, 7, 8, 8]


def test_a_squash_is_uploaded_before_its_deltas() -> None:
    store = here(edge(0, None, 0), *(edge(n, n - 1, n, 1000) for n in range(1, 9)), edge(100, 0, 8, 2000))
    assert [e.artifact for e in uploads(store, Inventory())][:2] == [ident(0), ident(100)]


def test_a_partial_upload_is_resumed() -> None:
    size = 3 * SLICE_BYTES + 5
    store, bucket = here(edge(0, None, 0, size)), Bucket()
    bucket.work(store, steps=2)
    assert bucket.work(store)
    assert len(bucket.writes) == len(set(bucket.writes)) == slices(size) + 2


def test_a_slice_that_was_cut_short_is_sent_again() -> None:
    store, bucket = here(edge(0, None, 0, 2 * SLICE_BYTES)), Bucket()
    assert bucket.work(store)
    bucket.objects[slice_name(ident(0), 1)] = (SLICE_BYTES - 1, 0.0)
    assert bucket.work(store)
    assert bucket.objects[slice_name(ident(0), 1)][0] == SLICE_BYTES


def test_a_marker_goes_before_its_parts() -> None:
    store = here(edge(0, None, 0), *(edge(n, n - 1, n) for n in range(1, 130)))
    bucket = Bucket()
    assert bucket.work(store)
    store |= here(edge(200, None, 129))
    bucket.work(store, steps=3)
    mirror = Inventory.of(bucket.listing())
    names = removals(store, mirror)
    assert ReadyMarker.parse(names[0]) is not None
    assert names.index(tail_name(ident(1))) > names.index(str(mirror.markers[ident(1)]))


def test_leftovers_are_removed_by_age_on_the_stores_clock() -> None:
    parts = [ListedObject(slice_name(ident(9), 0), 5, 1000.0), ListedObject(tail_name(ident(9)), 5, 1000.0)]
    newer = ListedObject(str(ReadyMarker(Version(0, 1), None, ident(1))), 5, 1000.0 + LEFT_OVER_S)
    assert removals({}, Inventory.of([*parts, newer])) == []
    newest = ListedObject("key", 5, 1001.0 + LEFT_OVER_S)
    assert removals({}, Inventory.of([*parts, newer, newest])) == [tail_name(ident(9)), slice_name(ident(9), 0)]


def test_foreign_objects_are_left_alone() -> None:
    likely = [f"{tail_name(ident(9))}.bak", f"{slice_name(ident(9), 0)}~"]
    strange = [ListedObject(name, 5, 0.0) for name in ("notes.txt", "log/x", "ready/x", *likely)] + [
        ListedObject("key", 32, 1e9)
    ]
    assert removals({}, Inventory.of(strange)) == []


@st.composite
def histories(draw: st.DrawFn) -> list[Edge]:
    """A hub's artifacts, in order: a chain with anchors and squashes."""
    made = [edge(0, None, 0, draw(st.integers(1, 5000)))]
    for step in range(1, draw(st.integers(1, 30))):
        made.append(edge(len(made), step - 1, step, draw(st.integers(1, 500))))
        if draw(st.integers(0, 5)) == 0:
            made.append(edge(len(made), None, step, draw(st.integers(1, 5000))))
        if step > 3 and draw(st.integers(0, 5)) == 0:
            made.append(edge(len(made), step - 3, step, draw(st.integers(1, 900))))
    return made


@given(histories(), st.lists(st.integers(0, 12), min_size=1, max_size=30), st.data())
def test_crashes_retention_and_stale_lists_never_cost_the_way_to_the_newest_that_was_there(
    made: list[Edge], pauses: list[int], data: st.DataObject
) -> None:
    bucket, store, best = Bucket(), {}, None
    for number, new in enumerate(made):
        store[new.artifact] = new
        kept = (ReadyMarker(e.version, e.base, a) for a, e in store.items())
        for gone in expendable(kept, RetentionCounts(4, 2)):
            del store[gone]
        bucket.work(store, steps=pauses[number % len(pauses)])
        ready = bucket.check()
        shown = [ReadyMarker.parse(n) for n in bucket.objects]
        reach = head({}, _inventory([m for m in shown if m is not None], ready))
        assert best is None or (reach is not None and reach >= best)
        best = reach
    assert bucket.work(store)
    assert head(store, Inventory.of(bucket.listing())) == made[-1].version


def _inventory(markers: list[ReadyMarker], ready: Iterable[bytes]) -> Inventory:
    out = Inventory()
    for artifact in ready:
        out.wrote_slice(artifact, 0, 1)
        out.wrote_tail(artifact)
    for marker in markers:
        out.wrote_marker(marker)
    return out


@given(st.sets(st.integers(0, 40)), st.sampled_from([64 * KIB, MIB, 4 * MIB]), st.integers(1, 9 * MIB))
def test_spans_bring_each_missing_piece_once_and_no_other(missing: set[int], piece: int, most: int) -> None:
    log = 41 * piece - 7
    got: list[int] = []
    for span in spans(sorted(missing), piece, log, most):
        assert span.number * SLICE_BYTES + span.start == span.first * piece
        assert span.start + span.size <= SLICE_BYTES
        assert span.size <= max(most, piece)
        assert span.size == min(span.stop * piece, log) - span.first * piece
        got += range(span.first, span.stop)
    assert got == sorted(missing)


@pytest.mark.parametrize("pieces", [[0, 1, 2, 3], [0, 2, 3]])
def test_neighbours_come_together(pieces: list[int]) -> None:
    assert len(spans(pieces, 64 * KIB, 1 << 30, 2 * MIB)) == (1 if pieces == [0, 1, 2, 3] else 2)
