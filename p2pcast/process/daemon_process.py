"""A daemon as a process: its folders, its state file, its umask and limits, and how it stops on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import hashlib
import json
import os
import re
import resource
import secrets
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from p2pcast.files import private_folders
from p2pcast.files.atomic_files import atomic_write, explained
from p2pcast.ground import limits
from p2pcast.ground.errors import LocalError, UsageError

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(bit|bps|b)?(?:/s)?", re.ASCII | re.IGNORECASE)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
TMPFS = Path("/dev/shm")
_POWER = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_rate(text: str) -> float:
    """Parse ``300mbit``, ``1.5gbit`` or ``800000`` as bits per second. Raises UsageError."""
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{text!r} is not a rate: write bits per second, as in 300mbit or 1.5gbit")
    return float(match[1]) * _POWER[match[2].lower()]


def state_home() -> Path:
    """Return the default parent of state folders (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "p2pcast"


def shadow_prefix() -> str:
    """Return the prefix of the names of this user's default shadow folders in ``TMPFS``."""
    return f"p2pcast-{os.getuid()}-"


def default_shadow(state: Path) -> Path:
    """Return a state folder's default shadow folder, in tmpfs."""
    name = hashlib.sha256(os.fsencode(state.resolve())).hexdigest()[:16]
    return TMPFS / f"{shadow_prefix()}{name}"


_original_umask = -1


class StateFile:
    """A daemon's persistent facts in one JSON file, which each update replaces atomically. Raises LocalError when the
    file cannot be read.
    """

    def __init__(self, path: Path, defaults: dict[str, Any]) -> None:
        self.path = path
        self._changing = threading.Lock()
        self.facts = dict(defaults)
        if path.exists():
            try:
                with explained("read", path):
                    self.facts |= json.loads(path.read_text())
            except (ValueError, TypeError):
                raise LocalError(f"{path} is damaged: restore it from a copy, or remove it") from None

    def __getitem__(self, key: str) -> Any:
        return self.facts[key]

    def update(self, **facts: Any) -> None:
        """Set facts. Durable on return; thread-safe. Raises LocalError."""
        with self._changing:
            self.facts |= facts
            self._write()

    def forget(self, *keys: str) -> None:
        """Remove facts, ignoring unknown keys. Durable on return; thread-safe. Raises LocalError."""
        with self._changing:
            self.facts = {key: fact for key, fact in self.facts.items() if key not in keys}
            self._write()

    def _write(self) -> None:
        atomic_write(self.path, json.dumps(self.facts, sort_keys=True).encode(), 0o600)


def node_id(memory: StateFile) -> bytes:
    """Return this node's 16-byte id, creating it once per state folder. Raises LocalError."""
    if not memory["node"]:
        memory.update(node=secrets.token_hex(16))
    return bytes.fromhex(memory["node"])


async def run_until_signal(
    work: Callable[[], Awaitable[None]], drain: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Run ``work`` until it finishes, or until SIGTERM or SIGINT. On the first signal, ``drain`` runs next to ``work``;
    then ``work`` is cancelled. A second signal cancels ``work`` at once.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work())
    signalled = False
    draining: asyncio.Future[None] | None = None

    def on_signal() -> None:
        nonlocal signalled, draining
        if drain is None or signalled:
            task.cancel()
        else:
            draining = asyncio.ensure_future(drain())
            draining.add_done_callback(lambda _: task.cancel())
        signalled = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await task
    except asyncio.CancelledError:
        if not signalled:
            raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        if draining is not None:
            draining.cancel()
            await asyncio.wait([draining])


def restrict_umask() -> None:
    """Make all files created from now on private to this user. ``original_umask`` returns the previous umask."""
    global _original_umask
    _original_umask = os.umask(private_folders.UMASK)
    os.umask(private_folders.UMASK | _original_umask)


def original_umask() -> int:
    """Return the umask for user commands run by this process; -1 means the process's current umask."""
    return _original_umask


def keep_freed_memory() -> None:
    """Let glibc's allocator keep freed memory. Piece buffers are allocated and freed constantly; by default each free
    returns pages to the kernel, and the next buffer pays for new pages. No effect with other C libraries.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 8 * limits.MIB)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 * limits.MIB)


def name_fatal_signals() -> None:
    """Print every thread's stack on stderr if SIGBUS or SIGSEGV kills the process. SIGBUS means that another of this
    user's programs has truncated the shadow in tmpfs.
    """
    with contextlib.suppress(RuntimeError, ValueError, OSError):  # no stderr
        faulthandler.enable()


def raise_descriptor_limit() -> None:
    """Raise the soft limit on open files to the hard limit. The usual soft limit of 1024 is too low for a hub with a
    thousand peers, and for a daemon under a flood of connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
