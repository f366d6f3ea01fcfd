"""The table of a holding's states: which steps are legal, and that no other is."""

from __future__ import annotations

import itertools

import pytest

from p2pcast.relay.holding_state import (
    BIRTH,
    COMPLETE,
    IN_LOG,
    MISSING,
    SOURCED,
    TRANSITIONS,
    IllegalStepError,
    State,
    Step,
    after,
)

LEGAL = {
    (State.MAKING, Step.VERIFY): State.VERIFIED,
    (State.IDLE, Step.WANT): State.WAITING,
    (State.IDLE, Step.RECEIVE): State.RECEIVING,
    (State.IDLE, Step.VERIFY): State.VERIFIED,
    (State.WAITING, Step.RECEIVE): State.RECEIVING,
    (State.WAITING, Step.VERIFY): State.VERIFIED,
    (State.RECEIVING, Step.LOSE_SOURCE): State.WAITING,
    (State.RECEIVING, Step.VERIFY): State.VERIFIED,
    (State.EXCERPT, Step.RECEIVE): State.EXCERPT,
    (State.EXCERPT, Step.LOSE_SOURCE): State.EXCERPT,
    (State.VERIFIED, Step.FINISH): State.FINISHED,
    (State.FINISHED, Step.SEAL): State.DURABLE,
    (State.FINISHED, Step.FAIL_SEAL): State.SEAL_FAILED,
    (State.ABORTED, Step.SEAL): State.ABORTED,
    (State.ABORTED, Step.FAIL_SEAL): State.ABORTED,
    **{(state, Step.ABORT): State.ABORTED for state in State if state is not State.ABORTED},
}


@pytest.mark.parametrize(("state", "step"), list(itertools.product(State, Step)))
def test_each_step_is_legal_or_raises(state: State, step: Step) -> None:
    if (state, step) in LEGAL:
        assert after(state, step) is LEGAL[state, step]
    else:
        with pytest.raises(IllegalStepError, match=state.value):
            after(state, step)


def test_every_state_is_in_the_table_and_can_be_reached() -> None:
    assert TRANSITIONS.keys() == set(State)
    reached = set(BIRTH) | {to for steps in TRANSITIONS.values() for to in steps.values()} | {State.ABORTED}
    assert reached == set(State)


def test_the_groups_of_states_divide_all_states() -> None:
    assert MISSING | COMPLETE | {State.ABORTED} == set(State)
    assert not MISSING & COMPLETE
    assert IN_LOG < COMPLETE
    assert SOURCED < MISSING


def test_no_step_leads_from_complete_back_to_missing() -> None:
    for state in COMPLETE:
        for step in Step:
            if (state, step) in LEGAL:
                assert LEGAL[state, step] not in MISSING
