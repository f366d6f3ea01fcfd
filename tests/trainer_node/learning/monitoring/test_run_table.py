from __future__ import annotations

import io
import logging
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from rich.logging import RichHandler

from tests.trainer_node.learning import run_events as events
from trainer_node.learning.monitoring import run_table
from trainer_node.learning.monitoring.run_record import RunRecord, StepEvent
from trainer_node.learning.monitoring.run_screen import REFRESH_S, RunScreen
from trainer_node.learning.monitoring.run_table import event_line, run_picture, sparkline, steps_table, summary_lines

WIDTHS = [80, 160]
FLOATS = st.none() | st.floats(allow_nan=False, allow_infinity=False)


def rendered(picture: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=50, legacy_windows=False)
    with console.capture() as capture:
        console.print(picture)
    return [line.rstrip() for line in capture.get().splitlines()]


def terminal(height: int = 40, width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, legacy_windows=False)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# -- the table


@pytest.mark.parametrize("width", WIDTHS)
def test_every_number_is_on_its_step_row(width: int):
    record = events.record_of(events.resumed_run())
    lines = rendered(run_picture(record, width=width, rows=5), width)
    assert all(len(line) <= width for line in lines)
    heading = lines[0].split()
    assert heading[:2] == ["step", "reward"]
    for line, step in zip(lines[2:7], record.steps[-5:], strict=True):
        columns = {column.name: column.cell(step) for column in run_table.COLUMNS}
        assert line.split() == [columns[name] for name in heading]


def test_a_wide_screen_shows_every_column():
    record = events.record_of(events.stretch(1, 3))
    assert rendered(steps_table(record.steps, 160), 160)[0].split() == [column.name for column in run_table.COLUMNS]
    narrow = rendered(steps_table(record.steps, 80), 80)[0].split()
    assert {"reward", "stale", "KL", "ratio", "bubble", "tokens/s"} <= set(narrow)


@given(
    width=st.sampled_from([80, 160]),
    steps=st.lists(
        st.builds(
            StepEvent,
            step=st.integers(0, 2**40),
            reward=FLOATS,
            kl_sampler=FLOATS,
            ratio_mean=FLOATS,
            ratio_max=FLOATS,
            clip_share=FLOATS,
            bubble=FLOATS,
            wait_s=FLOATS,
            train_s=FLOATS,
            tokens=st.none() | st.integers(-(2**60), 2**60),
            staleness=st.dictionaries(st.integers(0, 9999), st.integers(0, 2**50), max_size=3),
        ),
        max_size=4,
    ),
)
def test_extreme_numbers_neither_wrap_nor_end_in_an_ellipsis(width: int, steps: list[StepEvent]):
    lines = rendered(steps_table(steps, width), width)
    assert len(lines) == 2 + len(steps)
    assert not any("…" in line for line in lines)
    assert all(len(line) <= width for line in lines)
    for step in steps:
        assert "\n" not in event_line(step)


@pytest.mark.parametrize("width", [*WIDTHS, 1, 20])
@pytest.mark.parametrize("documents", [[], [events.start()], [{"event": "step", "step": 1}]])
def test_runs_without_numbers_are_shown(width: int, documents: list[events.Document]):
    assert rendered(run_picture(events.record_of(documents), width=width), width)


# -- the lines below


@pytest.mark.parametrize("width", WIDTHS)
def test_lines_below_the_table_fit(width: int):
    record = events.record_of(events.resumed_run()[:-1])
    picture = run_picture(record, width=width, rows=3, doing="waiting for a batch")
    below = rendered(picture, width)[5:]
    assert below[1:] == [
        "version     1.40 live after 0.90s on 2 engines, 383 kB, 26% changed",
        "evaluation  0.400 at 1.40, 127 of 128 problems, digits 2 64, digits 3 63",
        "probe       KL 1.0e-06 at 1.40, 1 x the floor, vllm-a",
        "probe       KL 1.0e-06 at 0.40, 1 x the floor, vllm-b",
        "checkpoint  step 40, 4.80 MB, 0.40s",
        "resumed     once, last at step 20; 7 steps superseded",
        "now         waiting for a batch",
    ]
    assert re.fullmatch(r"reward      [▁-█]{40}  0\.\d+ to 0\.\d+", below[0])


def test_the_newest_alarm_of_each_engine_comes_first():
    probes = [events.probe(2, f"engine-{i}") for i in range(6)] + [events.probe(4, "engine-5", 1e-3)]
    shown = [line for line in summary_lines(events.record_of(probes)) if "KL" in line or "more" in line]
    assert shown[0] == "ALARM       KL 1.0e-03 at 0.4, 1e+03 x the floor, engine-5"
    assert len(shown) == run_table.MOST_ENGINES + 1
    assert shown[-1].strip() == "and 2 engines more"


def test_names_are_text_and_no_markup():
    record = events.record_of([events.probe(2, "[red]e[/]", 1e-3)])
    assert any(line.endswith("[red]e[/]") for line in rendered(run_picture(record, width=80), 80))


