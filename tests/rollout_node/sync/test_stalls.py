"""Artifacts without progress count as stalled."""

from __future__ import annotations

from rollout_node.sync.stalls import LATE_S, StallRow, Stalls

A, B = b"a" * 16, b"b" * 16


def looks(stalls: Stalls, way, start: float, end: float, **said) -> list[bytes]:
    """Twice a second, from ``start`` to before ``end``; returns the artifacts that were stalled at the last check."""
    out: list[bytes] = []
    for n in range(int((end - start) * 2)):
        out = stalls.find(way, start + n / 2, **said)
    return out


def test_an_artifact_without_progress_stalls_after_its_patience():
    stalls = Stalls()
    assert looks(stalls, [StallRow(A, 3, 10.0)], 0.0, 10.5) == []
    assert looks(stalls, [StallRow(A, 3, 10.0)], 10.5, 11.0) == [A]
    assert stalls.find([StallRow(A, 4, 10.0)], 11.0) == []


def test_a_later_artifact_is_not_stalled_while_an_earlier_moves():
    stalls = Stalls()
    for n in range(60):
        assert stalls.find([StallRow(A, n // 10, 10.0), StallRow(B, 0, 10.0)], n / 2) == []
    # The first artifact is whole: only now does the second's time count.
    assert looks(stalls, [StallRow(B, 0, 10.0)], 30.0, 34.0) == []
    assert looks(stalls, [StallRow(B, 0, 10.0)], 34.0, 42.0) == [B]


def test_a_later_artifacts_progress_gives_an_earlier_no_time():
    """A parent that sends each newer version and never the last piece of this one."""
    stalls, last = Stalls(), []
    for n in range(30):
        last = stalls.find([StallRow(A, 5, 10.0), StallRow(B, n, 10.0)], n / 2)
    assert last == [A]


def test_a_deaf_or_suspended_node_reports_no_stall():
    stalls = Stalls()
    looks(stalls, [StallRow(A, 3, 10.0)], 0.0, 9.0)
    assert stalls.find([StallRow(A, 3, 10.0)], 9.0, deaf=True) == []
    assert stalls.find([StallRow(A, 3, 10.0)], 11.0) == []
    assert stalls.find([StallRow(A, 3, 10.0)], 11.1 + LATE_S) == []
    assert stalls.find([StallRow(A, 3, 10.0)], 11.2 + LATE_S) == []
