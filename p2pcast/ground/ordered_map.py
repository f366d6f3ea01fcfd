"""A map over threads with bounded memory and results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import TypeVar

from p2pcast.ground.limits import MIB

T = TypeVar("T")
R = TypeVar("R")

TOGETHER_BYTES = MIB
"""Bytes scanned in one trip to another thread: 0.09 ms. A trip takes 0.013 ms in an idle process, and more where
threads wait for the interpreter lock. Other sizes were not compared.
"""
Done = tuple[list[R], BaseException | None]
"""Results of neighbouring items, and the error that ended them."""


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def ordered_map(
    work: Callable[[T], R], items: Iterable[T], *, workers: int, name: str, nbytes: Callable[[T], int] | None = None
) -> Iterator[R]:
    """``work(item)`` for every item on ``workers`` threads; results in the order of the items. ``nbytes``: of an item's
    work; small neighbours are then worked on together, on the caller's thread if all items are small.

    At most ``2 × workers`` trips are in flight or waiting, so memory is bounded for a consumer of any speed. The first
    exception is raised in its result's place; items not started by then are not started.
    """
    if workers <= 1:
        yield from map(work, items)
        return
    trips = grouped(items, nbytes)
    first = list(islice(trips, 2))
    if nbytes is not None and len(first) < 2:
        yield from map(work, chain.from_iterable(first))
        return
    waiting: deque[Future[Done[R]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix=name) as pool:
        try:
            for trip in chain(first, trips):
                waiting.append(pool.submit(_work_on, work, trip))
                if len(waiting) >= 2 * workers:
                    yield from _results(waiting.popleft().result())
            while waiting:
                yield from _results(waiting.popleft().result())
        finally:
            for future in waiting:
                future.cancel()


def grouped(items: Iterable[T], nbytes: Callable[[T], int] | None) -> Iterator[list[T]]:
    """Neighbours of TOGETHER_BYTES or more, in order; each item by itself without ``nbytes``."""
    together: list[T] = []
    size = 0
    for item in items:
        together.append(item)
        size += TOGETHER_BYTES if nbytes is None else nbytes(item)
        if size >= TOGETHER_BYTES:
            yield together
            together, size = [], 0
    if together:
        yield together


def _work_on(work: Callable[[T], R], items: list[T]) -> Done[R]:
    done: list[R] = []
    try:
        done.extend(map(work, items))
    except BaseException as error:  # noqa: BLE001 - raised again where the results are taken
        return done, error
    return done, None


def _results(done: Done[R]) -> Iterator[R]:
    results, error = done
    yield from results
    if error is not None:
        raise error
