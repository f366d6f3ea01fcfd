"""Descriptors of a child process whose parent changes its mind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from pathlib import Path

import pytest

from p2pcast.tasks.child_processes.killable_child import KillableChild
from tests.support.process_ends import wait_for_end, written_pid
from tests.support.until import until


def _pipes() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {one for one in found if one.startswith("pipe:")}


async def _until_only(before: set[str]) -> None:
    await until(lambda: _pipes() - before, holds=lambda left: not left, check=gc.collect)


async def test_a_kill_that_is_cancelled_leaves_no_pipe_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeping_child.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    before = _pipes()
    child = await KillableChild.start("sleeping_child")
    killing = asyncio.create_task(child.kill())
    await asyncio.sleep(0)
    killing.cancel()
    await asyncio.wait([killing])
    await _until_only(before)
    await child.wait()


async def test_a_detached_process_holds_no_pipe_of_a_cancelled_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of another session outlives the kill, and holds the pipe of prints open."""
    written = tmp_path / "pid"
    (tmp_path / "detaching_child.py").write_text(
        "import subprocess, time\n"
        "left = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(written)!r}, 'w').write(str(left.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    before = _pipes()
    child = await KillableChild.start("detaching_child")
    while (detached := written_pid(written)) is None:  # noqa: ASYNC110 - a process of its own comes so far
        await asyncio.sleep(0.01)
    try:
        killing = asyncio.create_task(child.kill())
        await asyncio.sleep(0)
        killing.cancel()
        await asyncio.wait([killing])
        await _until_only(before)
        await child.wait()
    finally:
        os.kill(detached, signal.SIGKILL)


@pytest.mark.parametrize("turns", range(1, 9))
async def test_a_start_that_is_cancelled_leaves_neither_pipe_nor_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    written = tmp_path / "pid"
    (tmp_path / "sleeping_child.py").write_text(
        f"import os, time\nopen({str(written)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    before = _pipes()
    starting = asyncio.create_task(KillableChild.start("sleeping_child"))
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled():
        await starting.result().kill()
    del starting
    await _until_only(before)
    if (child := written_pid(written)) is not None:
        await asyncio.to_thread(wait_for_end, child)
