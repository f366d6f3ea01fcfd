"""Fault schedules: repeatable from a seed, no second fault for a disturbed process, bounded, and repaired in
the end.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.fault_schedule import FAULTS, FRESH, KILL, LEAVE, REPAIRS, RESTORED, Fault, FaultSchedule


@given(st.integers(1, 12), st.integers(), st.integers(1, 6), st.integers(0, 60))
def test_schedule_is_repeatable_bounded_and_repaired(peers, seed, most_disturbed, events):
    names = [f"p{n}" for n in range(peers)]
    schedule, same = FaultSchedule(names, seed, most_disturbed), FaultSchedule(names, seed, most_disturbed)
    out: dict[str, str] = {}

    def happened(fault: Fault) -> None:
        if fault.what in FAULTS:
            assert fault.name not in out
            out[fault.name] = fault.what
        else:
            was = out.pop(fault.name)
            assert fault.what in REPAIRS
            assert fault.what != FRESH or was in (KILL, LEAVE), "only an ended process can restart without stored state"

    for _ in range(events):
        fault = schedule.next()
        assert fault == same.next()
        happened(fault)
        assert out == schedule.disturbed
        assert len(out) <= most_disturbed
    for fault in schedule.repair_all():
        happened(fault)
    assert out == schedule.disturbed == {}


def test_schedule_draws_every_fault_and_repair():
    schedule = FaultSchedule([f"p{n}" for n in range(48)], 0, 8)
    assert {schedule.next().what for _ in range(200)} == {*FAULTS, RESTORED, FRESH}
