from __future__ import annotations

import threading

import pytest

from p2pcast.ground.ordered_map import TOGETHER_BYTES, grouped, ordered_map


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


@pytest.mark.parametrize("sizes", [[], [1], [1, 1, 1], [TOGETHER_BYTES, 1, 1], [1, TOGETHER_BYTES] * 3, [1] * 50])
def test_small_neighbours_are_worked_on_together(sizes: list[int]) -> None:
    threads: list[int] = []

    def work(number: int) -> int:
        threads.append(threading.get_ident())
        return number

    found = ordered_map(work, range(len(sizes)), workers=2, name="t", nbytes=lambda n: sizes[n])
    assert list(found) == list(range(len(sizes)))
    if sum(sizes) < TOGETHER_BYTES:
        assert set(threads) <= {threading.get_ident()}
    assert [len(trip) for trip in grouped(sizes, lambda size: size)] == {
        0: [], 1: [1], 3: [1, 2] if sum(sizes) > TOGETHER_BYTES else [3], 6: [2, 2, 2], 50: [50],
    }[len(sizes)]  # fmt: skip


def test_an_error_among_small_items_is_raised_in_its_place() -> None:
    sizes = [1, 1, TOGETHER_BYTES]
    results = ordered_map(lambda n: 1 // (4 - n), range(9), workers=2, name="t", nbytes=lambda n: sizes[n % 3])
    assert [next(results) for _ in range(4)] == [0, 0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
