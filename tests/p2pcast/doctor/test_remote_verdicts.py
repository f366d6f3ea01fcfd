"""The rules of ``p2pcast doctor`` on a hub: tables of cases, and what holds for all facts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.doctor.machine_facts import OUTCOMES, ROLES, HubFacts
from p2pcast.doctor.remote_verdicts import judge_hub

RUN, OTHER = "ab" * 16, "cd" * 16
WELL = HubFacts(
    address="hub.example:7077",
    attempts=4,
    connects_s=(0.02, 0.021, 0.019, 0.02),
    tls=True,
    role="hub",
    run=RUN,
    in_force=True,
    token_run=RUN,
    token_encrypts=True,
    http="http://hub.example:7078",
    clock_offset_s=0.2,
    clock_error_s=0.52,
)


def outcomes(facts, window_bytes=3e6):
    return {(f.check, f.outcome) for f in judge_hub(facts, ROLES, window_bytes) if f.outcome != "ok"}


def test_a_well_reached_hub_leaves_the_way_back_and_the_throughput_unknown():
    assert outcomes(WELL) == {("way back", "unknown"), ("throughput", "unknown")}
    assert "throughput" not in {each.check for each in judge_hub(WELL, ROLES, 3e6, throughput_known=True)}


@pytest.mark.parametrize(
    ("changed", "check", "outcome"),
    [
        ({"connects_s": (), "fault": "Connection refused"}, "hub", "unfit"),
        ({"connects_s": (), "attempts": 0}, "hub", "unknown"),
        ({"connects_s": (0.02, 1.03, 0.02, 0.02)}, "hub", "warn"),
        ({"attempts": 5}, "hub", "warn"),
        ({"connects_s": (0.9, 0.9, 0.9, 0.9)}, "hub buffers", "warn"),
        ({"tls": False, "tls_fault": "wrong version number"}, "hub identity", "unfit"),
        ({"tls": None}, "hub identity", "unknown"),
        ({"plaintext": True, "token_encrypts": False}, "hub identity", "unknown"),
        ({"role": "peer"}, "hub identity", "unfit"),
        ({"role": ""}, "hub identity", "unfit"),
        ({"token_run": OTHER}, "hub identity", "unfit"),
        ({"token_encrypts": False}, "token", "unfit"),
        ({"plaintext": True}, "token", "unfit"),
        ({"in_force": False}, "hub clock", "unfit"),
        ({"clock_offset_s": 60.0}, "hub clock", "warn"),
        ({"clock_offset_s": -90000.0}, "hub clock", "unfit"),
        ({"clock_offset_s": 1.0, "clock_error_s": 9.0}, "hub clock", "unknown"),
        ({"clock_offset_s": None}, "hub clock", "unknown"),
    ],
)
def test_each_fault_is_found(changed, check, outcome):
    assert (check, outcome) in outcomes(replace(WELL, **changed))


def test_an_unreachable_hub_has_no_other_fit_findings():
    away = HubFacts(address="hub.example:7077", attempts=1, fault="timed out")
    assert {f.outcome for f in judge_hub(away, ROLES)} == {"unfit", "unknown"}


TEXTS = st.text(max_size=80)
FLAGS = st.none() | st.booleans()
FLOATS = st.none() | st.floats()
FACTS = st.builds(
    HubFacts,
    address=TEXTS,
    attempts=st.integers(0, 10),
    connects_s=st.lists(st.floats(0, 100), max_size=10).map(tuple),
    fault=TEXTS,
    plaintext=st.booleans(),
    tls=FLAGS,
    tls_fault=TEXTS,
    role=TEXTS,
    run=TEXTS,
    in_force=FLAGS,
    token_run=TEXTS,
    token_encrypts=FLAGS,
    http=TEXTS,
    http_fault=TEXTS,
    clock_offset_s=FLOATS,
    clock_error_s=FLOATS,
)


@given(FACTS, FLOATS)
def test_every_finding_is_one_short_text_with_a_remedy(facts, window_bytes):
    for each in judge_hub(facts, ROLES, window_bytes):
        assert each.outcome in OUTCOMES
        assert 0 < len(each.text.split()) <= 30
        assert "\n" not in each.text + each.remedy
        assert bool(each.remedy) == (each.outcome != "ok")
