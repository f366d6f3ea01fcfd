"""Prints of a user's code in the log of its parent."""

from __future__ import annotations

import logging
import os

import pytest

from p2pcast.ground.plain_text import MAX_SHOWN
from p2pcast.tasks.child_processes.child_channel import ChildChannel
from p2pcast.tasks.child_processes.child_output import MOST_LINES
from p2pcast.tasks.child_processes.killable_child import KillableChild


async def test_prints_reach_the_log_as_plain_lines(
    tmp_path, monkeypatch, caplog: pytest.LogCaptureFixture, capfd
) -> None:
    lines = [r"\x1b[2J\x1b]0;title\x07ok", "x" * 5000, *(f"line {number}" for number in range(2 * MOST_LINES))]
    module = ChildChannel.__module__
    head = f"import sys\nfrom {module} import ChildChannel\nChildChannel(int(sys.argv[1]))\n"
    source = head + "".join(f'print("{line}")\n' for line in lines) + 'sys.stderr.write("the last words")\n'
    (tmp_path / "printing_child.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    caplog.set_level(logging.INFO, "p2pcast.tasks")
    child = await KillableChild.start("printing_child")
    await child.wait()
    await child.kill()
    said = [record.getMessage() for record in caplog.records]
    assert said[0].endswith("ok")
    assert all(one.isprintable() for one in said)
    assert max(map(len, said)) < MAX_SHOWN + 100
    assert len(said) <= MOST_LINES + 1
    assert capfd.readouterr() == ("", "")
