"""Which objects of a mirror are verified, and in which order: never a verified one without a change, always one with a
complaint.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.version import Version
from p2pcast.mirror.object_names import KEY, ListedObject, ReadyMarker, slice_name, tail_name
from p2pcast.mirror.suspect_objects import MAX_COMPLAINTS, SuspectObjects, artifact_of
from p2pcast.relay.artifact_path import Edge


def edge(number: int, base: int | None, step: int) -> Edge:
    return Edge(number.to_bytes(16, "big"), None if base is None else Version(0, base), Version(0, step), 1000)


ANCHOR, DELTA, NEWER = edge(1, None, 0), edge(2, 0, 1), edge(3, None, 1)
READY = {e.artifact: e for e in (ANCHOR, DELTA, NEWER)}


def names(*edges: Edge) -> list[str]:
    out = []
    for e in edges:
        out += [slice_name(e.artifact, 0), tail_name(e.artifact), str(ReadyMarker(e.version, e.base, e.artifact))]
    return out


def listing(*objects: str, tag: str | None = "tag") -> list[ListedObject]:
    return [ListedObject(name, 5, 1.0, tag) for name in objects]


def looked_at(doubts: SuspectObjects, ready: dict[bytes, Edge] = READY) -> list[str]:
    """In order, each found right."""
    seen = []
    while (doubt := doubts.next(ready)) is not None:
        seen.append(doubt.name)
        doubts.right(doubt)
    return seen


def test_a_new_process_verifies_key_deltas_and_newest_anchor_once() -> None:
    doubts = SuspectObjects()
    doubts.listed(listing(KEY, *names(ANCHOR, DELTA, NEWER)))
    assert looked_at(doubts)[0] == KEY
    doubts.listed(listing(KEY, *names(ANCHOR, DELTA, NEWER)))
    assert looked_at(doubts) == []
    doubts.listed(listing(*names(ANCHOR), tag="changed"))
    assert looked_at(doubts) == []
    fresh = SuspectObjects()
    fresh.listed(listing(*names(ANCHOR, DELTA, NEWER)))
    assert sorted(looked_at(fresh)) == sorted(names(DELTA, NEWER))


def test_an_object_written_here_counts_as_correct_until_its_tag_changes() -> None:
    doubts = SuspectObjects()
    for name in names(ANCHOR):
        doubts.wrote(name, "tag")
    doubts.listed(listing(*names(ANCHOR)))
    assert looked_at(doubts) == []
    # Also an anchor that is not the newest: it was right once.
    doubts.listed(listing(names(ANCHOR)[0], tag="another"))
    assert looked_at(doubts) == names(ANCHOR)[:1]


def test_without_tags_the_time_of_writing_is_used() -> None:
    doubts = SuspectObjects()
    doubts.listed(listing(*names(DELTA), tag=None))
    assert len(looked_at(doubts)) == 3
    doubts.listed(listing(*names(DELTA), tag=None))
    assert looked_at(doubts) == []
    doubts.listed([ListedObject(names(DELTA)[0], 5, 2.0)])
    assert looked_at(doubts) == names(DELTA)[:1]


def test_an_object_under_complaint_is_verified_despite_its_tag() -> None:
    doubts = SuspectObjects()
    doubts.listed(listing(*names(DELTA, ANCHOR)))
    name = names(ANCHOR)[0]
    doubts.complain([name, "notes.txt", slice_name(b"x" * 16, 0)])
    doubt = doubts.next(READY)
    assert doubt is not None
    assert (doubt.name, doubt.asked) == (name, True)
    doubts.right(doubt)
    # The complaint was wrong: the next one is ignored until the next listing.
    doubts.complain([name])
    assert name not in looked_at(doubts)
    doubts.listed(listing(*names(DELTA, ANCHOR)))
    doubts.complain([name])
    assert looked_at(doubts) == [name]
    # The complaint was right: the next one counts.
    doubts.listed(listing(*names(DELTA, ANCHOR)))
    doubts.complain([name])
    doubts.wrote(name, "new")
    doubts.complain([name])
    assert looked_at(doubts) == [name]


def test_complaints_are_bounded() -> None:
    doubts = SuspectObjects()
    doubts.complain(slice_name(ANCHOR.artifact, n) for n in range(2 * MAX_COMPLAINTS))
    assert len(looked_at(doubts)) == MAX_COMPLAINTS


def test_a_removed_object_is_not_suspect() -> None:
    doubts = SuspectObjects()
    doubts.listed(listing(*names(DELTA)))
    doubts.complain(names(DELTA))
    doubts.gone(names(DELTA))
    assert doubts.next(READY) is None
    doubts.listed(listing(*names(DELTA)))
    assert doubts.next({}) is None


@given(
    st.lists(
        st.tuples(st.sampled_from([KEY, *names(ANCHOR, DELTA, NEWER)]), st.sampled_from("abc"), st.integers(0, 3)),
        max_size=40,
    )
)
def test_verification_ends_and_covers_every_changed_object(events: list[tuple[str, str, int]]) -> None:
    doubts, tags, believed = SuspectObjects(), dict[str, str](), dict[str, str]()
    for name, tag, what in events:
        if what == 0:
            tags[name] = believed[name] = tag
            doubts.wrote(name, tag)
        elif what == 1:
            tags[name] = tag
        elif what == 2:
            doubts.complain([name])
        else:
            doubts.listed([ListedObject(n, 5, 0.0, t) for n, t in tags.items()])
            seen = looked_at(doubts)
            assert len(seen) == len(set(seen))
            late = {n for n in names(ANCHOR) if n not in believed}
            assert {n for n, t in tags.items() if believed.get(n) != t} - late <= set(seen)
            believed |= {n: tags[n] for n in seen if n in tags}


def test_names_belong_to_artifacts() -> None:
    assert artifact_of(KEY) == b""
    assert {artifact_of(name) for name in names(DELTA)} == {DELTA.artifact}
    assert artifact_of("notes.txt") is None
