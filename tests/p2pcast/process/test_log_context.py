"""Log lines in JSON name the run, the daemon, and the version or job that they are about."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from p2pcast.ground.version import Version
from p2pcast.process import log_context
from p2pcast.process.log_context import about_job, note_daemon
from p2pcast.process.logs import _Json
from p2pcast.process.trace_ids import version_trace

RUN, JOB = "ab" * 16, bytes(range(16))


@pytest.fixture(autouse=True)
def daemon(monkeypatch) -> None:
    monkeypatch.setattr(log_context, "_DAEMON", {})


def line(message: str, *arguments: Any) -> dict[str, Any]:
    record = logging.LogRecord("p2pcast.x", logging.INFO, "", 0, message, arguments, None)
    found: dict[str, Any] = json.loads(_Json().format(record))
    return {key: value for key, value in found.items() if key not in ("time", "level", "logger")}


def test_a_line_is_about_its_version() -> None:
    note_daemon(run=RUN, role="hub", name="h")
    assert line("%s: version %s", "e", Version(0, 3)) == {
        "message": "e: version 0.3",
        "run": RUN,
        "role": "hub",
        "name": "h",
        "version": "0.3",
        "trace_id": f"{version_trace(RUN, '0.3'):032x}",
    }


def test_a_line_before_the_run_is_known_has_no_trace() -> None:
    assert line("version %s", Version(0, 3)) == {"message": "version 0.3", "version": "0.3"}
    assert line("no version") == {"message": "no version"}
    assert line("%(a)s", {"a": 1}) == {"message": "1"}


async def test_lines_of_a_play_and_of_its_tasks_are_about_the_job() -> None:
    async def inner() -> dict[str, Any]:
        return line("inner")

    with about_job(JOB):
        found = [line("outer"), await asyncio.create_task(inner())]
    assert [one["job"] for one in found] == [JOB.hex()] * 2
    assert {one["trace_id"] for one in found} == {JOB.hex()}
    assert "job" not in line("after")
