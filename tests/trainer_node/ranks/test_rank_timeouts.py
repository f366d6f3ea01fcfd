"""Which ranks count as late, on a simulated clock."""

from __future__ import annotations

from trainer_node.ranks.rank_timeouts import RankTimeouts


def test_a_rank_without_progress_is_overdue_after_the_limit() -> None:
    timeouts = RankTimeouts(10.0)
    assert timeouts.overdue({0: "cell 1", 1: "cell 1"}, 0.0) == []
    assert timeouts.overdue({0: "cell 1", 1: "cell 2"}, 9.0) == []
    assert timeouts.overdue({0: "cell 1", 1: "cell 2"}, 10.0) == [0]
    assert timeouts.overdue({0: "cell 1", 1: "cell 2"}, 19.0) == [0, 1]


def test_no_limit_runs_for_a_rank_that_is_not_awaited() -> None:
    timeouts = RankTimeouts(10.0)
    timeouts.overdue({0: "cell 1"}, 0.0)
    timeouts.overdue({}, 5.0)
    assert timeouts.overdue({0: "cell 1"}, 11.0) == []
    assert timeouts.overdue({0: "cell 1"}, 21.0) == [0]


def test_zero_disables_the_limit() -> None:
    timeouts = RankTimeouts(0.0)
    timeouts.overdue({0: "cell 1"}, 0.0)
    assert timeouts.overdue({0: "cell 1"}, 1e9) == []
