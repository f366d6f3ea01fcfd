"""The uplink's measurement from what children acknowledge."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from parts import FakeLink

from trainer_node.membership.uplink_meter import UplinkMeter


def child(name: str) -> tuple[Any, Any]:
    link = FakeLink(name)
    return link, SimpleNamespace(link=link, attached=True, schedules=SimpleNamespace(waiting=1))


async def test_windows_in_which_two_children_wait_are_measured() -> None:
    children, found = dict([child("a"), child("b")]), []
    meter = UplinkMeter(children, found.append)
    meter.measure(0.0)
    assert found == []
    for link in children:
        link.stripes[0].acked_bytes = 1000
    meter.measure(1.0)
    assert found == [pytest.approx(8 * 2000)]
    assert meter.uplink.bps == found[0]
    next(iter(children.values())).schedules.waiting = 0
    meter.measure(2.0)
    assert len(found) == 1, "one child alone shows its own rate"


async def test_children_that_have_not_attached_do_not_count() -> None:
    children, found = dict([child("a"), child("b")]), []
    next(iter(children.values())).attached = False
    meter = UplinkMeter(children, found.append)
    for at in range(3):
        for link in children:
            link.stripes[0].acked_bytes += 1000
        meter.measure(float(at))
    assert found == []
