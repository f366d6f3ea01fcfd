"""What counts as not getting on."""

from __future__ import annotations

from rollout_node.stalls import LATE_S, Row, Stalls

A, B = b"a" * 16, b"b" * 16


def looks(stalls: Stalls, way, start: float, end: float, **said) -> list[bytes]:
    """Twice a second, from ``start`` to before ``end``; what was stalled at the last look."""
    out: list[bytes] = []
    for n in range(int((end - start) * 2)):
        out = stalls.look(way, start + n / 2, **said)
    return out


def test_without_progress_it_is_stalled_after_its_patience_and_not_before():
    stalls = Stalls()
    assert looks(stalls, [Row(A, 3, 10.0)], 0.0, 10.5) == []
    assert looks(stalls, [Row(A, 3, 10.0)], 10.5, 11.0) == [A]
    assert stalls.look([Row(A, 4, 10.0)], 11.0) == []


def test_what_comes_later_waits_for_what_comes_before():
    stalls = Stalls()
    for n in range(60):
        assert stalls.look([Row(A, n // 10, 10.0), Row(B, 0, 10.0)], n / 2) == []
    # The first has come in whole: only now is it the second one's turn.
    assert looks(stalls, [Row(B, 0, 10.0)], 30.0, 34.0) == []
    assert looks(stalls, [Row(B, 0, 10.0)], 34.0, 42.0) == [B]


def test_what_comes_first_does_not_gain_time_by_what_comes_later():
    """A parent that sends each newer version and never the last piece of this one."""
    stalls, last = Stalls(), []
    for n in range(30):
        last = stalls.look([Row(A, 5, 10.0), Row(B, n, 10.0)], n / 2)
    assert last == [A]


def test_a_node_that_does_not_listen_or_stood_still_blames_nobody():
    stalls = Stalls()
    looks(stalls, [Row(A, 3, 10.0)], 0.0, 9.0)
    assert stalls.look([Row(A, 3, 10.0)], 9.0, deaf=True) == []
    assert stalls.look([Row(A, 3, 10.0)], 11.0) == []
    assert stalls.look([Row(A, 3, 10.0)], 11.1 + LATE_S) == []
    assert stalls.look([Row(A, 3, 10.0)], 11.2 + LATE_S) == []