def test_each_event_has_a_line():
    record = events.record_of([events.start(), events.publish(2, live_s=None)])
    assert event_line(record.starts[0]) == "start at step 0, branch 0: sums-0.4M, 412k parameters"
    assert event_line(record.publications[0]) == "version 0.2 not live in time on 2 engines, 383 kB, 26% changed"
    for document in events.resumed_run():
        event = record.add(document)
        assert event is not None
        assert "\n" not in event_line(event)


# -- numbers


def test_sparklines_reach_from_the_least_to_the_greatest():
    assert sparkline([0.0, 0.5, None, 1.0]) == "▁▅ █"
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([None]) == " "
    assert sparkline([]) == ""
    assert sparkline([-1.7e308, 1.7e308]) == "▁█"


@given(st.lists(FLOATS))
def test_sparklines_have_a_character_for_each_value(values: list[float | None]):
    line = sparkline(values)
    assert len(line) == len(values)
    assert [c == " " for c in line] == [value is None for value in values]


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (run_table.fixed, 0.12345, "0.123"),
        (run_table.fixed, 123456.0, "1.2e+05"),
        (run_table.percent, 0.0, "0%"),
        (run_table.percent, 0.00034, "0.034%"),
        (run_table.percent, 0.0996, "10%"),
        (run_table.percent, 0.126, "13%"),
        (run_table.seconds, 0.123, "0.12s"),
        (run_table.seconds, 125.0, "125s"),
        (run_table.seconds, 36000.0, "10h"),
        (run_table.short, 999.6, "1.00k"),
        (run_table.short, 999.4, "999"),
        (run_table.short, 12345.0, "12.3k"),
        (run_table.short, 1.5e15, "1.50e+03T"),
        (run_table.size, 40, "40 B"),
        (run_table.size, 383_000, "383 kB"),
        (run_table.size, None, "-"),
    ],
)
def test_numbers_are_short(function: object, value: float | None, text: str):
    assert callable(function)
    assert function(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_fit_into_a_column(value: float):
    for function in (run_table.fixed, run_table.scientific, run_table.percent, run_table.short):
        assert len(function(value)) <= 11
    assert float(run_table.scientific(value)) == pytest.approx(value, rel=0.06) or not math.isfinite(value * 1.1)


# -- the screen


def test_output_that_is_no_terminal_has_a_line_for_each_event():
    console = Console(file=io.StringIO(), force_terminal=False, width=40)
    record = RunRecord()
    with RunScreen(console, record, clock=lambda: 0.0) as screen:
        screen.doing("waiting for a batch")
        for document in [events.start(), *events.stretch(1, 2), events.end(2)]:
            event = record.add(document)
            assert event is not None
            screen.show(event)
    lines = output(console).splitlines()
    assert [line.split()[0] for line in lines] == ["start", "step", "step", "version", "probe:", "probe:", "end"]
    assert all("tokens/s" in line for line in lines if line.startswith("step"))


def test_a_terminal_is_redrawn_only_so_often(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    record = RunRecord()
    screen = RunScreen(terminal(), record, clock=lambda: now[0])
    drawn: list[float] = []
    assert screen._live is not None
    monkeypatch.setattr(screen._live, "update", lambda *_, **__: drawn.append(now[0]))
    for tick in range(100):
        now[0] = tick * REFRESH_S / 10
        event = record.add(events.step(tick))
        assert event is not None
        screen.show(event)
    assert len(drawn) == pytest.approx(10, abs=1)
    screen.refresh(now=True)
    assert len(drawn) == pytest.approx(11, abs=1)


def test_a_terminal_shows_the_last_state_at_the_end():
    console = terminal()
    record = RunRecord()
    with RunScreen(console, record, clock=lambda: 0.0) as screen:
        for document in events.resumed_run():
            event = record.add(document)
            assert event is not None
            screen.show(event)
    text = output(console)
    assert "start at step 20, branch 1" in text
    last = text[text.rindex("reward    ") :]
    assert "the ledger's last step" in last


def test_alarms_stay_above_the_table():
    console = terminal()
    record = RunRecord()
    with RunScreen(console, record) as screen:
        event = record.add(events.probe(2, kl=1e-3))
        assert event is not None
        screen.show(event)
    assert "probe ALARM: KL 1.0e-03 at 0.2" in output(console)


def test_log_lines_stay_above_the_table(monkeypatch: pytest.MonkeyPatch):
    console, before = terminal(), terminal()
    handler = RichHandler(console=before)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    record = events.record_of(events.stretch(1, 2))
    with RunScreen(console, record):
        logging.getLogger("p2pcast.learner").error("a line of the log")
    text = output(console)
    assert text.index("a line of the log") < text.rindex("reward    ")
    assert output(before) == ""
    assert handler.console is before


@pytest.mark.parametrize("height", [1, 8, 14, 24, 60])
def test_the_table_is_as_long_as_the_terminal_allows(height: int):
    record = events.record_of(events.resumed_run())
    screen = RunScreen(terminal(height), record)
    lines = rendered(screen._picture(), 100)
    rows = sum(1 for line in lines if re.match(r" *\d+ +0\.", line))
    assert 1 <= rows <= run_table.ROWS
    assert rows == 1 or len(lines) < height
