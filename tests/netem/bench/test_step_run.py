"""Steps run in processes of their own. Their lines are kept, and their ends have a reason."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from netem.bench import step_run


def python(code: str, limit_s: float = 30.0, **how: object) -> step_run.EndedStep:
    return step_run.run([sys.executable, "-c", code], limit_s, **how)  # type: ignore[arg-type]


def test_lines_of_a_step_are_kept_and_shown(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd()); print(); print(os.environ.get('A'), file=sys.stderr); sys.exit(3)"
    ended = python(code, folder=tmp_path, environment={"A": "b"})
    assert (ended.code, ended.out, ended.error, ended.why) == (3, [str(tmp_path)], ["b"], "b")
    assert capfd.readouterr() == ("", "")
    assert python("import sys; sys.exit(3)").why == "exit code 3"


def test_a_step_that_takes_too_long_is_interrupted_first(tmp_path: Path) -> None:
    code = f"""
import pathlib, time
try:
    pathlib.Path({str(tmp_path / "began")!r}).touch()
    time.sleep(99)
except KeyboardInterrupt:
    pathlib.Path({str(tmp_path / "cleared")!r}).touch()
"""
    ended = python(code, 2.0)
    assert ended.why == "still running after 2 s"
    assert {path.name for path in tmp_path.iterdir()} == {"began", "cleared"}


def test_nothing_of_an_overdue_step_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_run, "END_S", 0.2)
    seconds = "987.125"
    ended = step_run.run(["sh", "-c", f"trap '' INT; sleep {seconds} & sleep {seconds}; wait"], 1.0)
    assert ended.why == "still running after 1 s"
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert seconds.encode() not in words.read_bytes()


def test_bytes_that_are_no_text_end_no_step() -> None:
    assert python("import sys; sys.stdout.buffer.write(b'\\xff\\n')").out == ["\ufffd"]


def test_every_need_that_is_missing_is_named() -> None:
    assert step_run.lacks(("json", "os")) is None
    assert step_run.lacks(("no_such", "json", "nor_this")) == "no_such is not installed; nor_this is not installed"
