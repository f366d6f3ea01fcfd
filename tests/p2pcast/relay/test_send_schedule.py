"""The frames that a child is sent, and their order, for any order of events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.artifact import Assembly
from p2pcast.ground.errors import RetryableError
from p2pcast.relay import send_schedule as module
from p2pcast.relay.send_schedule import ChildSchedules, FrameKind
from p2pcast.relay.verified_pieces import PieceOffer, VerifiedPieces

PIECE = 1024
STRIPES = 3


class Reader:
    """Reads each stripe by itself, as a child may, and checks the rules of docs/formats/wire-protocol.md, section 5."""

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
        if send.kind is FrameKind.LAYOUT:
            assert stripe not in self.layouts, "LAYOUT goes out once on each stripe"
            assert not self.knows
            self.layouts.add(stripe)
        elif send.kind is FrameKind.OPEN:
            assert key not in self.assemblies, "OPEN goes out once on each stripe"
            assert stripe in self.layouts or self.knows, "the document of the layout came first"
            self.assemblies[key] = Assembly(send.signed, public, layout)
            self.together.setdefault(artifact, Assembly(send.signed, public, layout))
        elif send.kind is FrameKind.BATCH:
            self.assemblies[key].add_batch(send.signed)
            self.together[artifact].add_batch(send.signed)
        elif send.kind is FrameKind.PIECE:
            assert self.assemblies[key].piece_hash(send.index) is not None, (
                "the piece's batch came first, on this stripe"
            )
            assert send.index in send.artifact.held, "only verified pieces go out"
            self.got.setdefault(artifact, []).append(send.index)
        else:
            assert stripe == 0
            self.together[artifact].add_manifest(send.signed)
            assert self.together[artifact].complete_directory, "all batches came before the SEAL"
            self.sealed.append(artifact)


def drain(schedules: ChildSchedules, reader: Reader, stripe: int = 0) -> None:
    while sends := schedules.next(stripe):
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
def test_every_piece_goes_out_once_and_the_seal_last(maker, sizes, cuts, seed):
    """An artifact comes in batch by batch and piece by piece, while stripes ask for work at any time."""
    draw = random.Random(seed)
    made = maker.make(sizes, piece=PIECE)
    payloads = made.pieces(PIECE)
    have = cuts[: len(cuts) // 2 * 2]
    artifact = VerifiedPieces(Assembly(made.open, maker.key.public, maker.layout))
    batches, waiting = list(made.batches), list(range(len(payloads)))
    schedules, reader, added, sealed = ChildSchedules(), Reader(maker), False, False
    while not (added and sealed and artifact.complete and not list(schedules)):
        step = draw.randint(0, 5)
        if step == 0 and not added:
            assert schedules.add(artifact, have, live=True) is not None
            assert schedules.add(artifact, [], live=False) is None, "the artifact is on its way already"
            added = True
        elif step <= 1 and batches:
            artifact.assembly.add_batch(batches.pop(0))
        elif step == 2:
            known = [i for i in waiting if artifact.assembly.piece_hash(i) is not None]
            for index in known[: draw.randint(1, 9)]:
                waiting.remove(index)
                assert artifact.offer(index, memoryview(payloads[index])) is PieceOffer.NEW
                assert schedules.piece_held(artifact, index) == (added and index not in spans(have))
        elif step == 3 and not sealed:
            artifact.assembly.add_manifest(made.manifest)
            sealed = True
        else:
            stripe = draw.randint(0, STRIPES - 1)
            for send in schedules.next(stripe):
                if send.kind is FrameKind.PIECE and draw.randint(0, 4) == 0:
                    schedules.put_back(send)  # as if the piece could not be read yet
                    assert schedules.upcoming(1)[0].index == send.index, "the piece stays first in line"
                else:
                    reader.read(stripe, send)
    got = reader.got.get(made.id, [])
    assert len(got) == len(set(got))
    assert set(got) == set(range(len(payloads))) - spans(have)
    assert reader.sealed == [made.id]
    assert all(schedules.next(s) == [] for s in range(STRIPES))


def test_live_artifacts_go_before_catch_up(maker):
    old, new = (maker.artifact(maker.make([900] * 9, step=s, piece=PIECE)) for s in (1, 2))
    schedules, reader = ChildSchedules(), Reader(maker)
    schedules.add(old, [], live=False)
    for _ in range(3):
        for send in schedules.next(0):
            reader.read(0, send)
    schedules.add(new, [], live=True)
    assert [s.artifact.id for s in schedules.upcoming(100)] == [new.id] * 8 + [old.id] * 5
    drain(schedules, reader)
    assert reader.sealed == [new.id, old.id]


def test_a_live_artifact_that_waits_does_not_hold_up_catch_up(maker):
    made = maker.make([900] * 9, step=2, piece=PIECE)
    waiting = maker.artifact(made, batches=0, sealed=False)
    old = maker.artifact(maker.make([900] * 9, step=1, piece=PIECE))
    schedules, reader = ChildSchedules(), Reader(maker)
    schedules.add(waiting, [], live=True)
    schedules.add(old, [], live=False)
    drain(schedules, reader)
    assert reader.sealed == [old.id]
    assert reader.together.keys() == {old.id, waiting.id}, "its OPEN was sent at once"


@pytest.mark.parametrize("knows", [False, True])
def test_the_layout_comes_once_on_every_stripe_unless_held(maker, knows):
    artifact = maker.artifact(maker.anchor())
    schedules, reader = ChildSchedules(), Reader(maker, knows=knows)
    if knows:
        schedules.layouts = frozenset({maker.layout.layout_id})
    schedules.add(artifact, [], live=False)
    turn = 0
    while list(schedules):
        for send in schedules.next(turn % STRIPES):
            reader.read(turn % STRIPES, send)
        turn += 1
    assert reader.layouts == (set() if knows else set(range(STRIPES)))
    assert sorted(reader.got[artifact.id]) == list(range(artifact.assembly.pieces))


def test_an_empty_delta_is_sent_as_open_and_seal(maker):
    artifact = maker.artifact(maker.make([]))
    schedules = ChildSchedules()
    schedules.add(artifact, [], live=True)
    assert schedules.next(1) == []
    assert [s.kind for s in schedules.next(0)] == [FrameKind.LAYOUT, FrameKind.OPEN, FrameKind.SEAL]


def test_a_child_that_holds_all_gets_batches_and_seal(maker):
    """A child may hold all pieces and still lack the seal, and batches without pieces."""
    artifact = maker.artifact(maker.make([900] * 40, piece=PIECE))
    schedules, reader = ChildSchedules(), Reader(maker)
    schedules.add(artifact, artifact.held.ranges(), live=True)
    drain(schedules, reader)
    assert reader.got == {}
    assert reader.sealed == [artifact.id]


def test_late_pieces_that_the_child_holds_are_not_sent(maker):
    """The child's former parent may have been ahead of this one."""
    made = maker.make([900] * 9, piece=PIECE)
    artifact = maker.artifact(made, held=3)
    schedules, reader = ChildSchedules(), Reader(maker)
    schedules.add(artifact, [2, 6], live=True)
    for index in range(3, 8):
        artifact.held.add(index)
        assert schedules.piece_held(artifact, index) == (index >= 6)
    drain(schedules, reader)
    assert reader.got[artifact.id] == [0, 1, 6, 7]


def test_nothing_of_a_dropped_artifact_is_sent(maker):
    artifact = maker.artifact(maker.make([900] * 9, piece=PIECE))
    schedules = ChildSchedules()
    schedule = schedules.add(artifact, [], live=True)
    schedules.next(0)
    assert schedules.drop(artifact) is schedule
    assert schedules.drop(artifact) is None
    assert not schedules.piece_held(artifact, 3)
    assert schedules.next(0) == []
    again = schedules.add(artifact, [], live=True)
    assert again is not None
    assert again.handle != schedule.handle, "a handle is never used again"


def test_a_link_without_free_handles_raises_a_retryable_error(maker, monkeypatch):
    monkeypatch.setattr(module, "MAX_HANDLE", 2)
    schedules = ChildSchedules()
    for step in (1, 2):
        schedules.add(maker.artifact(maker.make([], step=step)), [], live=True)
    with pytest.raises(RetryableError, match="made anew"):
        schedules.add(maker.artifact(maker.make([], step=3)), [], live=True)
