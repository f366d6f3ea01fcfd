"""A peer's installer, a client, and faults, all beside the one vLLM server of this folder."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
from real_server import PROMPTS, TOKENS, Server, choice, complete, one_off_connections

from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from rollout_node.installers.engine_installer import EngineInstaller
from rollout_node.installers.engine_server import Deadlines
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.installer import Audit
from rollout_node.installers.vllm_server import VllmServer

PATIENT = Deadlines(init=120)
HASTY = Deadlines(request=3, init=30, prepare=3, commit=3, undo=1, report=3)
"""Short deadlines, for ranks that hang."""


Truth = list[list[str]]
"""Answers by version and prompt."""
FIRST, SECOND, THIRD = (Version(0, step) for step in range(3))


def advance(run: Any) -> Version:
    version: Version = run.step(run.version.step + 1, share=0.05, bits=0x0180)
    return version


class Faults:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, fault: str, rank: int = 1) -> None:
        (self.folder / f"{fault}.{rank}").touch()

    def end(self, fault: str, rank: int = 1) -> None:
        (self.folder / f"{fault}.{rank}").unlink()

    @property
    def pending(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


class Peer:
    """A peer's installer; after ``vanish``, another one takes its place at the same socket."""

    def __init__(self, server: Server, run: Any) -> None:
        self.server, self.run = server, run
        self.socket = InstallSocket(server.install, run)
        self.installer = EngineInstaller(VllmServer(server.url, deadlines=PATIENT), self.socket, run=str(run.folder))

    async def start(self) -> None:
        await self.socket.start()
        await self.installer.start()

    async def vanish(self) -> None:
        await self.installer.close()
        await self.socket.close()

    async def come_back(self, driver: Literal["peer", "external"] = "peer") -> None:
        """Start another process without any memory of the first."""
        self.socket = InstallSocket(self.server.install, self.run)
        self.installer = EngineInstaller(
            VllmServer(self.server.url), self.socket, run=str(self.run.folder), driver=driver
        )
        await self.start()

    def hurry(self, deadlines: Deadlines = HASTY) -> None:
        """Use shorter deadlines from now on."""
        self.installer._server.deadlines = deadlines

    async def install(self) -> None:
        await self.installer.stage(self.run.version, self.run.shadow.path)
        await self.installer.commit(self.run.version)

    async def install_with_retries(self) -> None:
        """Retry the install until it succeeds, as the peer's runner does."""
        for _ in range(100):
            try:
                return await self.install()
            except RetryableError:
                await asyncio.sleep(0.05)
        raise AssertionError("never installed")

    async def holds(self, version: Version, digests: dict[int, int]) -> bool:
        """Whether all ranks together hold the version, judged by their live weights."""
        found: Audit = await self.installer.audit(self.run.layout, digests)
        return (found.version, found.wrong, found.unknown) == (version, [], [])


class Client:
    """Sends one prompt after the other, greedily and one at a time, so that batches are equal; no request may fail."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[tuple[str, list[int]]] = []
        self.first = asyncio.Event()
        self._enough = False

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with one_off_connections(timeout=timeout) as http:
            while not self._enough:
                prompt = PROMPTS[len(self.answers) % len(PROMPTS)]
                self.answers.append((prompt, (await choice(http, self.url, prompt))["token_ids"]))
                self.first.set()

    def stop(self) -> None:
        self._enough = True


@contextlib.asynccontextmanager
async def asking(server: Server) -> AsyncIterator[Client]:
    """A client at work during the block; afterwards its answers are complete."""
    client = Client(server.url)
    async with asyncio.TaskGroup() as group:
        group.create_task(client.run())
        await client.first.wait()
        try:
            yield client
        finally:
            client.stop()


def ids(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


async def unmixed(server: Server, client: Client, *versions: list[str]) -> int:
    """Check that each answer is one version's answer. It may also be such an answer up to a point, and the continuation
    by the last of ``versions``, which the engine now serves.

    Returns the number of answers cut by a switch.
    """
    cut = 0
    async with one_off_connections() as http:
        for prompt, answer in client.answers:
            assert len(answer) == TOKENS
            whole = [ids(version[PROMPTS.index(prompt)]) for version in versions]
            if answer in whole:
                continue
            cut += 1
            common = max(next(i for i in range(TOKENS) if answer[i] != w[i]) for w in whole)
            start = [*ids(prompt), *answer[:common]]
            rest = (await choice(http, server.url, start, max_tokens=TOKENS - common))["token_ids"]
            assert answer[common:] == rest, f"{prompt}: {answer} is of no version; {whole}"
    return cut


def installs(run: Any) -> list[str]:
    """Kinds of install that the ranks prepared, two entries a version."""
    return [r["install"] for r in run.reports if r["phase"] == "prepare" and r["error"] is None]


async def paused(server: Server) -> bool:
    async with one_off_connections() as http, http.get(server.url + "/is_paused") as response:
        return bool((await response.json())["is_paused"])


async def answers(server: Server) -> list[str]:
    async with one_off_connections() as http:
        return [await complete(http, server.url, prompt) for prompt in PROMPTS]
