"""Checks that hang, crash or lie, in real processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripted_sampler import jobs_of

from p2pcast.ground import limits
from p2pcast.ground.errors import UsageError
from p2pcast.rollouts.job import Job
from p2pcast.tasks import task_process
from p2pcast.tasks.child_processes.killable_child import ChildDownError, KillableChild
from p2pcast.tasks.task import ForgedPlayError
from p2pcast.tasks.task_loader import load_task
from p2pcast.tasks.task_process import CheckFailedError, TaskProcesses
from tests.support.process_ends import wait_for_end, written_pid

FOLDER = Path(__file__).parent
NAME = "hostile_task:Hostile"
TOKENS, MASK = np.array([1, 2], "<u4"), np.array([0, 1], "u1")


@pytest.fixture
async def checks(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TaskProcesses]:
    monkeypatch.chdir(FOLDER)
    found = TaskProcesses(NAME, load_task(NAME, FOLDER).hash, check_s=60, memory_bytes=limits.GIB)
    yield found
    await found.close()


def job(prompt: str) -> Job:
    return dataclasses.replace(jobs_of(load_task(NAME, FOLDER), 1)[0], prompt=prompt.encode())


async def test_a_check_returns_the_tasks_reward(checks: TaskProcesses) -> None:
    assert await checks.reward(job("good"), TOKENS, MASK) == 4.0
    assert checks.failed == 0


@pytest.mark.parametrize("prompt", ["crash", "memory", "raise", "nan", "nonsense"])
async def test_a_failed_check_costs_its_own_result_only(checks: TaskProcesses, prompt: str) -> None:
    with pytest.raises(CheckFailedError):
        await checks.reward(job(prompt), TOKENS, MASK)
    assert await checks.reward(job("good"), TOKENS, MASK) == 4.0


async def test_error_of_a_task_names_file_and_line(checks: TaskProcesses) -> None:
    with pytest.raises(CheckFailedError, match=r"ZeroDivisionError: oops \(hostile_task\.py, line 58\)"):
        await checks.reward(job("raise"), TOKENS, MASK)


async def test_a_hung_check_is_killed_with_its_children(
    checks: TaskProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_s = iter((1.0, 8.0, 64.0))
    while (child := written_pid(tmp_path / "pid")) is None:  # on a busy machine the check needs more time
        monkeypatch.setattr(checks, "_check_s", next(limits_s))
        with pytest.raises(CheckFailedError, match=f"longer than {checks._check_s:g} s"):
            await checks.reward(job(f"hang {tmp_path / 'pid'}"), TOKENS, MASK)
    await asyncio.to_thread(wait_for_end, child)
    monkeypatch.setattr(checks, "_check_s", 60.0)
    assert await checks.reward(job("good"), TOKENS, MASK) == 4.0


def handed_in(*prompts: str) -> list[Any]:
    """Results of these jobs; the sum of a result's tokens and mask is 4 more than that of the one before."""
    return [(job(prompt), SimpleNamespace(token_ids=TOKENS + 2 * n, mask=MASK)) for n, prompt in enumerate(prompts)]


@pytest.fixture
def unclaimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task of these tests plays nothing."""
    monkeypatch.setattr(task_process, "_claims", lambda result: None)


@pytest.mark.parametrize("ends", ["crash", "nonsense", "memory", "forged"])
async def test_a_check_that_ends_its_process_costs_no_check_of_the_same_request(
    checks: TaskProcesses, unclaimed: None, ends: str
) -> None:
    asked, found = handed_in("good", ends, "good", ends, "good"), list[object]()
    while len(found) < len(asked):
        part = await checks.check(asked[len(found) :])
        assert part
        found += part
    assert found[::2] == [4.0, 12.0, 20.0]
    assert all(isinstance(one, CheckFailedError | ForgedPlayError) for one in found[1::2])


async def test_a_request_ends_after_its_time_and_not_before_its_first_check(
    checks: TaskProcesses, unclaimed: None
) -> None:
    assert await checks.check(handed_in("slow", "good", "good")) == [4.0]
    found = await checks.check(handed_in("good", "slow", "good"))
    assert found == [4.0, 8.0][: len(found)]
    assert checks.failed == 0


async def test_a_check_has_its_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pure Python keeps its process; one endless call of C ends it."""
    monkeypatch.chdir(FOLDER)
    name = "hostile_task:InTime"
    found = TaskProcesses(name, load_task(name, FOLDER).hash, check_s=20)
    with pytest.raises(CheckFailedError, match=r"more than 0\.5 s of processor time"):
        await found.reward(job("spin"), TOKENS, MASK)
    assert found.failed == 0
    with pytest.raises(CheckFailedError, match="died"):
        await found.reward(job("endless"), TOKENS, MASK)
    assert await found.reward(job("good"), TOKENS, MASK) == 4.0
    await found.close()


