"""Counts of what happens become a bounded number of events."""

from __future__ import annotations

from collections import Counter
from typing import Any

from p2pcast.process.events import Events
from trainer_node.ledger_server.ledger_events import MAX_NAMED, LedgerEvents


def told(events: Events) -> list[tuple[str, dict[str, Any]]]:
    return [(event.kind, dict(event.facts)) for event in events.after(0, 1000)[1]]


async def test_many_happenings_of_a_second_are_one_event_each() -> None:
    events = Events()
    acts = LedgerEvents(events, 60.0)
    assert not acts.add(Counter({("results_rejected", "w", "stale"): 1}))
    assert not acts.add(Counter({("results_rejected", "w", "stale"): 2, ("results_rejected", "w", "forged"): 1}))
    assert acts.add(Counter({("leases_expired", "w"): 3}))
    assert acts.add(Counter({("groups_dropped", "equal rewards"): 4}))
    await acts.emit()
    await acts.emit()
    assert told(events) == [
        ("groups_dropped", {"groups": 4, "reason": "equal rewards"}),
        ("leases_expired", {"worker": "w", "leases": 3}),
        ("results_rejected", {"worker": "w", "reason": "forged", "results": 1}),
        ("results_rejected", {"worker": "w", "reason": "stale", "results": 3}),
    ]


async def test_so_many_faulty_prompts_of_a_second_are_named() -> None:
    events = Events()
    acts = LedgerEvents(events, 60.0)
    acts.add(Counter({("prompt_rejected", f"prompt {number}", "no bytes"): 1 for number in range(MAX_NAMED + 5)}))
    await acts.emit()
    named = [({"prompt": f"prompt {number}", "why": "no bytes"}) for number in range(MAX_NAMED)]
    more = {"prompt": "5 more", "why": "within the same second"}
    assert told(events) == [("prompt_rejected", facts) for facts in (*named, more)]


def test_a_worker_that_is_silent_is_lost_once_and_may_come_back() -> None:
    events = Events()
    acts = LedgerEvents(events, 60.0)

    def rows(**silent_s: float) -> list[dict[str, Any]]:
        return [{"worker": name * 2, "name": name, "silent_s": silent} for name, silent in silent_s.items()]

    acts.update_workers(rows(old=90.0, a=1.0, b=1.0))
    acts.update_workers(rows(old=91.0, a=61.0, b=61.0))
    acts.update_workers(rows(old=92.0, a=62.0, b=62.0))
    acts.update_workers(rows(old=0.0, a=0.0))
    assert Counter((kind, facts["worker"]) for kind, facts in told(events)) == Counter(
        [("worker_lost", "a"), ("worker_lost", "b"), ("worker_back", "old"), ("worker_back", "a")]
    )
