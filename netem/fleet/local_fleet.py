"""A hub and its peers as processes on this machine, each behind a ``loopback.Net``; chaos tests inject their faults
into it. Waiting happens in the event loop that serves the proxies. The content of an encrypted connection does not show
its sender, so the process that has dialled it is found by the kernel's table of sockets.

All files lie in one folder, which may be in tmpfs: disks are not tested here. Versions are random words that all change
every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp
import numpy as np
import numpy.typing as npt
import safetensors

from netem.emulation.description import HUB
from netem.emulation.loopback import Net
from netem.fleet.fleet import Fleet, Loopback
from netem.fleet.processes import ChildProcess, FleetError, Processes, free_port
from p2pcast.ground.errors import EXIT_UNREACHABLE

POLL_S = 0.02
PEERS = 5
"""Two chains: one with a head, a middle and a tail, and a second one."""
SETTLED_S = 2.0
"""Time for a plan to regain a chain of three after a fault."""
AT_ONCE = max(2, os.cpu_count() or 2)
"""Peers started in parallel: loading the interpreter and the kernels takes a second of work each."""

SOCKETS = Path("/proc/net/tcp")
LOOPBACK = "0100007F"
"""127.0.0.1 as that table shows it on a little-endian machine."""

Document = dict[str, Any]


class Fronts(Loopback):
    """Loopback, with a proxy in front of every process. ``run``: starts a process with these words."""

    def __init__(self, net: Net, run: Callable[[str, list[str]], ChildProcess]) -> None:
        super().__init__()
        self._net, self._run = net, run
        self.ports: dict[str, tuple[int, int]] = {}
        """Name → its listening port, and the port at which others reach it."""

    async def open(self, name: str) -> None:
        if name not in self.ports:
            port = free_port()
            self.ports[name] = port, await self._net.front(name, port)
        if name == HUB:
            self.hub = f"127.0.0.1:{self.ports[HUB][1]}"

    def addresses(self, name: str) -> list[str]:
        port, front = self.ports[name]
        return ["--listen", f"127.0.0.1:{port}", "--advertise", f"127.0.0.1:{front}", "--http", "127.0.0.1:0"]

    def start(self, processes: Processes, name: str, words: Sequence[str | Path], host: str) -> ChildProcess:
        return self._run(name, [str(word) for word in words])


class LocalFleet:
    """``chains`` of peers, ``payload_bytes`` a version. As an async context manager it ends its processes. ``program``:
    the module or the file to run; None runs ``p2pcast`` itself from a fork server. ``plaintext``: links without TLS.
    """

    def __init__(
        self,
        folder: Path,
        net: Net,
        peers: int,
        chains: int,
        payload_bytes: int,
        deadline_s: float,
        program: str | Path | None = "p2pcast.cli",
        *,
        plaintext: bool = True,
    ) -> None:
        self.folder = folder
        self.net = net
        self.plaintext = plaintext
        if not plaintext:
            net.identify = self._dialling_host
        self._program = program
        self.names = [f"p{n}" for n in range(1, peers + 1)]
        self._chains = chains
        self.payload_bytes = payload_bytes
        self._deadline_s = deadline_s
        self._fronts = Fronts(net, self._run)
        self._processes = Processes(folder)
        self.core = Fleet(
            self._fronts, self._processes, folder, folder, ["--plaintext"] if plaintext else [], follows=False
        )
        self.core.step = 0
        self._sums: dict[int, str] = {}
        self.options: dict[str, list[object]] = {}
        """Name → additional flags."""

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0))
        try:
            self.publish()
            await self._start_all()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self._processes.children.values():
            child.kill()
        self._processes.close()
        await self._http.close()
        await self.net.close()

    # -- processes

    async def _restart_hub(self) -> None:
        await self.kill(HUB)
        await self.start(HUB)
        await self.answers(HUB)
        await self.live(*self.names)

    async def restart_all(self) -> None:
        """Kill all processes, restore the network, and restart them."""
        self.net.restore()
        await asyncio.gather(*map(self.kill, list(self._processes.children)))
        await self._start_all()

    async def _start_all(self) -> None:
        await self.start(HUB)
        await self.answers(HUB)
        for at in range(0, len(self.names), AT_ONCE):
            await self._start_wave(self.names[at : at + AT_ONCE])
        await self.live(*self.names)

    async def _start_wave(self, names: list[str]) -> None:
        async def condition() -> bool:
            return all(map(self._joined, names))

        for name in names:
            await self.start(name)
        await self.until(condition, lambda: f"{', '.join(names)} join")

    def _joined(self, name: str) -> bool:
        return (self.core.state(name) / "daemon.json").exists()

    def pid(self, name: str) -> int | None:
        """None for a process that does not run."""
        return self._processes.pids.get(name)

    def _dialling_host(self, port: int, to: int) -> str | None:
        return dialler(port, to, self._processes.pids)

    def place(self, name: str) -> tuple[str, int]:
        """The process's own address, without the proxy."""
        return "127.0.0.1", self._fronts.ports[name][0]

    async def http_place(self, name: str) -> tuple[str, int]:
        await self.answers(name)
        host, _, port = self.core.url(name).rpartition("//")[2].rpartition(":")
        return host, int(port)

    @property
    def token(self) -> str:
        return self.core.token.read_text().strip()

    async def start(self, name: str) -> None:
        """Start a process; a restarted one has its stored state."""
        await self._fronts.open(name)
        words = [str(word) for word in self.options.get(name, [])]
        if name == HUB:
            self.core.hub(self.core.trained, "--chains", str(self._chains), "--codec", "flat", *words)
        else:
            self.core.peer(name, "--stripes", "2", *words)

    def _run(self, name: str, words: list[str]) -> ChildProcess:
        if self._program is None:
            return self._processes.fork(name, words)
        program = [str(self._program)] if isinstance(self._program, Path) else ["-m", self._program]
        return self._processes.start(name, [sys.executable, "-P", *program, *words])

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def send(self, name: str, number: signal.Signals) -> None:
        """Nothing happens to a process that has ended: ``supervise`` judges its end."""
        self._processes.children[name].process.send_signal(number)

    async def kill(self, name: str) -> None:
        await asyncio.to_thread(self._processes.children.pop(name).kill)

    async def ended(self, name: str, within_s: float) -> bool:
        """Wait up to ``within_s`` for the process to end; returns whether it has ended."""
        if not await self._over(name, within_s):
            return False
        del self._processes.children[name]
        return True

    async def _over(self, name: str, within_s: float) -> bool:
        child = self._processes.children[name]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while child.alive:  # noqa: ASYNC110  (a process has no event)
                    await asyncio.sleep(POLL_S)
        return not child.alive

    async def leave(self, name: str, deadline_s: float) -> None:
        """Stop the process with SIGTERM. Raises FleetError if it does not end in time, or ends with an error."""
        child = self._processes.children[name]
        child.expected = True
        # An earlier SIGTERM finds no hub to take leave of. A peer may have ended by itself for want of one.
        in_order = {0} if self._joined(name) else {0, -signal.SIGTERM, EXIT_UNREACHABLE}
        child.process.send_signal(signal.SIGTERM)
        if not await self._over(name, deadline_s):
            await self.kill(name)
            raise FleetError(f"{name} did not end within {deadline_s:.0f} s of SIGTERM")
        del self._processes.children[name]
        if child.code not in in_order:
            raise child.failure(f"{name} ended with {child.code} on SIGTERM")

    async def supervise(self) -> None:
        """Restart processes that ended because the hub was unreachable, as a supervisor would. Raises FleetError for
        any other end.
        """
        for name, child in list(self._processes.children.items()):
            if not child.expected and child.code == EXIT_UNREACHABLE and not self._joined(name):
                await self.start(name)
        self.still_run()

    def still_run(self) -> None:
        """Raises FleetError if a process has ended by itself."""
        self._processes.check()

    # -- versions

    @property
    def step(self) -> int:
        return self.core.step

    @property
    def version(self) -> str:
        """The newest version, unless the hub was killed during a version; branches are higher after that."""
        return self.core.version

    def is_newest(self, version: str | None) -> bool:
        """Whether ``version`` is the newest step, in any branch."""
        return version is not None and version.endswith(f".{self.step}")

    def publish(self) -> None:
        """Publish the next version."""
        self._save(self._drawn(self.step + 1))

    def publish_again(self, seed: int) -> None:
        """Publish the newest step with other bytes, as a trainer that recomputed it."""
        shutil.rmtree(self.core.trained / f"step_{self.step}")
        self.core.step -= 1
        self._save(self._drawn(seed))

    def _drawn(self, seed: int) -> npt.NDArray[np.uint16]:
        return np.random.default_rng(seed).integers(0, 1 << 16, self.payload_bytes // 2, dtype=np.uint16)

    def _save(self, words: npt.NDArray[np.uint16]) -> None:
        self.core.save({"w": ("BF16", words.shape, words)})
        self._sums[self.step] = hashlib.sha256(words.data).hexdigest()

    async def live(self, *names: str) -> None:
        """Return when all of ``names`` have installed the newest version."""
        waiting = set(names)

        async def condition() -> bool:
            for name in sorted(waiting):
                if self.is_newest((await self.status(name) or {}).get("committed")):
                    waiting.discard(name)
            return not waiting

        await self.until(condition, lambda: f"{self.version} at {', '.join(sorted(waiting))}")

    def installed(self, name: str, step: int) -> bool:
        """Whether the folder holds that step completely."""
        return (self.core.installed(name) / f"step_{step}" / "STABLE").exists()

    def exact(self, name: str, step: int | None = None) -> bool:
        """Whether the installed step (by default the newest) equals the trainer's, bit for bit."""
        step = self.step if step is None else step
        file = self.core.installed(name) / f"step_{step}" / "model.safetensors"
        found = safetensors.deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
        return hashlib.sha256(found[0][1]["data"]).hexdigest() == self._sums[step]

    # -- queries

    async def answers(self, name: str) -> Document:
        """The status of ``name``, as soon as there is an answer."""
        found: list[Document] = []

        async def condition() -> bool:
            found.extend([] if (status := await self.status(name)) is None else [status])
            return bool(found)

        await self.until(condition, lambda: f"{name} answers")
        return found[0]

    async def status(self, name: str) -> Document | None:
        """None without an answer."""
        text = await self.get(name, "status")
        found: Document | None = None if text is None else json.loads(text)
        return found

    async def get(self, name: str, what: str) -> str | None:
        """The answer to GET ``/what``; None without an answer."""
        try:
            async with self._http.get(f"{self.core.url(name)}/{what}") as answer:
                return await answer.text()
        except (OSError, ValueError, aiohttp.ClientError, TimeoutError):
            return None

    async def chains(self) -> list[list[str]]:
        """The longest path down from each head, by the peers' reports, longest first. The first has at least three
        peers, and there is a second one.

        If the plan has no such chain, the hub is restarted and plans anew. If that does not help, all processes are
        restarted.
        """
        found: list[list[str]] = []

        async def condition() -> bool:
            found[:] = await self._chains_now()
            return len(found) >= self._chains and len(found[0]) > 2

        for again in (self._restart_hub, self.restart_all):
            try:
                await self.until(condition, lambda: "", SETTLED_S)
                return found
            except FleetError:
                await again()
        await self.until(condition, lambda: f"{self._chains} chains: {found}")
        return found

    async def parents(self) -> dict[str, str]:
        """Parent of each peer by its own report: another peer, or ``HUB``. Unattached peers are missing."""
        hub = await self.status(HUB)
        rows = {p["name"]: p for p in (hub or {}).get("peers", [])}
        names = {p["node"]: n for n, p in rows.items()}
        said = {n: s for n in self.names if (s := await self.status(n)) is not None and n in rows}
        return {n: names.get(s["parent"], HUB) for n, s in said.items() if s["parent"] is not None}

    async def _chains_now(self) -> list[list[str]]:
        """Empty while a peer is unattached."""
        above = await self.parents()
        if len(above) < len(self.names):
            return []
        ways: dict[str, list[str]] = {}
        for name in self.names:
            way = [name]
            while (parent := above[way[0]]) != HUB:
                if parent in way:
                    return []
                way.insert(0, parent)
            ways[way[0]] = max(way, ways.get(way[0], []), key=len)
        return sorted(ways.values(), key=len, reverse=True)

    async def until(
        self, condition: Callable[[], Awaitable[bool]], what: Callable[[], str], most_s: float | None = None
    ) -> None:
        """Raises FleetError after ``most_s`` (by default the fleet's deadline)."""
        try:
            async with asyncio.timeout(most_s or self._deadline_s):
                while not await condition():
                    await asyncio.sleep(POLL_S)
                    self.still_run()
        except TimeoutError:
            raise FleetError(f"not within {self._deadline_s:.0f} s: {what()}") from None


def dialler(port: int, to: int, pids: Mapping[str, int]) -> str | None:
    """The one of ``pids`` (name → process) whose socket leads from 127.0.0.1:``port`` to 127.0.0.1:``to``; None for
    another process's socket, or a closed one.
    """
    inode = _inode(f"{LOOPBACK}:{port:04X}", f"{LOOPBACK}:{to:04X}")
    if inode is None:
        return None
    wanted = f"socket:[{inode}]"
    return next((name for name, pid in pids.items() if _holds(pid, wanted)), None)


def _inode(ours: str, theirs: str) -> str | None:
    for line in SOCKETS.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] == ours and fields[2] == theirs:
            return fields[9]
    return None


def _holds(pid: int, wanted: str) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        return any(_target(f"{folder}/{name}") == wanted for name in os.listdir(folder))
    except OSError:
        return False


def _target(path: str) -> str:
    """Empty for a descriptor that was closed meanwhile."""
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""
