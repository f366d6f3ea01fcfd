"""A map over threads with bounded memory and results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def ordered_map(work: Callable[[T], R], items: Iterable[T], *, workers: int, name: str) -> Iterator[R]:
    """``work(item)`` for every item on ``workers`` threads; results in the order of the items.

    At most ``2 × workers`` results are in flight or waiting, so memory is bounded for a consumer of any speed. The
    first exception is raised in its result's place; items not started by then are not started.
    """
    if workers <= 1:
        yield from map(work, items)
        return
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix=name) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
