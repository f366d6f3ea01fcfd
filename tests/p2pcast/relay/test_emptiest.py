"""A burst goes to a stripe on which nothing waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pcast.relay.downstream import Child


@pytest.mark.parametrize(
    ("stripes", "chosen"),
    [
        ([(True, 0), (True, 0)], 0),
        ([(True, 9), (True, 0)], 1),
        ([(True, 9), (True, 5), (True, 7)], 1),
        ([(True, 5), (True, 5)], 0),
        ([(False, 0), (True, 9)], 1),
        ([(False, 0), (False, 0)], None),
        ([], None),
    ],
)
def test_the_first_without_a_queue_else_the_shortest(stripes: list[tuple[bool, int]], chosen: int | None) -> None:
    there = [SimpleNamespace(number=at, writable=writable, unsent_bytes=unsent) for at, (writable, unsent) in enumerate(stripes)]
    link: Any = SimpleNamespace(carriers=there)
    found = Child(link, 0.0).emptiest()
    assert (None if found is None else found.number) == chosen


def test_what_is_asked_for_keeps_off_the_first() -> None:
    link: Any = SimpleNamespace(carriers=[SimpleNamespace(number=at, writable=True, unsent_bytes=at) for at in range(2)])
    child = Child(link, 0.0)
    child.feeds.apart = True
    found = child.emptiest()
    assert found is not None
    assert found.number == 1
