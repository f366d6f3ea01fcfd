"""Artifacts that retention may remove, and artifacts that it never removes."""

from __future__ import annotations

from artifacts_at_hand import again, put
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.version import Version
from p2pcast.store import retention
from p2pcast.store.retention import RetentionCounts, dispensable, expendable


class Item:
    def __init__(self, number: int, base: Version | None, version: Version):
        self.id, self.base, self.version = number.to_bytes(2, "big"), base, version


@st.composite
def histories(draw):
    """Versions with deltas, squashes, anchors and branches, some already removed."""
    steps = draw(st.integers(1, 14))
    items, versions = [], [Version(0, 0)]
    items.append(Item(0, None, versions[0]))
    for number in range(1, steps + 1):
        newest = versions[-1]
        if draw(st.integers(0, 9)) == 0:
            base = draw(st.sampled_from(versions))
            version = Version(newest.branch + 1, base.step + 1)
        else:
            base, version = newest, Version(newest.branch, newest.step + 1)
        versions.append(version)
        items.append(Item(number, base, version))
        if draw(st.integers(0, 3)) == 0:
            items.append(Item(100 + number, None, version))
        if draw(st.integers(0, 3)) == 0:
            items.append(Item(200 + number, draw(st.sampled_from([v for v in versions if v < version])), version))
    gone = draw(st.sets(st.sampled_from([i.id for i in items]), max_size=4))
    items = [i for i in items if i.id not in gone]
    return draw(st.permutations(items))


def reachable(items) -> set[Version]:
    """Versions that can be reached without a base."""
    found = {i.version for i in items if i.base is None}
    while more := {i.version for i in items if i.base in found} - found:
        found |= more
    return found


@given(histories(), st.integers(1, 6), st.integers(1, 3))
def test_retention_keeps_the_newest_versions_chain(items, deltas, anchors):
    gone = expendable(items, RetentionCounts(deltas, anchors))
    assert len(gone) == len(set(gone)) <= len(items)
    left = [i for i in items if i.id not in gone]
    newest = max((i.version for i in items), default=None)
    if newest is not None:
        assert (newest in reachable(left)) == (newest in reachable(items))
        assert any(i.version == newest for i in left)
    by_version = sorted(items, key=lambda i: i.version)
    for kind, keep in ((False, deltas), (True, anchors)):
        kept = [i for i in left if (i.base is None) == kind]
        every = [i for i in by_version if (i.base is None) == kind]
        squashes = [
            i for i in every if any(i.version == o.version and i.base is not None and i.base < o.base for o in every)
        ]
        assert len(kept) >= min(keep, len(every) - len(squashes))
        if every:
            assert every[-1].version in {i.version for i in kept}
    versions = {i.id: i.version for i in items}
    assert [versions[g] for g in gone] == sorted(versions[g] for g in gone), "oldest first"


@given(histories(), st.integers(1, 6), st.integers(1, 3))
def test_versions_reachable_by_kept_deltas_stay_reachable(items, deltas, anchors):
    """An anchor that is the base of a kept delta is never removed: a version reachable by kept deltas and any anchor
    stays reachable.
    """
    gone = set(expendable(items, RetentionCounts(deltas, anchors)))
    left = [i for i in items if i.id not in gone]
    newest = [x for x in sorted(items, key=lambda i: i.version, reverse=True) if x.base is not None and x.id[0] == 0]
    counted = [i for i in left if i.base is not None and (i in newest[:deltas])]
    before = reachable([*counted, *(i for i in items if i.base is None)])
    after = reachable(left)
    assert {d.version for d in counted if d.base in before} <= after


def test_chain_over_its_limit_is_removed():
    items = [Item(0, None, Version(0, 0))]
    items += [Item(n, Version(0, n - 1), Version(0, n)) for n in range(1, 31)]
    assert expendable(items, RetentionCounts(5, 1, 31)) == []
    left = {i.id for i in items} - set(expendable(items, RetentionCounts(5, 1, 30)))
    assert left == {items[0].id, *(i.id for i in items[26:])}, "the anchor and the newest five"
    assert not set(expendable([i for i in items if i.id in left], RetentionCounts(5, 1, 30)))


def test_anchors_below_kept_deltas_are_kept_beyond_their_count():
    items = [Item(0, None, Version(0, 0))]
    items += [Item(n, Version(0, n - 1), Version(0, n)) for n in range(1, 60)]
    items += [Item(1000 + n, None, Version(0, n)) for n in range(10, 60, 10)]
    gone = expendable(items, RetentionCounts(25, 1))
    left = {i.version.step for i in items if i.base is None and i.id not in gone}
    assert left == {40, 50}, "25 deltas begin at 34, so the anchors of 40 and 50 are bases of kept deltas"


def test_retention_of_an_ordinary_run():
    items = [Item(0, None, Version(0, 0))]
    items += [Item(n, Version(0, n - 1), Version(0, n)) for n in range(1, 300)]
    assert expendable(items) == [], "with one anchor, all later deltas are needed"
    items += [Item(1000 + n, None, Version(0, n)) for n in range(50, 300, 50)]
    gone = expendable(items)
    assert len(gone) == 299 - retention.KEEP_DELTAS
    assert all(int.from_bytes(g, "big") < 200 for g in gone)


def test_retain_removes_expendable_files_except_spared_files(store, monkeypatch):
    monkeypatch.setattr(
        "p2pcast.store.artifact_store.expendable",
        lambda artifacts, counts: [a.id for a in artifacts if a.version.step < 3],
    )
    kept = {step: put(store, "delta", step, files=((f"f{step}", 10 + step),))[0] for step in (1, 2, 3)}
    anchor, _ = put(store, "anchor", 0)
    gone = store.retain(frozenset({kept[2].id}))
    assert {s.id for s in gone} == {kept[1].id, anchor.id}
    assert not kept[1].path.exists()
    assert not anchor.path.exists()
    assert again(store).artifacts.keys() == {kept[2].id, kept[3].id}
    assert [len(store.small_files(Version(0, step))) for step in (1, 2, 3)] == [0, 1, 1]
    assert len(list((store.root / "files").iterdir())) == 2
    assert store.retain(frozenset({kept[2].id})) == []


@given(histories())
def test_squashes_are_given_up_where_other_artifacts_lead_as_far(items):
    gone = dispensable(items)
    assert len(gone) == len(set(gone))
    left = [i for i in items if i.id not in gone]
    assert all(i.base is not None for i in items if i.id in gone)
    for start in {i.base for i in items} | {i.version for i in items}:
        assert led_to(left, start) == led_to(items, start)
    assert dispensable(left) == []
    versions = [i.version for gone_id in gone for i in items if i.id == gone_id]
    assert versions == sorted(versions)


def led_to(items, start) -> set[Version]:
    """Versions that can be reached from ``start``."""
    found = {start}
    while more := {i.version for i in items if i.base in found} - found:
        found |= more
    return found
