"""When Python looks for garbage: rarely while a process starts, as usual once it serves.

A daemon's imports make hundreds of thousands of objects, none of which is garbage. Collections among them took a
quarter of the CPU time of a hub's imports, and later one whole collection among them takes 46 ms.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

STARTING = 200_000
"""New objects between two collections while a process starts."""
USUAL = gc.get_threshold()


@contextmanager
def starting() -> Iterator[None]:
    """Collect rarely until ``end_start``, at the latest until the block ends. Enter before the imports of a command."""
    gc.set_threshold(STARTING)
    try:
        yield
    finally:
        gc.set_threshold(*USUAL)


def end_start() -> None:
    """Leave all objects that exist out of later collections, and collect as usual from now on."""
    gc.freeze()
    gc.set_threshold(*USUAL)
