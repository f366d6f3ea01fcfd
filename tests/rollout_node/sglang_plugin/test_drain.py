"""A hold in a played scheduler. ``tests/rollout_node/sglang`` has the real one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_node.sglang_plugin import drain


class Scheduler:
    """``running``, ``waiting_queue``, ``compiling``: requests."""

    def __init__(self, running: str, waiting: str, compiling: str = "", mode: str = "null") -> None:
        self.running, self.waiting_queue = requests(running), requests(waiting)
        self.grammar_manager = SimpleNamespace(grammar_queue=requests(compiling))
        self.chunked_req: Any = None
        self.disaggregation_mode = SimpleNamespace(value=mode)

    def collect_inflight_reqs(self) -> list[Any]:
        return self.running

    def is_fully_idle(self, **how: bool) -> bool:
        return not self.running

    def waits(self) -> str:
        return "".join(request.rid for request in self.waiting_queue)


def requests(names: str) -> list[Any]:
    return [SimpleNamespace(rid=name) for name in names]


def take_first(scheduler: Scheduler) -> str | None:
    """As SGLang does: the queue is another list afterwards."""
    if not scheduler.waiting_queue:
        return None
    first, *rest = scheduler.waiting_queue
    scheduler.waiting_queue = rest
    return str(first.rid)


@pytest.fixture(autouse=True)
def without_a_hold() -> Iterator[None]:
    yield
    drain.resume(lambda scheduler: None, None)


def test_a_hold_takes_only_requests_that_had_begun() -> None:
    scheduler = Scheduler(running="a", waiting="b", compiling="c")
    drain.hold(scheduler)
    scheduler.waiting_queue = requests("xbyc")
    assert [drain.next_prefill(take_first, scheduler) for _ in range(3)] == ["b", "c", None]
    assert scheduler.waits() == "xy"


@pytest.mark.parametrize(
    ("running", "waiting", "compiling", "over"),
    [("a", "", "", False), ("", "b", "", False), ("", "", "c", False), ("", "x", "y", True)],
)
def test_a_hold_is_over_when_all_that_began_has_ended(running: str, waiting: str, compiling: str, over: bool) -> None:
    scheduler = Scheduler("a", "b", "c")
    drain.hold(scheduler)
    scheduler.running, scheduler.waiting_queue = requests(running), requests(waiting)
    scheduler.grammar_manager.grammar_queue = requests(compiling)
    assert drain.is_over(scheduler) == over


def test_a_second_hold_lets_nothing_more_begin() -> None:
    scheduler = Scheduler("a", "")
    drain.hold(scheduler)
    scheduler.waiting_queue = requests("x")
    drain.hold(scheduler)
    assert drain.next_prefill(take_first, scheduler) is None


def test_a_prefill_of_several_parts_has_begun() -> None:
    scheduler = Scheduler("", "")
    scheduler.chunked_req = requests("p")[0]
    drain.hold(scheduler)
    scheduler.waiting_queue = requests("xp")
    assert drain.next_prefill(take_first, scheduler) == "p"


def test_after_a_resume_all_are_taken_in_their_order() -> None:
    scheduler = Scheduler("", "")
    drain.hold(scheduler)
    assert drain.holds()
    assert drain.resume(lambda scheduler, request: request, scheduler, "request") == "request"
    assert not drain.holds()
    scheduler.waiting_queue = requests("xy")
    assert [drain.next_prefill(take_first, scheduler) for _ in range(2)] == ["x", "y"]


def test_a_failure_of_the_scheduler_loses_no_request() -> None:
    scheduler = Scheduler("", "")
    drain.hold(scheduler)
    scheduler.waiting_queue = requests("xy")

    def fail(scheduler: Scheduler) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        drain.next_prefill(fail, scheduler)
    assert scheduler.waits() == "xy"


def test_a_server_of_one_half_of_each_request_is_refused() -> None:
    with pytest.raises(RuntimeError, match="disaggregation-mode cannot be drained"):
        drain.hold(Scheduler("", "", mode="decode"))
    assert not drain.holds()
