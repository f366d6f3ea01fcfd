"""A holding's questions and steps, alone and beside the flags that its state replaced."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pcast.artifact.signed_records import OWN
from p2pcast.ground.errors import LocalError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.relay.holding import Holding
from p2pcast.relay.holding_state import BIRTH, HoldingState, IllegalStepError

PIECES = 3


class Parent:
    live = True

    def pushes(self, artifact: bytes) -> bool:
        return True


def received(maker: Any, state: HoldingState = HoldingState.WAITING, **options: Any) -> Holding:
    """Nothing of it is here yet."""
    made = maker.make([3000] * 3, piece=1024)
    return Holding(maker.artifact(made, batches=0, held=0, sealed=False), None, state, **options)  # type: ignore[arg-type]


def whole(maker: Any, **options: Any) -> Holding:
    """Every record and piece is here, and ``verify`` was not called."""
    return Holding(maker.artifact(maker.make([3000] * 3, piece=1024, **options)), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [state for state in HoldingState if state not in BIRTH])
def test_a_holding_begins_in_a_state_of_birth_only(maker, state: HoldingState) -> None:
    with pytest.raises(IllegalStepError, match="cannot begin"):
        received(maker, state)


def test_only_a_waiting_idle_or_excerpt_holding_needs_a_source(maker) -> None:
    needs = {
        state for state in BIRTH - {HoldingState.RECEIVING, HoldingState.DURABLE} if received(maker, state).needs_source
    }
    assert needs == {HoldingState.WAITING, HoldingState.IDLE, HoldingState.EXCERPT}
    for state in needs:
        holding, parent = received(maker, state), Parent()
        holding.receive_from(parent)
        assert not holding.needs_source
        assert holding.source is parent
        holding.lose_source(parent)
        assert holding.needs_source
        assert holding.source is None
        holding.validate()


def test_only_the_source_that_sends_can_be_lost(maker) -> None:
    holding, parent = received(maker), Parent()
    holding.receive_from(parent)
    holding.lose_source(Parent())
    assert holding.source is parent


def test_two_sources_at_once_are_refused(maker) -> None:
    holding, parent = received(maker), Parent()
    holding.receive_from(parent)
    holding.receive_from(parent)
    with pytest.raises(IllegalStepError, match="two sources"):
        holding.receive_from(Parent())


def test_an_idle_holding_is_offered_only_once_wanted(maker) -> None:
    holding = received(maker, HoldingState.IDLE)
    assert not holding.offered
    holding.want()
    holding.want()
    assert holding.state is HoldingState.WAITING
    assert holding.offered


def test_verification_ends_the_source_and_takes_the_time(maker) -> None:
    holding = whole(maker)
    holding.opened_at = 2.0
    holding.receive_from(Parent())
    holding.verify(5.0)
    assert (holding.source, holding.took_s, holding.complete, holding.finished) == (None, 3.0, True, False)
    with pytest.raises(IllegalStepError):
        holding.verify(6.0)


def test_an_excerpt_never_completes(maker) -> None:
    with pytest.raises(IllegalStepError):
        received(maker, HoldingState.EXCERPT).verify(0.0)


async def test_the_seal_comes_after_the_log_and_wakes_waiters(maker) -> None:
    holding = whole(maker)
    with pytest.raises(IllegalStepError):
        holding.seal()
    holding.verify(1.0)
    with pytest.raises(IllegalStepError):
        holding.seal()
    holding.note_stored(range(holding.assembly.pieces))
    assert holding.all_stored
    holding.finish()
    waiting = asyncio.ensure_future(holding.until_durable())
    holding.seal()
    await waiting
    assert holding.durable
    holding.validate()


async def test_a_failed_seal_reaches_its_waiters(maker) -> None:
    holding = whole(maker)
    holding.verify(1.0)
    holding.note_stored(range(holding.assembly.pieces))
    holding.finish()
    holding.fail_seal(LocalError("the disk is full"))
    holding.validate()
    with pytest.raises(LocalError, match="the disk is full"):
        await holding.until_durable()


async def test_an_abort_wakes_every_waiter_and_cannot_be_undone_by_a_late_seal(maker) -> None:
    holding = whole(maker, version_hash=OWN)
    holding.verify(1.0)
    holding.note_stored(range(holding.assembly.pieces))
    holding.finish()
    holding.progress.clear()
    holding.abort()
    holding.seal()
    assert holding.aborted
    assert holding.progress.is_set()
    assert not await holding.until_confirmed()
    with pytest.raises(RetryableError, match="aborted"):
        await holding.until_durable()
    with pytest.raises(IllegalStepError):
        holding.abort()
    holding.validate()


async def test_a_delta_is_confirmed_by_the_hubs_record_and_only_then_irrevocable(maker) -> None:
    made = maker.make([3000] * 3, piece=1024, version_hash=OWN)
    holding = Holding(maker.artifact(made), None)
    holding.verify(1.0)
    assert not holding.irrevocable
    assert holding.add_confirmation(made.durable)
    assert not holding.add_confirmation(made.durable)
    assert holding.irrevocable
    assert await holding.until_confirmed()


async def test_only_an_artifact_in_the_making_requires_a_proof(maker) -> None:
    with pytest.raises(IllegalStepError, match="no proof"):
        received(maker).require_proof()
    assert await received(maker).until_proved()
    making = received(maker, HoldingState.MAKING)
    making.require_proof()
    making.prove(good=False)
    assert not await making.until_proved()
    making.validate()


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda h: setattr(h, "_source", Parent()), "a source sends to it"),
        (lambda h: setattr(h, "_state", HoldingState.RECEIVING), "no source sends to it"),
        (lambda h: setattr(h, "_state", HoldingState.MAKING), "not made here"),
        (lambda h: setattr(h, "made", True), "it was made here"),
        (lambda h: setattr(h, "_state", HoldingState.VERIFIED), "missing"),
        (lambda h: setattr(h, "completed_at", 1.0), "completed_at"),
        (lambda h: h.stored.add(0), "not verified"),
        (lambda h: setattr(h, "_failure", LocalError("?")), "sealing failed"),
        (lambda h: setattr(h, "_state", HoldingState.ABORTED), "waiters"),
        (lambda h: h._confirmed.set(), "waiters for the confirmation"),
        (lambda h: h._sealed.set(), "waiters for the sealing"),
    ],
)
def test_validation_names_each_broken_invariant(maker, spoil, what: str) -> None:
    holding = received(maker)
    holding.validate()
    spoil(holding)
    with pytest.raises(AssertionError, match=what):
        holding.validate()


# -- beside the flags


class Flags:
    """The flags that a holding had before it had a state, written where its callers wrote them."""

    def __init__(self, *, made: bool, idle: bool, excerpt: bool, stored: bool, source: object | None) -> None:
        self.made, self.idle, self.excerpt, self.finished = made, idle, excerpt, stored
        self.source = source
        self.completed = stored
        self.confirmed = self.durable = stored
        self.aborted = False

    def receive(self, source: object) -> None:
        self.source, self.idle = source, False

    def lose(self, source: object) -> None:
        if self.source is source:
            self.source = None

    def complete(self) -> None:
        self.completed, self.source, self.idle = True, None, False

    def end(self) -> None:
        self.aborted = self.confirmed = self.durable = True


class Pieces:
    """Of an artifact of three pieces, as far as a holding looks at them."""

    def __init__(self, held: int) -> None:
        self.id = b"a" * 16
        self.open = SimpleNamespace(version=Version(0, 1), piece=1024)
        self.assembly = SimpleNamespace(confirmed=False, pieces=PIECES, durable_signed=None)
        self.assembly.add_durable = self._confirm
        self.held = SimpleNamespace(count=held)

    @property
    def complete(self) -> bool:
        return self.held.count == PIECES

    def _confirm(self, signed: bytes) -> None:
        self.assembly.confirmed, self.assembly.durable_signed = True, signed


class BesideFlags(RuleBasedStateMachine):
    """A node's calls of a holding, in any order that a node allows."""

    @initialize(birth=st.sampled_from(sorted(BIRTH, key=lambda state: state.value)))
    def begin(self, birth: HoldingState) -> None:
        self.parents = [Parent(), Parent()]
        stored, source = birth is HoldingState.DURABLE, self.parents[0] if birth is HoldingState.RECEIVING else None
        self.pieces = Pieces(PIECES if stored else 0)
        self.holding = Holding(self.pieces, None, birth, source=source)  # type: ignore[arg-type]
        if stored:
            self.holding.note_stored(range(PIECES))
        self.flags = Flags(
            made=birth is HoldingState.MAKING,
            idle=birth is HoldingState.IDLE,
            excerpt=birth is HoldingState.EXCERPT,
            stored=stored,
            source=source,
        )

    @rule(number=st.integers(0, 1))
    def receive(self, number: int) -> None:
        if self.holding.needs_source:
            self.holding.receive_from(self.parents[number])
            self.flags.receive(self.parents[number])

    @rule(number=st.integers(0, 1))
    def lose(self, number: int) -> None:
        self.holding.lose_source(self.parents[number])
        if not self.flags.aborted:
            self.flags.lose(self.parents[number])

    @rule()
    def want(self) -> None:
        self.holding.want()
        if not self.flags.aborted:
            self.flags.idle = False

    @precondition(lambda self: self.holding.incomplete and not self.holding.excerpt)
    @rule()
    def verify(self) -> None:
        self.pieces.held.count = PIECES
        self.holding.verify(1.0)
        self.flags.complete()

    @precondition(lambda self: self.holding.state is HoldingState.VERIFIED)
    @rule()
    def finish(self) -> None:
        self.holding.note_stored(range(PIECES))
        self.holding.finish()
        self.flags.finished = True

    @rule()
    def confirm(self) -> None:
        self.holding.add_confirmation(b"signed")
        self.flags.confirmed = True

    @precondition(lambda self: self.holding.state is HoldingState.FINISHED and self.holding.confirmed)
    @rule()
    def seal(self) -> None:
        self.holding.seal()
        self.flags.durable = True

    @precondition(lambda self: not self.holding.aborted)
    @rule()
    def abort(self) -> None:
        self.holding.abort()
        self.flags.end()

    @invariant()
    def every_question_has_the_answer_of_the_flags(self) -> None:
        holding, flags = self.holding, self.flags
        holding.validate()
        assert holding.aborted == flags.aborted
        assert holding._confirmed.is_set() == flags.confirmed
        assert holding._sealed.is_set() == flags.durable
        if flags.aborted:
            assert (holding.source, holding.needs_source, holding.incomplete) == (None, False, False)
            return
        assert holding.source is flags.source
        assert holding.idle == flags.idle
        assert holding.excerpt == flags.excerpt
        assert holding.offered == (not flags.idle and not flags.excerpt)
        assert holding.complete == flags.completed
        assert holding.incomplete == (not flags.completed)
        assert holding.finished == flags.finished
        assert holding.confirmed == flags.confirmed
        assert holding.durable == flags.durable
        assert holding.irrevocable == (flags.completed and flags.confirmed)
        assert holding.needs_source == (not flags.completed and flags.source is None and not flags.made)


TestBesideFlags = BesideFlags.TestCase
TestBesideFlags.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)
