"""Repeated messages are counted, changes are shown at once, floods and memory are bounded, and no count is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.process.repeated_messages import (
    BURST,
    FRESH_S,
    MAX_PLACES,
    MAX_TEXTS,
    PAUSES_S,
    REFILL_S,
    Line,
    RepeatedMessages,
    note,
    span,
)

HERE, ELSEWHERE = ("a.py", 1), ("b.py", 1)


def heard(messages: RepeatedMessages[str], *said: tuple[float, str]) -> list[tuple[float, str, int]]:
    """(time, text, repetitions) of each line that is shown."""
    return [(now, line.item, line.more) for now, text in said for line in messages.take(HERE, text, text, now)]


def test_repetitions_are_counted_with_growing_pauses() -> None:
    every = 2
    said = [(float(now), "the disk is full") for now in range(0, 9000, every)]
    shown = heard(RepeatedMessages(), *said)
    times = [0.0, 10.0, 70.0, 670.0, 4270.0, 7870.0]
    assert [now for now, _, _ in shown] == times
    assert [more for _, _, more in shown] == [0, *(int(b - a) // every for a, b in pairwise(times))]
    assert len(PAUSES_S) == 4


def test_a_changed_text_is_shown_at_once() -> None:
    messages: RepeatedMessages[str] = RepeatedMessages()
    assert heard(messages, (0, "full"), (1, "full"), (2, "refused"), (3, "full"), (4, "refused")) == [
        (0, "full", 0),
        (2, "refused", 0),
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("needs 3.21 GiB more and 0 are free", "needs 3.25 GiB more and 12 are free"),
        ("trying for another 19 s", "trying for another 7 s"),
        ("late: 1,204 (of 2)", "late: 900 (of 3)"),
    ],
)
def test_numbers_alone_are_no_change(one: str, other: str) -> None:
    assert heard(RepeatedMessages(), (0, one), (1, other)) == [(0, one, 0)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("tensor model.layers.1.weight refused", "tensor model.layers.2.weight refused"),
        ("version 0.1 refused", "version 0.2 refused"),
        ("no answer of 10.0.0.1", "no answer of 10.0.0.2"),
        ("no answer of h:7077", "no answer of h:7078"),
        ("skipped step_1", "skipped step_2"),
        ("job 00ff12 failed", "job 00ff13 failed"),
        ("/disk/1/x is full", "/disk/2/x is full"),
    ],
)
def test_names_with_other_numbers_are_other_texts(one: str, other: str) -> None:
    assert heard(RepeatedMessages(), (0, one), (1, other)) == [(0, one, 0), (1, other, 0)]


def test_the_same_text_of_another_place_is_shown() -> None:
    messages: RepeatedMessages[str] = RepeatedMessages()
    assert messages.take(HERE, "x", "1", 0) == [Line("1")]
    assert messages.take(ELSEWHERE, "x", "2", 0) == [Line("2")]


def test_a_text_after_a_long_silence_is_news() -> None:
    messages: RepeatedMessages[str] = RepeatedMessages()
    heard(messages, *((float(now), "x") for now in range(700)))
    again = 699 + FRESH_S
    assert heard(messages, (again, "x"))[-1][:2] == (again, "x")
    assert [now for now, _, _ in heard(messages, (again + 1, "x"), (again + PAUSES_S[0], "x"))] == [again + PAUSES_S[0]]


def test_the_end_of_a_trouble_tells_its_count_and_makes_the_next_one_news() -> None:
    messages: RepeatedMessages[str] = RepeatedMessages()
    heard(messages, (0, "x"), (1, "x"), (2, "x"))
    messages.take(ELSEWHERE, "y", "y", 2)
    messages.take(ELSEWHERE, "y", "y", 3)
    assert messages.ended(HERE[0]) == [Line("x", more=2, within_s=2)]
    assert heard(messages, (4, "x")) == [(4, "x", 0)]
    assert messages.take(ELSEWHERE, "y", "y", 5) == []


def test_a_count_is_told_with_the_next_message_after_its_pause() -> None:
    messages: RepeatedMessages[str] = RepeatedMessages()
    heard(messages, (0, "x"), (1, "x"))
    assert messages.overdue(PAUSES_S[0] - 1) == []
    assert messages.overdue(PAUSES_S[0]) == [Line("x", more=1, within_s=1)]
    assert messages.overdue(PAUSES_S[0] + 1) == []


def test_a_flood_of_new_texts_is_shown_at_a_bounded_rate() -> None:
    messages: RepeatedMessages[str] = RepeatedMessages()
    shown = [line for n in range(6000) for line in messages.take(HERE, f"peer-{n}", f"peer-{n}", n / 10)]
    assert [line.item for line in shown[:BURST]] == [f"peer-{n}" for n in range(BURST)]
    later = shown[BURST:]
    assert 1 <= len(later) <= 600 / REFILL_S
    assert all(line.others for line in later)
    assert BURST + sum(1 + line.others for line in [*later, *messages.rest()]) == 6000
    assert messages.take(ELSEWHERE, "z", "z", 600) == [Line("z")]  # another place's errors are not lost in it


def test_a_flood_that_ended_leaves_room_for_the_next_text() -> None:
    messages: RepeatedMessages[str] = RepeatedMessages()
    for n in range(100):
        messages.take(HERE, f"peer-{n}", f"peer-{n}", 0)
    [late] = messages.overdue(REFILL_S)
    assert (late.item, late.others) == ("peer-99", 100 - BURST - 1)
    assert messages.take(HERE, "news", "news", 3 * REFILL_S) == [Line("news")]


def test_memory_is_bounded_and_no_count_is_lost() -> None:
    messages: RepeatedMessages[str] = RepeatedMessages()
    told = [
        line
        for n in range(2 * MAX_TEXTS)
        for _ in range(2)
        for line in messages.take((f"{n // BURST}.py", 1), f"x-{n}", "x", 0)
    ]
    assert len(messages._texts) == MAX_TEXTS
    assert sum(line.more for line in [*told, *messages.rest()]) == 2 * MAX_TEXTS
    for n in range(2 * MAX_PLACES):
        messages.take((f"more-{n}.py", 1), "x", "x", 0)
    assert len(messages._rates) == MAX_PLACES


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abcdefgh"), st.floats(0, 900)), max_size=300))
def test_each_message_is_shown_or_counted_once(said: list[tuple[int, str, float]]) -> None:
    messages: RepeatedMessages[str] = RepeatedMessages()
    now, lines = 0.0, []
    for line, text, wait_s in said:
        now += wait_s
        lines += messages.take(("f.py", line), text, text, now)
    lines += messages.rest()
    assert sum((line.more or 1) + line.others for line in lines) == len(said)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (Line("x"), ""),
        (Line("x", more=1, within_s=3.2), " (1 more time in the last 3 s)"),
        (Line("x", more=299, within_s=600), " (299 more times in the last 10 min)"),
        (Line("x", others=4, within_s=60), " (4 other messages of this kind in the last 1 min not shown)"),
    ],
)
def test_note_names_count_and_time(line: Line[str], text: str) -> None:
    assert note(line) == text


def test_spans_are_read_by_people() -> None:
    found = [span(s) for s in (0, 59, 60, 90, 120, 3600, 7200)]
    assert found == ["1 s", "59 s", "1 min", "90 s", "2 min", "1 h", "2 h"]