async def test_a_cancelled_check_frees_its_place(checks: TaskProcesses, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")
    asked = asyncio.ensure_future(checks.reward(job(f"hang {tmp_path / 'pid'}"), TOKENS, MASK))
    await asyncio.to_thread((tmp_path / "pid").read_text)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert await checks.reward(job("good"), TOKENS, MASK) == 4.0


async def test_a_forged_play_is_told_apart_from_a_failed_check(checks: TaskProcesses) -> None:
    with pytest.raises(ForgedPlayError, match="not mine"):
        await checks.reward(job("forged"), TOKENS, MASK)
    assert checks.failed == 0


async def test_a_check_sees_no_token(checks: TaskProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ["P2PCAST_TOKEN", "P2PCAST_LEDGER_DATABASE", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "VLLM_API_KEY"]
    facts = ["P2PCAST_TASK_JUDGE", "HF_HOME"]
    for name in [*secrets, *facts]:
        monkeypatch.setenv(name, "value")
    for name in [*secrets, *facts]:
        assert await checks.reward(job(f"environment {name}"), TOKENS, MASK) == (name in facts), name


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, like /tmp: any user may add a file, and one did."""
    folder = tmp_path / "sticky"
    folder.mkdir()
    folder.chmod(0o1777)
    for name in ("msgpack", "numpy", "asyncio", "other_users_task"):
        module = folder / f"{name}.py"
        module.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
        if os.geteuid() == 0:
            os.chown(module, 12345, 12345)
    monkeypatch.chdir(folder)
    return tmp_path / "ran"


@pytest.mark.parametrize("path", [None, "", ":.", "relative:"])
async def test_a_check_runs_no_module_of_the_current_folder(
    planted: Path, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
    found = TaskProcesses("sums", load_task("sums").hash, check_s=60)
    wanted = jobs_of(load_task("sums"), 1)[0]
    with contextlib.suppress(ForgedPlayError):
        await found.reward(wanted, TOKENS, MASK)
    await found.close()
    assert not found.fault
    assert not await asyncio.to_thread(planted.exists)


def test_a_users_module_that_others_could_change_is_refused(planted: Path) -> None:
    with pytest.raises(UsageError, match=r"'other_users_task' is not imported: .*(all users|belongs to user)"):
        load_task("other_users_task:Theirs", Path.cwd())
    Path.cwd().chmod(0o755)
    if os.geteuid() == 0:
        with pytest.raises(UsageError, match=r"other_users_task\.py belongs to user 12345"):
            load_task("other_users_task:Theirs", Path.cwd())
    Path("mine.py").touch()
    Path("mine.py").chmod(0o666)
    with pytest.raises(UsageError, match=r"all users of this machine may write to .*mine\.py"):
        load_task("mine:Mine", Path.cwd())
    assert not planted.exists()


async def test_no_more_processes_than_allowed_run_at_once(checks: TaskProcesses) -> None:
    found = await asyncio.gather(*(checks.reward(job("good"), TOKENS, MASK) for _ in range(8)))
    assert found == [4.0] * 8
    assert len(checks._idle) == 1


async def test_a_task_that_changed_on_disk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    checks = TaskProcesses(NAME, bytes(32))
    with pytest.raises(ChildDownError, match="has changed"):
        await checks.reward(job("good"), TOKENS, MASK)
    assert "has changed" in checks.fault


async def test_a_process_that_cannot_load_the_task_says_why() -> None:
    checks = TaskProcesses("no_such_module:Task", bytes(32))
    with pytest.raises(ChildDownError, match="no_such_module"):
        await checks.reward(jobs_of(load_task("sums"), 1)[0], TOKENS, MASK)


async def test_a_process_that_starts_while_checks_are_closed_ends(
    checks: TaskProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, made, closed = KillableChild.of_task, asyncio.Queue[KillableChild](), asyncio.Event()

    async def late(*words: Any, **options: Any) -> tuple[KillableChild, Any]:
        found = await start(*words, **options)
        made.put_nowait(found[0])
        await closed.wait()
        return found

    monkeypatch.setattr(KillableChild, "of_task", late)
    asking = asyncio.create_task(checks.reward(job("good"), TOKENS, MASK))
    child = await made.get()
    await checks.close()
    closed.set()
    with pytest.raises(ChildDownError, match="checks have ended"):
        await asking
    assert not child.alive


async def test_a_process_that_cannot_be_made_is_no_fault_of_a_result(
    checks: TaskProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*words: str, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "create_subprocess_exec", full)
        with pytest.raises(ChildDownError, match="Resource temporarily unavailable"):
            await checks.reward(job("good"), TOKENS, MASK)
        with pytest.raises(ChildDownError):
            await checks.recover()
    await checks.recover()
    assert not checks.fault
    assert await checks.reward(job("good"), TOKENS, MASK) == 4.0


@pytest.mark.parametrize("spare", range(8))
async def test_a_process_for_which_files_are_short_leaves_none_open(checks: TaskProcesses, spare: int) -> None:
    one = job("good")
    held = [os.dup(0) for _ in range(64)]  # the lowest numbers are taken first, so all below the last are
    before, (soft, hard) = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1 + spare, hard))
    try:
        with pytest.raises(ChildDownError, match="Too many open files"):
            await checks.reward(one, TOKENS, MASK)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == before
    for file in held:
        os.close(file)
    await checks.recover()
    assert await checks.reward(one, TOKENS, MASK) == 4.0


async def test_a_process_that_died_while_idle_costs_no_result(checks: TaskProcesses) -> None:
    assert await checks.reward(job("good"), TOKENS, MASK) == 4.0
    [idle] = checks._idle
    os.kill(idle.child._process.pid, signal.SIGKILL)
    await idle.child._process.wait()
    assert await checks.reward(job("good"), TOKENS, MASK) == 4.0
