"""A hub, a peer and a SGLang server as processes of their own, and the trainer that publishes to them. Any of the three
can be killed, and started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import torch
from real_sglang import TWO_RANKS, SglangServer, generate
from safetensors.torch import load_file, save_file

from netem.fleet.processes import Processes, free_port
from tests.support.until import wait_until
from trainer_node import Publisher

DEADLINE_S = 900.0
SHARE = 0.05
"""Of each matrix's values, changed by a version."""
BITS = 0x0180
"""The lowest bits of an exponent, so that a version's changes are visible in the model's answers."""


class LiveRun:
    """The base is the folder ``server`` was started from."""

    def __init__(self, folder: Path, tmpfs: Path, server: SglangServer, processes: Processes, *options: str) -> None:
        self.folder, self.server, self.processes = folder, server, processes
        self.model, self.options, self._tmpfs = server.model, options, tmpfs
        self.hub, self.token = f"127.0.0.1:{free_port()}", folder / "token"
        self.state = load_file(self.model / "model.safetensors")
        self.step = 0
        words = ["--base", self.model, "--listen", self.hub, "--http", "127.0.0.1:0", "--token-file", self.token]
        self._p2pcast("hub", "seed", *words, "--state", folder / "hub", "--shadow", tmpfs / "hub")
        self.until("the hub answers", self.token.exists)
        self.publisher = Publisher(self.hub, token_file=self.token, base=self.model)

    @property
    def version(self) -> str:
        return f"0.{self.step}"

    # -- processes

    def peer_up(self) -> None:
        words = ["--token-file", self.token, "--base", self.model, "--shadow", self._tmpfs / "peer", *self.options]
        where = ["--state", self.server.install.parent, "--http", "127.0.0.1:0", "--listen", "127.0.0.1:0"]
        self._p2pcast("peer", "join", self.hub, *words, *where, "--install", f"sglang:{self.server.url}")

    def kill_peer(self) -> None:
        child = self.processes.children["peer"]
        child.expected = True
        child.signal(signal.SIGKILL)
        child.process.wait()

    def _p2pcast(self, name: str, *words: object) -> None:
        self.processes.start(name, [sys.executable, "-m", "p2pcast.cli", *map(str, words)])

    # -- the trainer

    def publish(self) -> str:
        """The next version is at the hub."""
        self.step += 1
        draw = torch.Generator().manual_seed(self.step)
        for tensor in self.state.values():
            if tensor.ndim == 2:
                words = tensor.view(torch.int16)
                words ^= (torch.rand(words.shape, generator=draw) < SHARE).to(torch.int16) * BITS
        self.publisher.publish(self.step, self.state.items()).wait_durable(timeout_s=DEADLINE_S)
        return self.version

    def save(self, to: Path) -> Path:
        """A Hugging Face folder of the newest version."""
        to.mkdir()
        for file in self.model.iterdir():
            if file.suffix == ".json" and "index" not in file.name:
                (to / file.name).write_bytes(file.read_bytes())
        save_file(self.state, to / "model.safetensors", {"format": "pt"})
        return to

    # -- what is seen

    def engine(self) -> dict[str, Any]:
        """The engine in the peer's status; nothing yet while the peer starts."""
        try:
            url = json.loads((self.server.install.parent / "daemon.json").read_text())["http"]
            with urllib.request.urlopen(f"{url}/status", timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)["engines"][0]
                return found
        except (OSError, ValueError, IndexError, urllib.error.URLError):
            return {}

    def live(self) -> dict[str, Any]:
        """The engine serves the newest version; its entry."""
        found: dict[str, Any] = {}

        def current() -> bool:
            found.update(self.engine())
            return bool(found.get("ready")) and found["committed"] == self.version

        self.until(f"{self.version} is live", current)
        return found

    def verified(self) -> None:
        """Every tensor in the ranks' own memory is that of the newest version."""
        if not self.verify():
            raise AssertionError(f"the live weights are not those of {self.version}")

    def verify(self) -> bool:
        command = ["verify", "--live", "--state", self.server.install.parent, "--json"]
        child = self.processes.start("verify", [sys.executable, "-m", "p2pcast.cli", *map(str, command)])
        child.expected = True
        return child.process.wait(DEADLINE_S) == 0

    def until(self, what: str, done: Callable[[], Any]) -> None:
        wait_until(done, lambda: f"{what}: {self.engine()}", check=self.processes.check)


@contextlib.contextmanager
def live_run(folder: Path, model: Path, environment: Mapping[str, str]) -> Iterator[LiveRun]:
    """A server at tensor parallel 2 that has the run's base."""
    server = SglangServer(model, folder / "engine", "--tp-size", "2", environment=TWO_RANKS | dict(environment))
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as tmpfs, Processes(folder) as processes:
        try:
            found = LiveRun(folder, Path(tmpfs), server, processes)
            found.peer_up()
            server.wait()
            found.live()
            yield found
            found.publisher.close()
        finally:
            server.stop()


class Clients:
    """Clients that ask greedily, one request after the other. ``failing``: requests may fail, and are sent again."""

    def __init__(self, url: str, prompts: list[list[int]], tokens: int) -> None:
        self.url, self.prompts, self.tokens = url, prompts, tokens
        self.answers: list[tuple[int, list[int], list[str]]] = []
        """Number of the prompt, tokens, and the versions that made them."""
        self.failing = False
        self.failed = 0
        self._enough = False

    async def run(self) -> None:
        """Until ``stop``."""
        async with asyncio.TaskGroup() as group:
            for number in range(len(self.prompts)):
                group.create_task(self._ask(number))

    def stop(self) -> None:
        self._enough = True

    async def _ask(self, number: int) -> None:
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            while not self._enough:
                try:
                    answer = await generate(http, self.url, self.prompts[number], tokens=self.tokens)
                except (aiohttp.ClientError, AssertionError):
                    if not self.failing:
                        raise
                    self.failed += 1
                    await asyncio.sleep(0.2)
                    continue
                made_by = [span["version"] for span in answer["meta_info"]["weight_versions"]]
                self.answers.append((number, answer["output_ids"], made_by))
