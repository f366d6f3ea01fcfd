from __future__ import annotations

import threading

import pytest

from p2pcast.ordered_map import ordered_map


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_keep_the_order(workers: int) -> None:
    assert list(ordered_map(lambda x: x * x, range(100), workers=workers, name="t")) == [x * x for x in range(100)]


def test_work_ahead_is_bounded() -> None:
    started, lock = [0], threading.Lock()

    def work(x: int) -> int:
        with lock:
            started[0] += 1
        return x

    for taken in ordered_map(work, range(1000), workers=3, name="t"):
        assert started[0] <= taken + 2 * 3 + 1


@pytest.mark.parametrize("workers", [1, 3])
def test_first_error_is_raised_in_its_place(workers: int) -> None:
    results = ordered_map(lambda x: 1 // (5 - x), range(100), workers=workers, name="t")
    assert [next(results) for _ in range(5)] == [0, 0, 0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
