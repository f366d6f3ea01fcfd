"""What a child is sent, and in which order, whatever the order of events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.artifact import Assembly
from p2pcast.errors import RetryableError
from p2pcast.relay import feed as module
from p2pcast.relay.artifact import Artifact, Offer
from p2pcast.relay.feed import ChildFeeds, Do

PIECE = 1024
STRIPES = 3


class Reader:
    """Reads each stripe by itself, as a child may have to, and checks the rules of docs/wire-protocol.md, section 5."""

    def __init__(self, maker, *, knows: bool = False):
        self.maker, self.knows = maker, knows
        self.assemblies: dict[tuple[int, int], Assembly] = {}
        self.layouts: set[int] = set()
        self.got: dict[bytes, list[int]] = {}
        self.sealed: list[bytes] = []
        self.together: dict[bytes, Assembly] = {}

    def read(self, stripe: int, send) -> None:
        key, artifact = (stripe, send.handle), send.artifact.id
        public, layout = self.maker.key.public, self.maker.layout
        assert artifact not in self.sealed, "nothing follows a SEAL"
        if send.what is Do.LAYOUT:
            assert stripe not in self.layouts, "once a stripe"
            assert not self.knows
            self.layouts.add(stripe)
        elif send.what is Do.OPEN:
            assert key not in self.assemblies, "OPEN once a stripe"
            assert stripe in self.layouts or self.knows, "the document of the layout came first"
            self.assemblies[key] = Assembly(send.signed, public, layout)
            self.together.setdefault(artifact, Assembly(send.signed, public, layout))
        elif send.what is Do.BATCH:
            self.assemblies[key].add_batch(send.signed)
            self.together[artifact].add_batch(send.signed)
        elif send.what is Do.PIECE:
            assert self.assemblies[key].piece_hash(send.index) is not None, "its batch came first, on this stripe"
            assert send.index in send.artifact.held, "only what was verified is offered"
            self.got.setdefault(artifact, []).append(send.index)
        else:
            assert stripe == 0
            self.together[artifact].add_manifest(send.signed)
            assert self.together[artifact].complete_directory, "all batches came before the SEAL"
            self.sealed.append(artifact)


def drain(feeds: ChildFeeds, reader: Reader, stripe: int = 0) -> None:
    while sends := feeds.next(stripe):
        for send in sends:
            reader.read(stripe, send)


def spans(have):
    return {i for a, b in zip(have[::2], have[1::2], strict=True) for i in range(a, b)}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 4000), max_size=64),
    st.lists(st.integers(0, 120), unique=True, max_size=8).map(sorted),
    st.integers(0, 1 << 32),
)
def test_every_piece_once_in_order_and_the_seal_last(maker, sizes, cuts, seed):
    """An artifact comes in here batch by batch and piece by piece, while stripes ask for work whenever they like."""
    draw = random.Random(seed)
    made = maker.make(sizes, piece=PIECE)
    payloads = made.pieces(PIECE)
    have = cuts[: len(cuts) // 2 * 2]
    artifact = Artifact(Assembly(made.open, maker.key.public, maker.layout))
    batches, waiting = list(made.batches), list(range(len(payloads)))
    feeds, reader, added, sealed = ChildFeeds(), Reader(maker), False, False
    while not (added and sealed and artifact.complete and not list(feeds)):
        step = draw.randint(0, 5)
        if step == 0 and not added:
            assert feeds.add(artifact, have, live=True) is not None
            assert feeds.add(artifact, [], live=False) is None, "on its way already"
            added = True
        elif step <= 1 and batches:
            artifact.assembly.add_batch(batches.pop(0))
        elif step == 2:
            known = [i for i in waiting if artifact.assembly.piece_hash(i) is not None]
            for index in known[: draw.randint(1, 9)]:
                waiting.remove(index)
                assert artifact.offer(index, memoryview(payloads[index])) is Offer.NEW
                assert feeds.piece_held(artifact, index) == (added and index not in spans(have))
        elif step == 3 and not sealed:
            artifact.assembly.add_manifest(made.manifest)
            sealed = True
        else:
            stripe = draw.randint(0, STRIPES - 1)
            for send in feeds.next(stripe):
                if send.what is Do.PIECE and draw.randint(0, 4) == 0:
                    feeds.put_back(send)  # it could not be read yet
                    assert feeds.upcoming(1)[0].index == send.index, "it stays first in line"
                else:
                    reader.read(stripe, send)
    got = reader.got.get(made.id, [])
    assert len(got) == len(set(got))
    assert set(got) == set(range(len(payloads))) - spans(have)
    assert reader.sealed == [made.id]
    assert all(feeds.next(s) == [] for s in range(STRIPES))


def test_live_goes_before_catch_up(maker):
    old, new = (maker.artifact(maker.make([900] * 9, step=s, piece=PIECE)) for s in (1, 2))
    feeds, reader = ChildFeeds(), Reader(maker)
    feeds.add(old, [], live=False)
    for _ in range(3):
        for send in feeds.next(0):
            reader.read(0, send)
    feeds.add(new, [], live=True)
    assert [s.artifact.id for s in feeds.upcoming(100)] == [new.id] * 8 + [old.id] * 5
    drain(feeds, reader)
    assert reader.sealed == [new.id, old.id]


def test_a_live_artifact_that_waits_does_not_hold_up_catch_up(maker):
    made = maker.make([900] * 9, step=2, piece=PIECE)
    waiting = maker.artifact(made, batches=0, sealed=False)
    old = maker.artifact(maker.make([900] * 9, step=1, piece=PIECE))
    feeds, reader = ChildFeeds(), Reader(maker)
    feeds.add(waiting, [], live=True)
    feeds.add(old, [], live=False)
    drain(feeds, reader)
    assert reader.sealed == [old.id]
    assert reader.together.keys() == {old.id, waiting.id}, "its OPEN went out at once"


@pytest.mark.parametrize("knows", [False, True])
def test_the_layout_comes_once_on_every_stripe_unless_the_child_has_it(maker, knows):
    artifact = maker.artifact(maker.anchor())
    feeds, reader = ChildFeeds(), Reader(maker, knows=knows)
    if knows:
        feeds.layouts = frozenset({maker.layout.layout_id})
    feeds.add(artifact, [], live=False)
    turn = 0
    while list(feeds):
        for send in feeds.next(turn % STRIPES):
            reader.read(turn % STRIPES, send)
        turn += 1
    assert reader.layouts == (set() if knows else set(range(STRIPES)))
    assert sorted(reader.got[artifact.id]) == list(range(artifact.assembly.pieces))


def test_an_empty_delta_is_open_and_seal(maker):
    artifact = maker.artifact(maker.make([]))
    feeds = ChildFeeds()
    feeds.add(artifact, [], live=True)
    assert feeds.next(1) == []
    assert [s.what for s in feeds.next(0)] == [Do.LAYOUT, Do.OPEN, Do.SEAL]


def test_a_child_that_holds_all_gets_batches_and_seal(maker):
    """It may hold the pieces and yet lack the seal, and batches without pieces of their own."""
    artifact = maker.artifact(maker.make([900] * 40, piece=PIECE))
    feeds, reader = ChildFeeds(), Reader(maker)
    feeds.add(artifact, artifact.held.ranges(), live=True)
    drain(feeds, reader)
    assert reader.got == {}
    assert reader.sealed == [artifact.id]


def test_what_the_child_holds_is_not_sent_when_it_comes_in_here_later(maker):
    """A child may come from a parent that was ahead of this one."""
    made = maker.make([900] * 9, piece=PIECE)
    artifact = maker.artifact(made, held=3)
    feeds, reader = ChildFeeds(), Reader(maker)
    feeds.add(artifact, [2, 6], live=True)
    for index in range(3, 8):
        artifact.held.add(index)
        assert feeds.piece_held(artifact, index) == (index >= 6)
    drain(feeds, reader)
    assert reader.got[artifact.id] == [0, 1, 6, 7]


def test_drop(maker):
    artifact = maker.artifact(maker.make([900] * 9, piece=PIECE))
    feeds = ChildFeeds()
    feed = feeds.add(artifact, [], live=True)
    feeds.next(0)
    assert feeds.drop(artifact) is feed
    assert feeds.drop(artifact) is None
    assert not feeds.piece_held(artifact, 3)
    assert feeds.next(0) == []
    again = feeds.add(artifact, [], live=True)
    assert again is not None
    assert again.handle != feed.handle, "a handle is never used again"


def test_handles_run_out(maker, monkeypatch):
    monkeypatch.setattr(module, "MAX_HANDLE", 2)
    feeds = ChildFeeds()
    for step in (1, 2):
        feeds.add(maker.artifact(maker.make([], step=step)), [], live=True)
    with pytest.raises(RetryableError, match="made anew"):
        feeds.add(maker.artifact(maker.make([], step=3)), [], live=True)
