"""``python -m tests.chaos.faults``: the report of outcomes, and the selection of cases. test_fault_matrix.py runs the
cases.
"""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tests.chaos.faults import Case, Outcome, _document, _show, faults

OUTCOMES = [
    Outcome(Case("kill", "head", "start"), 0.1, 2.0, 0.0, 0, ()),
    Outcome(Case("stop", "middle", "last"), 0.3, 9.0, 0.0, 65536, ("p2",)),
    Outcome(Case("stop", "hub", "last"), 1.7, 4.9, 1.5, 0, ()),
]


def test_hub_outage_does_not_count_as_delay():
    document = _document(2.0, OUTCOMES)
    assert (document["gap_median_s"], document["gap_worst_s"]) == (0.2, 0.3)
    assert [row["most_s"] for row in document["rows"]] == [3.5, 3.5, 5.0]
    assert (document["late"], document["bytes_duplicate"], document["wrong"]) == (1, 65536, 1)


def test_a_row_for_each_fault_and_position(capsys):
    _show(_document(2.0, OUTCOMES) | {"failed": ["flap tail last"]})
    shown = capsys.readouterr().out
    assert "0.10 · 2.00" in shown
    assert "1.70 · 4.90" in shown
    assert "1 cases failed: flap tail last" in shown


@pytest.mark.parametrize(
    ("outcomes", "failed", "code"), [(OUTCOMES[::2], [], 0), (OUTCOMES, [], 1), (OUTCOMES[:1], ["kill tail last"], 1)]
)
def test_failed_cases_and_other_bits_fail_the_program(monkeypatch, outcomes, failed, code):
    async def measured(*_):
        return _document(2.0, outcomes) | {"failed": failed}

    monkeypatch.setattr("tests.chaos.faults._measure", measured)
    assert CliRunner().invoke(faults, []).exit_code == code


def test_unknown_case_prefix_is_a_usage_error():
    found = CliRunner().invoke(faults, ["--only", "kil"])
    assert found.exit_code == 2
    assert "no case begins with these words" in found.output
