"""Installation by exec:CMD: commands that see the version, fail, hang or die."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from held_weights import LAYOUT, check, install, names, small_files

from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.ground.version import Version
from rollout_node.installers.command import CommandInstaller
from rollout_node.installers.installer import Audit
from tests.support.process_ends import wait_for_end


async def test_a_command_cannot_be_audited(shadow, tmp_path):
    installer = CommandInstaller("true", tmp_path / "scratch", small_files)
    await installer.start()
    assert installer.commit_needs_shadow
    with pytest.raises(LocalError, match="nothing to audit"):
        await installer.audit(LAYOUT, {})
    await install(installer, shadow, Version(0, 1), 1)
    await installer.check()
    assert (installer.committed, installer.ready) == (Version(0, 1), True)
    assert await installer.audit(LAYOUT, {}) == Audit(Version(0, 1), [], [t.name for t in LAYOUT.tensors])
    await installer.close()


PYTHON = shlex.quote(sys.executable)


def command(code: str) -> str:
    return f"{PYTHON} -S -c {shlex.quote(code)}"


async def test_command_sees_the_version(shadow, tmp_path):
    seen = tmp_path / "seen"
    code = (
        "import os; e = os.environ; d = e['P2PCAST_DIR'];"
        "same = open(d + '/model.safetensors', 'rb').read() == open(e['P2PCAST_SHADOW'], 'rb').read();"
        f"print(e['P2PCAST_VERSION'], e['P2PCAST_STEP'], os.path.basename(d), same, file=open({str(seen)!r}, 'a'))"
    )
    installer = CommandInstaller(command(code), tmp_path / "scratch", small_files)
    await installer.start()
    for step in (1, 2, 3):
        report = await install(installer, shadow, Version(1, step), step)
        assert report.detail["folder"] == str(tmp_path / "scratch" / f"step_{step}")
        assert (installer.committed, installer.ready) == (Version(1, step), True)
    assert seen.read_text() == "1.1 1 step_1 True\n1.2 2 step_2 True\n1.3 3 step_3 True\n"
    assert names(tmp_path / "scratch") == {"latest", "step_2", "step_3", "command.log"}
    check(tmp_path / "scratch" / "latest", Version(1, 3), 3)
    await installer.close()


async def test_a_failing_command_is_not_a_commit(shadow, tmp_path):
    good = tmp_path / "good"
    code = (
        "import os, sys\n"
        f"if os.environ['P2PCAST_STEP'] in open({str(good)!r}).read().split(): sys.exit()\n"
        "print('first'); print('engine said no', file=sys.stderr); sys.exit(3)"
    )
    good.write_text("1")
    installer = CommandInstaller(command(code), tmp_path / "scratch", small_files)
    await installer.start()
    await install(installer, shadow, Version(0, 1), 1)
    for step in (2, 3, 4, 5):
        with pytest.raises(LocalError, match=rf"version 0\.{step} not committed: exit status 3.*engine said no"):
            await install(installer, shadow, Version(0, step), step)
        assert (installer.committed, installer.ready) == (None, False)
    # The last good one stays, failed ones don't pile up.
    assert names(tmp_path / "scratch") == {"latest", "step_1", "step_4", "step_5", "command.log"}
    check(tmp_path / "scratch" / "latest", Version(0, 1), 1)
    good.write_text("1 5")
    await installer.commit(Version(0, 5))
    assert (installer.committed, installer.ready) == (Version(0, 5), True)
    assert os.readlink(tmp_path / "scratch" / "latest") == "step_5"
    await installer.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_command_without_end_is_stopped_with_its_children(shadow, tmp_path):
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import signal; signal.pause()'])\n"
        f"open({str(pids)!r} + '.part', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(pids)!r} + '.part', {str(pids)!r})\n"
        "child.wait()"
    )
    timeouts_s = iter((2, 8, 32, 128))
    while not pids.exists():  # on a busy machine the command needs more time to start its child
        timeout_s = next(timeouts_s)
        installer = CommandInstaller(command(code), tmp_path / "scratch", small_files, timeout_s=timeout_s)
        await installer.start()
        with pytest.raises(LocalError, match=f"no end after {timeout_s} s"):
            await install(installer, shadow, Version(0, 1), 1)
        assert not installer.ready
        await installer.close()
    for pid in map(int, pids.read_text().split()):
        await asyncio.to_thread(wait_for_end, pid)


async def test_cancelling_a_commit_ends_the_command(shadow, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = f"import os, signal; open({str(fifo)!r}, 'w').write(str(os.getpid())); signal.pause()"
    installer = CommandInstaller(command(code), tmp_path / "scratch", small_files)
    await installer.start()
    task = asyncio.create_task(install(installer, shadow, Version(0, 1), 1))
    pid = int(await asyncio.to_thread(fifo.read_text))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(pid)
    assert (installer.committed, installer.ready) == (None, False)
    await installer.close()


async def test_a_command_that_dies_by_a_signal(shadow, tmp_path):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    installer = CommandInstaller(command(code), tmp_path / "scratch", small_files)
    await installer.start()
    with pytest.raises(LocalError, match=f"ended by signal {int(signal.SIGKILL)}.*printed nothing"):
        await install(installer, shadow, Version(0, 1), 1)
    await installer.close()


async def test_commands_that_are_none(tmp_path):
    for text in ("", "  ", "'open"):
        with pytest.raises(UsageError):
            CommandInstaller(text, tmp_path / "scratch", small_files)
    with pytest.raises(LocalError, match="no command '/no/such'"):
        await CommandInstaller("/no/such thing", tmp_path / "scratch", small_files).start()
    # No shell: this is one word with a semicolon.
    installer = CommandInstaller("true;false", tmp_path / "scratch", small_files)
    with pytest.raises(LocalError):
        await installer.start()
