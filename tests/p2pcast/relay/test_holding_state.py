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
    HoldingState,
    HoldingStep,
    IllegalStepError,
    after,
)

LEGAL = {
    (HoldingState.MAKING, HoldingStep.VERIFY): HoldingState.VERIFIED,
    (HoldingState.IDLE, HoldingStep.WANT): HoldingState.WAITING,
    (HoldingState.IDLE, HoldingStep.RECEIVE): HoldingState.RECEIVING,
    (HoldingState.IDLE, HoldingStep.VERIFY): HoldingState.VERIFIED,
    (HoldingState.WAITING, HoldingStep.RECEIVE): HoldingState.RECEIVING,
    (HoldingState.WAITING, HoldingStep.VERIFY): HoldingState.VERIFIED,
    (HoldingState.RECEIVING, HoldingStep.LOSE_SOURCE): HoldingState.WAITING,
    (HoldingState.RECEIVING, HoldingStep.VERIFY): HoldingState.VERIFIED,
    (HoldingState.EXCERPT, HoldingStep.RECEIVE): HoldingState.EXCERPT,
    (HoldingState.EXCERPT, HoldingStep.LOSE_SOURCE): HoldingState.EXCERPT,
    (HoldingState.VERIFIED, HoldingStep.FINISH): HoldingState.FINISHED,
    (HoldingState.FINISHED, HoldingStep.SEAL): HoldingState.DURABLE,
    (HoldingState.FINISHED, HoldingStep.FAIL_SEAL): HoldingState.SEAL_FAILED,
    (HoldingState.ABORTED, HoldingStep.SEAL): HoldingState.ABORTED,
    (HoldingState.ABORTED, HoldingStep.FAIL_SEAL): HoldingState.ABORTED,
    **{(state, HoldingStep.ABORT): HoldingState.ABORTED for state in HoldingState if state is not HoldingState.ABORTED},
}


@pytest.mark.parametrize(("state", "step"), list(itertools.product(HoldingState, HoldingStep)))
def test_each_step_is_legal_or_raises(state: HoldingState, step: HoldingStep) -> None:
    if (state, step) in LEGAL:
        assert after(state, step) is LEGAL[state, step]
    else:
        with pytest.raises(IllegalStepError, match=state.value):
            after(state, step)


def test_every_state_is_in_the_table_and_can_be_reached() -> None:
    assert TRANSITIONS.keys() == set(HoldingState)
    reached = set(BIRTH) | {to for steps in TRANSITIONS.values() for to in steps.values()} | {HoldingState.ABORTED}
    assert reached == set(HoldingState)


def test_the_groups_of_states_divide_all_states() -> None:
    assert MISSING | COMPLETE | {HoldingState.ABORTED} == set(HoldingState)
    assert not MISSING & COMPLETE
    assert IN_LOG < COMPLETE
    assert SOURCED < MISSING


def test_no_step_leads_from_complete_back_to_missing() -> None:
    for state in COMPLETE:
        for step in HoldingStep:
            if (state, step) in LEGAL:
                assert LEGAL[state, step] not in MISSING
