"""Log lines on stderr: repeated warnings are counted in every format, with their tracebacks, and to the end."""

from __future__ import annotations

import gc
import io
import json
import logging
import re
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from p2pcast.ground.version import Version
from p2pcast.process import logs, repetition_filter
from p2pcast.process.repeated_messages import BURST, MAX_TEXT, TROUBLE_ENDED

logger = logging.getLogger("p2pcast.test")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock, root = Clock(), logging.getLogger()
    before = root.handlers[:], root.level
    monkeypatch.setattr(repetition_filter.RepetitionFilter.__init__, "__defaults__", (clock,))
    yield clock
    root.handlers[:], root.level = before


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def begun(monkeypatch: pytest.MonkeyPatch, form: str, stream: io.StringIO | None = None) -> io.StringIO:
    stream = stream or io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logs.set_up(form)
    return stream


def refused(why: str = "disk full") -> None:
    logger.warning("a: %s", why)


def documents(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("form", ["plain", "auto"])
def test_text_lines_carry_the_count(monkeypatch: pytest.MonkeyPatch, clock: Clock, form: str) -> None:
    stream = begun(monkeypatch, form, Terminal() if form == "auto" else None)
    for clock.now in range(0, 12, 2):
        refused()
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in stream.getvalue().splitlines()]
    assert len(lines) == 2
    assert lines[0].endswith("a: disk full")
    assert "a: disk full (5 more times in the last 10 s)" in lines[1]


def test_json_lines_carry_the_count_as_a_field(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = begun(monkeypatch, "json")
    for clock.now in range(0, 12, 2):
        logger.warning("%s: version %s waits", "a", Version(0, 3))
    first, second = documents(stream)
    assert (first["message"], first["version"], "more_times" in first) == ("a: version 0.3 waits", "0.3", False)
    assert second["message"] == first["message"]
    assert (second["more_times"], second["within_s"], second["version"]) == (5, 10, "0.3")


def test_floods_are_bounded_and_counted(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = begun(monkeypatch, "json")
    for n in range(1000):
        refused(f"peer-{n}")
    logs.tell_rest()
    found = documents(stream)
    assert len(found) == BURST + 1
    assert found[-1]["others_not_shown"] == 1000 - BURST - 1


def test_errors_of_other_content_are_all_shown(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = begun(monkeypatch, "plain")
    for layer in range(BURST):
        logger.error("refused: tensor model.layers.%d.weight", layer)
    assert stream.getvalue().count("refused: tensor") == BURST


def test_tracebacks_are_counted_by_their_exception(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = begun(monkeypatch, "json")
    for clock.now, name in enumerate("aaba"):
        try:
            {}[name]
        except KeyError:
            logger.exception("a probe failed")
    logs.tell_rest()
    found = documents(stream)
    assert [("KeyError: 'a'" in line["traceback"], line.get("more_times")) for line in found] == [
        (True, None),
        (False, None),
        (True, 2),
    ]


def test_lines_below_warning_are_never_counted(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = begun(monkeypatch, "plain")
    for _ in range(5):
        logger.info("version 0.1 is live")
    assert stream.getvalue().count("is live") == 5


def test_the_end_of_a_trouble_follows_its_count(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = begun(monkeypatch, "json")
    for _ in range(3):
        refused()
    logger.info("it works again", extra=TROUBLE_ENDED)
    refused()
    found = [(line["message"], line.get("more_times")) for line in documents(stream)]
    assert found == [("a: disk full", None), ("a: disk full", 2), ("it works again", None), ("a: disk full", None)]


def test_a_counted_record_keeps_no_frame_and_no_argument(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    begun(monkeypatch, "plain")

    class Payload:
        def __str__(self) -> str:
            return "x" * 10 * MAX_TEXT

    def fail() -> weakref.ref[Payload]:
        payload = Payload()
        for _ in range(2):
            try:
                raise ValueError(payload)
            except ValueError as error:
                logger.exception("failed: %s", error)
        return weakref.ref(payload)

    kept = fail()
    gc.collect()
    assert kept() is None


def test_a_line_with_wrong_arguments_reaches_the_handler(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = begun(monkeypatch, "plain")
    logger.warning("%d", "x")
    assert "--- Logging error ---" in stream.getvalue()


def test_a_finaliser_that_logs_amid_a_decision_is_heard(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = begun(monkeypatch, "plain")

    class Ended:
        def __str__(self) -> str:
            logger.error("task was destroyed")
            return "x"

    logger.warning("%s", Ended())
    assert "task was destroyed" in stream.getvalue()
