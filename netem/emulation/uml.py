"""Work inside user-mode Linux: a kernel that runs as a process and has netem even if this machine's kernel has not.

Promises:

- The guest sees this machine's files read-only, and its own memory as /dev/shm (for temporary files) and /run.
- It has no access to this machine's networks.

It runs in its own process namespace, whose first process the kernel kills with the process that booted the guest, so no
process remains. The work folder is removed at the end; the folder of a killed process is removed at the next boot.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from p2pcast.ground.errors import LocalError, UsageError

KERNEL = "linux.uml"
MEMORY_MIB = 3072
"""The guest's touched memory comes from this machine, in /dev/shm or the folder for temporary files."""
PREFIX = "p2pcast-uml-"
"""Of work folders; followed by the process id."""
ROOT = Path(__file__).parents[2]
TAIL_LINES = 4
IDLE_MEASURE_S = 0.5
"""Time over which the idle time of each core is measured, in seconds."""
SILENCE_S = 600.0
"""A guest without output for so long counts as hung. One result may cover ten versions on slow links and a busy
machine.
"""

REGISTERS = "ptrace set fp regs failed"
"""In the kernel's output, where it has no room for the registers of this processor."""
UNFIT = (
    "this user-mode Linux has no room for the registers of this processor (AMX, as a rule): use a newer one (7.2 of a "
    "newer Debian works), or a machine of another kind"
)
SYSTEM_CALLS = "seccomp=auto"
"""How the kernel catches its programs' system calls, since Linux 6.16: by signals if it can, otherwise by ptrace, which
is slower. Older kernels ignore the word. With signals a program can read the guest's memory; ours may.
"""
BOOT_S = 60.0
"""Limit of a boot without work; it takes a second."""

INIT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH='{path}' PYTHONDONTWRITEBYTECODE=1 HOME=/dev/shm TMPDIR=/dev/shm
exec '{python}' -m netem.emulation.guest '{folder}'
"""


def results(work: str, argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The results of ``work`` (``module:function``), called with ``argument`` inside the guest, each as soon as it is
    there; all values pass as JSON.

    Raises LocalError if there is no such kernel, if the kernel ends early, or if the work raised; UsageError if the
    work raised one.
    """
    with _folder() as folder:
        (folder / "work.json").write_text(json.dumps({"work": work, "argument": argument}))
        init = folder / "init"
        init.write_text(INIT.format(path=ROOT, python=sys.executable, folder=folder))
        init.chmod(0o700)
        yield from _boot(folder)


def runs_programs() -> bool:
    """Whether the kernel can run a program on this processor: it is booted once. A kernel that ends early for another
    reason counts as one that can.
    """
    with _folder() as folder:
        files = ("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "init=/bin/true")
        command = ["setpriv", "--pdeathsig", "KILL", KERNEL, "mem=64M", *files, f"uml_dir={folder}/", "con=null"]
        try:
            done = subprocess.run(
                [*command, "con0=null,fd:1", "quiet"],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=BOOT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return True
    return REGISTERS.encode() not in done.stdout


@contextmanager
def _folder() -> Iterator[Path]:
    parent = Path(tempfile.gettempdir())
    if re.search(r"[\s']", f"{parent}{ROOT}{sys.executable}"):
        raise UsageError(
            f"user-mode Linux does not accept paths with blanks or quotes: {parent}, {ROOT}, {sys.executable}"
        )
    for old in parent.glob(f"{PREFIX}*"):
        pid = old.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as name:
        yield Path(name)


def _command(folder: Path, serial: int) -> list[str]:
    root = os.geteuid() == 0
    return [
        *("setpriv", "--pdeathsig", "KILL"),
        *("taskset", "--cpu-list", str(_core())),
        *("unshare", *([] if root else ["--user", "--map-root-user"]), "--pid", "--fork", "--kill-child"),
        # The first process of a namespace cannot end itself by a signal, as the kernel does after a panic.
        *("sh", "-c", '"$@"; exit', "sh"),
        KERNEL,
        f"mem={MEMORY_MIB}M",
        *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={folder}/init", SYSTEM_CALLS),
        *(f"uml_dir={folder}/", "umid=guest", "con=null", "con0=null,fd:1", f"ssl0=null,fd:{serial}", "quiet"),
    ]


def _core() -> int:
    """The most idle core now, not counting background work. The kernel and its programs wait for each other at every
    system call. Handing over on one core is twice as fast as between cores, and the guest has one CPU anyway.
    """

    def free() -> dict[int, int]:
        lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
        # Idle time, and time of low-priority processes.
        return {int(w[0][3:]): int(w[2]) + int(w[4]) for w in lines if w[0].startswith("cpu") and w[0] != "cpu"}

    allowed, before = os.sched_getaffinity(0), free()
    time.sleep(IDLE_MEASURE_S)
    return max(((ticks - before[core], core) for core, ticks in free().items() if core in allowed))[1]


def _boot(folder: Path) -> Iterator[dict[str, Any]]:
    if missing := [tool for tool in (KERNEL, "setpriv", "taskset", "unshare") if shutil.which(tool) is None]:
        raise LocalError(f"there is no {' and no '.join(missing)} command: apt-get install user-mode-linux util-linux")
    reading, writing = os.pipe()
    # Output of the kernel and the work for people; shown only after an error.
    with tempfile.TemporaryFile() as console, open(reading, "rb", buffering=0) as lines:
        try:
            guest = subprocess.Popen(
                _command(folder, writing), stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT,
                pass_fds=[writing], start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(writing)
        try:
            while select.select([lines], [], [], SILENCE_S)[0]:
                if not (line := lines.readline()):
                    raise LocalError(f"user-mode Linux ended early: {_why(console)}")
                said: dict[str, Any] = json.loads(line)
                if "result" in said:
                    yield said["result"]
                    continue
                if said.get("error") is not None:
                    raise (UsageError if said.get("usage") else LocalError)(said["error"])
                return
            raise LocalError(f"user-mode Linux has been silent for {SILENCE_S:.0f} s")
        finally:
            guest.kill()
            guest.wait()


def _why(console: IO[bytes]) -> str:
    """The last lines before the kernel's own trace."""
    console.seek(0)
    said = console.read().decode(errors="replace").partition("Kernel panic")[0]
    if REGISTERS in said:
        return UNFIT
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return " / ".join(lines[-TAIL_LINES:]) or "no reason given"
