"""The ring of events: ids, the events for each reader, and their form on the wire."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground import limits
from p2pcast.process.events import Events, Missed

NOON_S = 1_800_000_000.0
NOON = int(NOON_S * 1e6)


def ring(count: int = 0, kept: int = 8, clock_s: float = NOON_S) -> Events:
    events = Events(lambda: clock_s, kept)
    for n in range(count):
        events.emit("counted", n=n)
    return events


def seen(events: Events, since: int, most: int = 100) -> list[int]:
    return [e.facts["n"] for e in events.after(since, most)[1]]


def test_ids_grow_by_one():
    events = ring(3)
    missed, found = events.after(0)
    assert missed is None
    assert [e.id for e in found] == [NOON + 1, NOON + 2, NOON + 3]
    assert events.newest == NOON + 3
    assert events.emitted == 3


def test_ids_of_a_restarted_process_are_newer():
    before = ring(1000)
    after = ring(clock_s=NOON_S + 1.0)
    after.emit("counted", n=0)
    assert after.newest > before.newest


def test_a_reader_gets_the_events_after_its_last_id():
    events = ring(5)
    assert seen(events, NOON + 3) == [3, 4]
    assert seen(events, events.newest) == []
    assert seen(events, 0) == [0, 1, 2, 3, 4]
    assert seen(events, 0, most=2) == [0, 1]


def test_a_reader_behind_the_ring_gets_a_missed_event():
    events = ring(20)
    missed, found = events.after(NOON + 5)
    assert missed == Missed(NOON + 5, NOON + 12, restarted=False)
    assert [e.facts["n"] for e in found] == list(range(12, 20))
    # Just not passed: the next one is still there.
    assert events.after(NOON + 12)[0] is None
    # A reader that asks for all stored events misses none.
    assert events.after(0)[0] is None


def test_a_reader_of_an_earlier_process_gets_a_missed_event():
    events = ring(2)
    missed, found = events.after(NOON - 7)
    assert missed == Missed(NOON - 7, NOON, restarted=True)
    assert len(found) == 2
    assert ring().after(NOON - 7) == (missed, [])


def test_an_id_that_was_never_given_starts_over():
    """The clock was set back between two processes."""
    events = ring(2)
    missed, found = events.after(NOON + 1_000)
    assert missed == Missed(NOON + 1_000, NOON, restarted=True)
    assert len(found) == 2


@given(st.integers(0, 40), st.integers(1, 10), st.integers(-5, 45), st.integers(1, 50))
def test_a_reader_gets_everything_that_is_there_once_and_in_order(count, kept, since, most):
    events = ring(count, kept)
    at, got, told = NOON + since, [], []
    for _ in range(100):
        missed, found = events.after(at, most)
        if missed is None and not found:
            break
        if missed is not None:
            told.append(missed)
            at = missed.to
        got += [e.id for e in found]
        at = found[-1].id if found else at
    assert at == events.newest or at > events.newest
    assert got == [
        e
        for e in range(NOON + 1, NOON + count + 1)
        if e > max(NOON + count - kept, 0) and (e > NOON + since or since > count)
    ]
    assert len(told) <= 1


def test_an_event_is_a_server_sent_event():
    events = ring()
    events.emit("left", peer="a", why="lost:\nno answer", version=None)
    (event,) = events.after(0)[1]
    head, kind, data, *rest = event.to_sse().decode().split("\n")
    assert (head, kind, rest) == (f"id: {NOON + 1}", "event: left", ["", ""])
    assert json.loads(data.removeprefix("data: ")) == {
        "time": NOON_S,
        "peer": "a",
        "why": "lost:\nno answer",
        "version": None,
    }


def test_a_gap_is_a_missed_event():
    text = Missed(3, 9, restarted=True).to_sse().decode()
    assert text == 'id: 9\nevent: missed\ndata: {"since": 3, "to": 9, "restarted": true}\n\n'


def test_long_texts_are_cut_and_odd_facts_do_not_fail():
    events = ring()
    events.emit("odd", text="x" * 5000, raw=b"\xff", deep={1: object()})
    (event,) = events.after(0)[1]
    assert len(event.facts["text"]) == limits.MAX_EVENT_TEXT + 1
    assert b"\n\n" not in event.to_sse()[:-2]


def test_memory_is_bounded_by_the_ring():
    events = ring(10_000, kept=8)
    assert len(events.after(0, 1_000)[1]) == 8


async def test_every_event_notifies_waiting_tasks():
    events = ring()
    heard = []

    async def listen() -> None:
        heard.append(await events.wakeup.wait(600.0))

    async with asyncio.TaskGroup() as group:
        group.create_task(listen())
        await asyncio.sleep(0)
        events.emit("counted", n=1)
    assert heard == [True]
