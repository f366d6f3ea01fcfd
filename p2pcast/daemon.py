"""What both daemons need around their work: one process a state folder, rates, an orderly end."""

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

from p2pcast import limits
from p2pcast.errors import LocalError, UsageError
from p2pcast.store import private
from p2pcast.store.files import atomic_write, explained

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(bit|bps|b)?(?:/s)?", re.ASCII | re.IGNORECASE)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
TMPFS = Path("/dev/shm")
_POWER = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_rate(text: str) -> float:
    """``300mbit``, ``1.5gbit``, ``800000`` as bits per second. Raises UsageError."""
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{text!r} is not a rate: write bits per second, as in 300mbit or 1.5gbit")
    return float(match[1]) * _POWER[match[2].lower()]


def state_home() -> Path:
    """Where daemons keep their state unless told otherwise (XDG base directories)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "p2pcast"


def shadow_prefix() -> str:
    """Of the names of this user's default shadow folders in ``TMPFS``."""
    return f"p2pcast-{os.getuid()}-"


def default_shadow(state: Path) -> Path:
    """A folder in tmpfs that belongs to this state folder."""
    name = hashlib.sha256(str(state.resolve()).encode()).hexdigest()[:16]
    return TMPFS / f"{shadow_prefix()}{name}"


_users_umask = -1


class Memory:
    """A daemon's small facts, in one JSON file that is replaced whole."""

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
        """Durable when it returns; from any thread. Raises LocalError."""
        with self._changing:
            self.facts |= facts
            self._write()

    def forget(self, *keys: str) -> None:
        """Durable when it returns; what is unknown is no fault. Raises LocalError."""
        with self._changing:
            self.facts = {key: fact for key, fact in self.facts.items() if key not in keys}
            self._write()

    def _write(self) -> None:
        atomic_write(self.path, json.dumps(self.facts, sort_keys=True).encode(), 0o600)


def node_id(memory: Memory) -> bytes:
    """16 bytes that name this node for as long as its state folder lives."""
    if not memory["node"]:
        memory.update(node=secrets.token_hex(16))
    return bytes.fromhex(memory["node"])


async def until_told(work: Callable[[], Awaitable[None]], drain: Callable[[], Awaitable[None]] | None = None) -> None:
    """Run ``work`` until it ends, or SIGTERM or SIGINT asks it to: then ``drain`` has its time, beside it, and it is cancelled (and has its say in ``finally``).
    Who asks twice does not wait for ``drain``."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work())
    told = False
    draining: asyncio.Future[None] | None = None

    def tell() -> None:
        nonlocal told, draining
        if drain is None or told:
            task.cancel()
        else:
            draining = asyncio.ensure_future(drain())
            draining.add_done_callback(lambda _: task.cancel())
        told = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell)
    try:
        await task
    except asyncio.CancelledError:
        if not told:
            raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        if draining is not None:
            draining.cancel()
            await asyncio.wait([draining])


def keep_to_ourselves() -> None:
    """What this process makes from now on is for its own user. ``users_umask`` is what it was before."""
    global _users_umask
    _users_umask = os.umask(private.UMASK)
    os.umask(private.UMASK | _users_umask)


def users_umask() -> int:
    """For commands of the user's that this process runs; -1: as it is."""
    return _users_umask


def keep_freed_memory() -> None:
    """Buffers of pieces come and go all the time: without this, the allocator gives each back to the kernel and pays for fresh pages (glibc; elsewhere nothing)."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 8 * limits.MIB)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 * limits.MIB)


def name_fatal_signals() -> None:
    """A process that ends by SIGBUS (its shadow was cut short in tmpfs, by its own user) or SIGSEGV says so, with every thread's stack, on stderr."""
    with contextlib.suppress(RuntimeError, ValueError, OSError):  # there is no stderr
        faulthandler.enable()


def raise_descriptor_limit() -> None:
    """As many open files as this process may have: often no more than 1024 unless it asks, which is few for a hub of a thousand peers, and few against somebody who opens
    connections for nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
