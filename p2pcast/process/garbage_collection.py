"""Controls Python's garbage collector: it runs rarely while a process starts, and as usual once the process serves.

A daemon's imports create hundreds of thousands of objects, none of which is garbage. Collections took a quarter of the
CPU time of a hub's imports, and each later full collection would take 46 ms.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

STARTING = 200_000
"""Number of new objects between two collections while a process starts."""
USUAL = gc.get_threshold()


@contextmanager
def starting() -> Iterator[None]:
    """Collect rarely until ``end_start`` or the end of the block. Enter before a command's imports."""
    gc.set_threshold(STARTING)
    try:
        yield
    finally:
        gc.set_threshold(*USUAL)


def end_start() -> None:
    """Exclude all existing objects from later collections, and collect as usual from now on."""
    gc.freeze()
    gc.set_threshold(*USUAL)
