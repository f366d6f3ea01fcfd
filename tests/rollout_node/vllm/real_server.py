"""A real vLLM API server (CPU build) in its own process, its clients, and fresh engines to compare with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from netem.fleet.processes import free_port
from tests.support.engine_server import EngineServer

PROMPTS = ["w5 w6 w7", "w100 w200 w300 w400", "w9"]
LONG = " ".join(f"w{3 + i * 7 % 400}" for i in range(200))
"""More than one block of keys and values, so that its prefix is found in the cache."""
TOKENS = 24
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
NICE = "5"
"""Nice value of servers. Their workers spin while they wait for each other: other tests' daemons come first."""
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
OPTIONS = [
    "--max-model-len",
    "256",
    "--max-num-seqs",
    "8",
    "--enforce-eager",
    "--host",
    "127.0.0.1",
    "--served-model-name",
    "m",
]


def make_model(
    folder: Path,
    *,
    tied: bool = False,
    dtype: str = "bfloat16",
    vocabulary: int = 500,
    layers: int = 2,
    positions: int = 512,
) -> Path:
    """A Qwen3 of random weights whose greedy choices don't depend on rounding."""
    script = f"""
from pathlib import Path
from netem.fleet.small_model import SmallModel, write_small_model
form = SmallModel({vocabulary}, layers={layers}, mlp=2, spread=0.3, tied={tied}, positions={positions})
write_small_model(Path({str(folder)!r}), form, seed=1, dtype={dtype!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=900, capture_output=True)
    return folder


class Server(EngineServer):
    """A vLLM server starts at once; ``wait`` until it answers. ``restart`` keeps the port."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *options: str,
        environment: Mapping[str, str] | None = None,
        python: str | Path = sys.executable,
    ) -> None:
        port = free_port()
        self.model, self.url = model, f"http://127.0.0.1:{port}"
        self.install, self.log = folder / "install.sock", folder / "server.log"
        self._command = [
            str(python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            "--port",
            str(port),
        ]
        self._command += [*OPTIONS, "--weight-transfer-config", '{"backend": "p2pcast"}']
        self._options = list(options)
        self._environment = {**os.environ, **ENVIRONMENT, **(environment or {}), "P2PCAST_SOCK": str(self.install)}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = ["nice", "-n", NICE, *self._command, *self._options]
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log, start_new_session=True)
        # Autogroups share the CPU among sessions first: the nice value of a process counts within its session alone.
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/autogroup").write_text(NICE)
        return process

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(600)

    def restart(self, *options: str) -> None:
        """Restart, with other options if any are given; returns before the server answers."""
        self.stop()
        self._options = list(options) or self._options
        self.process = self._start()

    def lose_worker(self) -> None:
        """Kill the last worker, and wait for the server's end, which the loss causes. Also removes its shared memory,
        which no process is left to remove.
        """
        titles, segments = {}, set()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(ValueError, OSError):
                if os.getpgid(int(entry.name)) == self.process.pid:
                    titles[(entry / "cmdline").read_text(errors="replace")] = int(entry.name)
                    segments |= set(re.findall(r"/dev/shm/psm_\w+", (entry / "maps").read_text()))
        os.kill(titles[max(title for title in titles if "Worker" in title)], signal.SIGKILL)
        self.process.wait(600)
        for segment in segments:
            Path(segment).unlink(missing_ok=True)


def one_off_connections(**options: Any) -> aiohttp.ClientSession:
    """A client with a connection for each request. The server closes connections that are idle for 5 s, and a request
    that meets such an end is lost.
    """
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), **options)


async def complete(http: aiohttp.ClientSession, url: str, prompt: str | Sequence[int], **more: Any) -> str:
    return str((await choice(http, url, prompt, **more))["text"])


async def choice(http: aiohttp.ClientSession, url: str, prompt: str | Sequence[int], **more: Any) -> dict[str, Any]:
    """A greedy completion, with its ``token_ids``."""
    body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, **more}
    async with http.post(url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = (await response.json())["choices"][0]
        return found


async def prefix_hits(http: aiohttp.ClientSession, url: str) -> float:
    """Tokens of prompts that the server has found in its cache so far."""
    async with http.get(url + "/metrics") as response:
        text = await response.text()
    return sum(map(float, re.findall(r"^vllm:prefix_cache_hits_total\{[^}]*\} (\S+)$", text, re.MULTILINE)))


async def load(
    http: aiohttp.ClientSession, url: str, prompt: str, started: asyncio.Event, enough: asyncio.Event, model: str = "m"
) -> int:
    """Stream one completion after the other until ``enough``. Returns their number."""
    done = 0
    while not enough.is_set():
        assert await stream(http, url, prompt, started, model) == 200
        done += 1
    return done


async def stream(http: aiohttp.ClientSession, url: str, prompt: str, started: asyncio.Event, model: str = "m") -> int:
    """Tokens of a long completion. Fails unless it ends normally."""
    body = {"model": model, "prompt": prompt, "max_tokens": 200, "temperature": 1, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    tokens, last = 0, None
    async with http.post(url + "/v1/completions", json=body) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                for part in event["choices"]:
                    last = part["finish_reason"] or last
                    started.set()
                tokens = (event.get("usage") or {"completion_tokens": tokens})["completion_tokens"]
    assert last == "length"
    return tokens


def fresh(folders: list[Path], prompts: list[str], *, tensor_parallel: int = 1) -> list[list[str]]:
    """Greedy completions of engines started from these folders, which compute as a p2pcast engine does."""
    command = [sys.executable, str(Path(__file__).with_name("fresh_engine.py")), *map(str, folders)]
    environment = {**os.environ, **ENVIRONMENT, "P2PCAST_SOCK": "/nonexistent"}
    if tensor_parallel > 1:
        environment |= TWO_RANKS
    asked = json.dumps([prompts, TOKENS, tensor_parallel])
    done = subprocess.run(command, input=asked, env=environment, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[list[str]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def loaded(server: Server, folders: list[Path], prompts: list[str]) -> list[list[str]]:
    """As ``fresh``, from one engine started with the first folder and then filled from the others by vLLM's own loader.

    For engines that start slowly, before p2pcast has changed them.
    """

    async def answers() -> list[list[str]]:
        found = []
        async with one_off_connections() as http:
            for number, folder in enumerate(folders):
                if number:
                    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                    for path, what in (("/collective_rpc", body), ("/reset_prefix_cache", None)):
                        async with http.post(server.url + path, json=what) as response:
                            assert response.status == 200, await response.text()
                found.append([await complete(http, server.url, prompt) for prompt in prompts])
        return found

    return asyncio.run(answers())
