"""A hub and its peers as processes on this machine, each behind a ``loopback.Net``: what the fault matrix does its harm to.

Everything lies in one folder, in tmpfs if the caller likes: disks are not what is tried. Versions are random words, all of which change every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import aiohttp
import numpy as np
import safetensors

from netem.loopback import Net
from netem.nursery import Born, Nursery
from netem.whose import dialler
from p2pcast.errors import EXIT_UNREACHABLE, LocalError

POLL_S = 0.02
PEERS = 5
"""In two chains: one that has a head, a middle and a tail, and one beside it."""
SETTLED_S = 2.0
"""For a plan to have a chain of three again after a fault."""
HUB = "hub"
AT_ONCE = max(2, os.cpu_count() or 2)
"""Peers that start side by side: loading the interpreter and the kernels is a second of work each."""

PORTS = range(10_000, 32_768)
"""Below those that Linux draws from by itself."""

Document = dict[str, Any]


class FleetError(LocalError):
    """Something did not come about in time."""


class Fleet:
    """``chains`` of peers, ``payload_bytes`` a version. An async context manager; what it started ends with it. ``program``: the module that is
    run; None: ``p2pcast`` itself, forked from a nursery. ``plaintext``: links without TLS."""

    def __init__(
        self,
        folder: Path,
        net: Net,
        peers: int,
        chains: int,
        payload_bytes: int,
        deadline_s: float,
        program: str | None = "netem.hostile",
        *,
        plaintext: bool = True,
    ) -> None:
        self.folder = folder
        self.net = net
        self.plaintext = plaintext
        if not plaintext:
            net.whose = self._whose
        self._program = program
        self.names = [f"p{n}" for n in range(1, peers + 1)]
        self.step = 0
        self._chains = chains
        self.payload_bytes = payload_bytes
        self._deadline_s = deadline_s
        self._ports: dict[str, tuple[int, int]] = {}
        """Name → where it listens, and where others find it."""
        self._processes: dict[str, asyncio.subprocess.Process | Born] = {}
        self._nursery: Nursery | None = None
        self._sums: dict[int, str] = {}
        self.options: dict[str, list[object]] = {}
        """Name → flags of its own."""
        self.states: dict[str, Path] = {}
        """Name → its state folder, where that does not lie in ``folder``."""

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0))
        try:
            if self._program is None:
                self._nursery = await Nursery.start()
            self.publish()
            await self._start_all()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()
        if self._nursery is not None:
            await self._nursery.close()
        await self._http.close()
        await self.net.close()

    # -- processes

    async def _hub_again(self) -> None:
        await self.kill(HUB)
        await self.start(HUB)
        await self.answers(HUB)
        await self.live(*self.names)

    async def anew(self) -> None:
        """Kill all, mend the network, and have all join again."""
        self.net.mend()
        await asyncio.gather(*map(self.kill, list(self._processes)))
        await self._start_all()

    async def _start_all(self) -> None:
        await self.start(HUB)
        await self.answers(HUB)
        for at in range(0, len(self.names), AT_ONCE):
            await self._start_wave(self.names[at : at + AT_ONCE])
        await self.live(*self.names)

    async def _start_wave(self, names: list[str]) -> None:
        async def look() -> bool:
            return all(map(self._joined, names))

        for name in names:
            await self.start(name)
        await self._until(look, lambda: f"{', '.join(names)} join")

    def _joined(self, name: str) -> bool:
        return (self.state_of(name) / "daemon.json").exists()

    def pid(self, name: str) -> int | None:
        """None while it does not run."""
        process = self._processes.get(name)
        return None if process is None else process.pid

    def _whose(self, port: int, to: int) -> str | None:
        return dialler(port, to, {name: pid for name in self._processes if (pid := self.pid(name)) is not None})

    def place(self, name: str) -> tuple[str, int]:
        """Where it listens itself, behind no proxy."""
        return "127.0.0.1", self._ports[name][0]

    async def http_place(self, name: str) -> tuple[str, int]:
        await self.answers(name)
        host, _, port = json.loads((self.state_of(name) / "daemon.json").read_text())["http"].rpartition("//")[2].rpartition(":")
        return host, int(port)

    @property
    def token(self) -> str:
        return (self.folder / "token").read_text().strip()

    async def start(self, name: str) -> None:
        """Also one that has ended: it comes back with what it had."""
        if name not in self._ports:
            port = _lasting_port()
            self._ports[name] = port, await self.net.front(name, port)
        port, front = self._ports[name]
        common: list[object] = ["--state", self.state_of(name), "--shadow", self.folder / f"{name}-shadow"]
        common += ["--listen", f"127.0.0.1:{port}", "--advertise", f"127.0.0.1:{front}", "--http", "127.0.0.1:0"]
        common += ["--plaintext"] if self.plaintext else []
        common += ["--token-file", self.folder / "token"]
        if name == HUB:
            words: list[object] = ["seed", self.folder / "checkpoints", "--chains", self._chains, "--codec", "flat", *common]
        else:
            target = f"safetensors:{self.folder / f'{name}-out'}"
            words = ["join", f"127.0.0.1:{self._ports[HUB][1]}", "--name", name, "--install", target, "--keep", 1, "--stripes", 2]
            words += common
        words += self.options.get(name, [])
        (self.state_of(name) / "daemon.json").unlink(missing_ok=True)
        self._processes[name] = await self._run([str(word) for word in words], self.log(name))

    async def _run(self, words: list[str], log: Path) -> asyncio.subprocess.Process | Born:
        if self._nursery is not None:
            return await self._nursery.bear(words, log)
        assert self._program is not None
        with log.open("ab") as out:
            return await asyncio.create_subprocess_exec(sys.executable, "-m", self._program, *words, stdout=out, stderr=out)

    def state_of(self, name: str) -> Path:
        return self.states.get(name, self.folder / name)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def send(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    async def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        await process.wait()

    async def ended(self, name: str, within_s: float) -> bool:
        """Whether it ends by itself within that time; then it does not run any more."""
        try:
            async with asyncio.timeout(within_s):
                await self._processes[name].wait()
        except TimeoutError:
            return False
        del self._processes[name]
        return True

    async def leave(self, name: str, deadline_s: float) -> None:
        """Have it end by itself. Raises FleetError when it does not, or not in order."""
        process = self._processes.pop(name)
        # Before that it has nobody to take leave of.
        in_order = {0} if self._joined(name) else {0, -signal.SIGTERM}
        process.terminate()
        try:
            async with asyncio.timeout(deadline_s):
                code = await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise FleetError(f"{name} did not end within {deadline_s:.0f} s of SIGTERM") from None
        if code not in in_order:
            raise FleetError(f"{name} ended with {code} on SIGTERM: {self.log(name).read_text()[-1000:]}")

    async def supervise(self) -> None:
        """Start those again that found no hub to join, as a supervisor would. Raises FleetError when a process has ended otherwise."""
        for name, process in list(self._processes.items()):
            if process.returncode == EXIT_UNREACHABLE and not self._joined(name):
                await self.start(name)
        self.still_run()

    def still_run(self) -> None:
        """Raises FleetError when a process has ended by itself."""
        for name, process in self._processes.items():
            if process.returncode is not None:
                raise FleetError(f"{name} ended: {self.log(name).read_text()[-1000:]}")

    # -- versions

    @property
    def version(self) -> str:
        """The newest, where no hub was killed in the middle of one: after that, branches are higher."""
        return f"0.{self.step}"

    def is_newest(self, version: str | None) -> bool:
        """Whether this is the newest step, in whichever branch."""
        return version is not None and version.endswith(f".{self.step}")

    def publish(self) -> None:
        """The next version."""
        self.step += 1
        self._write(self.step)

    def publish_again(self, seed: int) -> None:
        """The newest step with other bytes, as a trainer writes it that computes it anew."""
        shutil.rmtree(self.folder / "checkpoints" / f"step_{self.step}")
        self._write(seed)

    def _write(self, seed: int) -> None:
        words = np.random.default_rng(seed).integers(0, 1 << 16, self.payload_bytes // 2, dtype=np.uint16)
        part = self.folder / "checkpoints" / f".step_{self.step}"
        part.mkdir(parents=True)
        spec = safetensors.TensorSpec(dtype="bfloat16", shape=[len(words)], data_ptr=words.ctypes.data, data_len=words.nbytes)
        safetensors.serialize_file({"w": spec}, part / "model.safetensors")
        (part / "STABLE").touch()
        part.rename(part.with_name(f"step_{self.step}"))
        self._sums[self.step] = hashlib.sha256(words.data).hexdigest()
        shutil.rmtree(part.with_name(f"step_{self.step - 3}"), ignore_errors=True)

    async def live(self, *names: str) -> None:
        """Return when all of ``names`` have installed the newest version."""
        waiting = set(names)

        async def look() -> bool:
            for name in sorted(waiting):
                if self.is_newest((await self.status(name) or {}).get("committed")):
                    waiting.discard(name)
            return not waiting

        await self._until(look, lambda: f"{self.version} at {', '.join(sorted(waiting))}")

    def installed(self, name: str, step: int) -> bool:
        """Whether its folder holds that step, whole."""
        return (self.folder / f"{name}-out" / f"step_{step}" / "STABLE").exists()

    def exact(self, name: str, step: int | None = None) -> bool:
        """Whether what it installed is what the trainer wrote as that step (the newest), bit for bit."""
        step = self.step if step is None else step
        file = self.folder / f"{name}-out" / f"step_{step}" / "model.safetensors"
        found = safetensors.deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
        return hashlib.sha256(found[0][1]["data"]).hexdigest() == self._sums[step]

    # -- what they say

    async def answers(self, name: str) -> Document:
        """Its status, as soon as it has one."""
        found: list[Document] = []

        async def look() -> bool:
            found.extend([] if (status := await self.status(name)) is None else [status])
            return bool(found)

        await self._until(look, lambda: f"{name} answers")
        return found[0]

    async def status(self, name: str) -> Document | None:
        """None where there is no answer."""
        text = await self.asked(name, "status")
        found: Document | None = None if text is None else json.loads(text)
        return found

    async def asked(self, name: str, what: str) -> str | None:
        """The answer to GET ``/what``, where there is one."""
        try:
            url = json.loads((self.state_of(name) / "daemon.json").read_text())["http"]
            async with self._http.get(f"{url}/{what}") as answer:
                return await answer.text()
        except (OSError, ValueError, aiohttp.ClientError, TimeoutError):
            return None

    async def chains(self) -> list[list[str]]:
        """The longest way down from each head, by what the peers say, the longest first: at least three peers, and another head.

        Where a plan has no such chain any more, the hub is started again, and makes a new one of those who come back; if that has none either, all join anew.
        """
        found: list[list[str]] = []

        async def look() -> bool:
            found[:] = await self._chains_now()
            return len(found) >= self._chains and len(found[0]) > 2

        for again in (self._hub_again, self.anew):
            try:
                await self._until(look, lambda: "", SETTLED_S)
                return found
            except FleetError:
                await again()
        await self._until(look, lambda: f"{self._chains} chains: {found}")
        return found

    async def parents(self) -> dict[str, str]:
        """Of each peer, by what it says: another one, or ``HUB``. Fewer than all while somebody is not attached."""
        hub = await self.status(HUB)
        rows = {p["name"]: p for p in (hub or {}).get("peers", [])}
        names = {p["node"]: n for n, p in rows.items()}
        said = {n: s for n in self.names if (s := await self.status(n)) is not None and n in rows}
        return {n: names.get(s["parent"], HUB) for n, s in said.items() if s["parent"] is not None}

    async def _chains_now(self) -> list[list[str]]:
        """Nothing while somebody is not attached."""
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

    async def _until(self, look: Callable[[], Awaitable[bool]], what: Callable[[], str], most_s: float | None = None) -> None:
        """Raises FleetError."""
        try:
            async with asyncio.timeout(most_s or self._deadline_s):
                while not await look():
                    await asyncio.sleep(POLL_S)
                    self.still_run()
        except TimeoutError:
            raise FleetError(f"not within {self._deadline_s:.0f} s: {what()}") from None


def _lasting_port() -> int:
    """A free one that the kernel gives to nobody who dials: else a connection may have it when a process comes back for it."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", random.choice(PORTS))) as probe:
            return int(probe.getsockname()[1])
