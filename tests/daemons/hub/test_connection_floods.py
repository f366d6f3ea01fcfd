"""Processes of a hub, a peer and a ledger that may open few files, under floods of HTTP connections, or none more. The
floods come from the same machine, and have no rights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.support.until import check_runs, until

DEADLINE_S = 600.0
FILES = 256
"""Files that a daemon may open: as many as `p2pcast doctor` demands."""
FLOOD = 300
MOST_LOG_BYTES = 16_384

KEPT = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF_BODY = "POST /ROUTE HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
HALF_HEAD = "GET /metrics HTTP/1.1\r\nHost: loc"
READER = "GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass
class Process:
    """One daemon, and what it has logged."""

    running: asyncio.subprocess.Process
    state: Path
    log: Path
    address: tuple[str, int] = ("", 0)

    def url(self, path: str) -> str:
        return f"http://{self.address[0]}:{self.address[1]}{path}"


async def answers(process: Process) -> None:
    """Wait until the daemon serves HTTP."""
    file = process.state / "daemon.json"
    await until(file.exists, check=lambda: check_runs(process.running, process.log))
    match = re.fullmatch(r"http://(.+):(\d+)", json.loads(file.read_text())["http"])
    assert match is not None
    process.address = match[1], int(match[2])


@pytest.fixture
async def fleet(tmp_path: Path, tmpfs: Path, states) -> AsyncIterator[dict[str, Process]]:
    """A hub, a peer and a ledger, each with few descriptors."""
    found: dict[str, Process] = {}

    async def start(name: str, *words: object) -> None:
        state, log = tmp_path / name, tmp_path / f"{name}.log"
        command = [sys.executable, "-m", "p2pcast.cli", *map(str, words), "--state", str(state)]
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                "prlimit", f"--nofile={FILES}:{FILES}", *command, "--http", "127.0.0.1:0", stdout=out, stderr=out
            )
        found[name] = Process(process, state, log)
        await answers(found[name])

    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    states.write(checkpoints / "step_1", states.first())
    try:
        async with asyncio.timeout(DEADLINE_S):
            token = tmp_path / "token"
            listen = ["--listen", "127.0.0.1:0", "--token-file", token, "--plaintext"]
            await start("hub", "seed", checkpoints, *listen, "--shadow", tmpfs / "hub")
            log = found["hub"].log
            match = await until(lambda: re.search(r"p2pcast join (\S+:\d+)", log.read_text()))
            out = ["--install", f"safetensors:{tmp_path / 'out'}", "--name", "a", "--shadow", tmpfs / "a"]
            await start("peer", "join", match[1], "--token-file", token, "--plaintext", *out)
            hub = found["hub"].address
            await start("ledger", "ledger", "--task", "sums", "--hub-http", f"{hub[0]}:{hub[1]}")
            yield found
    finally:
        for one in found.values():
            if one.running.returncode is None:
                one.running.terminate()
        assert [await one.running.wait() for one in found.values()] == [0] * len(found)


def flood(process: Process, sent: str) -> list[socket.socket]:
    """Connections of a caller that reads nothing and ends none."""
    held = []
    for _ in range(FLOOD):
        one = socket.create_connection(process.address, timeout=DEADLINE_S)
        held.append(one)
        with contextlib.suppress(ConnectionError):
            one.sendall(sent.encode())
    return held


async def text(process: Process, path: str) -> str:
    """The answer to a new connection."""
    async with aiohttp.ClientSession() as http, http.get(process.url(path)) as answer:
        assert answer.status == 200
        return await answer.text()


async def posted(process: Process, path: str) -> int:
    """Status of the answer to a command."""
    bearer = {"Authorization": f"Bearer {(process.state / 'http.token').read_text().strip()}"}
    async with aiohttp.ClientSession(headers=bearer) as http, http.post(process.url(path), json={}) as answer:
        return answer.status


ROUTES = {"hub": "/page/enter", "peer": "/commit", "ledger": "/v1/lease"}


async def test_floods_of_strangers_leave_the_daemons_to_their_callers(fleet, tmp_path, states):
    state = states.first()
    with contextlib.ExitStack() as held:
        for step, sent in enumerate([KEPT, HALF_BODY, HALF_HEAD, READER], 2):
            for name, process in fleet.items():
                for one in await asyncio.to_thread(flood, process, sent.replace("/ROUTE", ROUTES[name])):
                    held.enter_context(one)
            for process in fleet.values():
                assert await text(process, "/healthz") == "ok\n"
                assert json.loads(await text(process, "/status"))
                assert "process_open_fds" in await text(process, "/metrics")
            assert await posted(fleet["hub"], "/page/link") == 200
            state = states.trained(state, step)
            states.write(tmp_path / "checkpoints" / f"step_{step}", state)
            assert json.loads(await text(fleet["peer"], f"/wait?version=0.{step}&timeout_s={DEADLINE_S}"))["waited_s"]
        for name, process in fleet.items():
            assert process.running.returncode is None, name
            assert "Traceback" not in process.log.read_text()
            assert process.log.stat().st_size < MOST_LOG_BYTES, process.log.read_text()[-2000:]


def allow(process: Process, files: int) -> None:
    """Let a running daemon open files as long as their descriptors are below ``files``."""
    resource.prlimit(process.running.pid, resource.RLIMIT_NOFILE, (files, FILES))


async def health(http: aiohttp.ClientSession, process: Process) -> str:
    async with http.get(process.url("/healthz")) as answer:
        return await answer.text()


async def told(http: aiohttp.ClientSession, process: Process, fault: str) -> None:
    """Wait until the daemon's health tells of the fault; with none, until it is healthy."""
    await until(
        lambda: health(http, process),
        holds=lambda text: fault in text if fault else text == "ok\n",
        check=lambda: check_runs(process.running, process.log),
    )


async def test_daemons_without_descriptors_say_so_and_go_on(fleet, tmp_path, states):
    """Each daemon is asked over a connection that it has accepted before."""
    state = states.trained(states.first(), 2)
    async with contextlib.AsyncExitStack() as stack:
        asks = {name: await stack.enter_async_context(aiohttp.ClientSession()) for name in fleet}
        assert json.loads(await text(fleet["peer"], f"/wait?version=0.1&timeout_s={DEADLINE_S}"))["waited_s"] >= 0
        for name, process in fleet.items():
            assert await health(asks[name], process) == "ok\n"
            allow(process, 3)  # which stay open: none that the daemon closes makes room
        states.write(tmp_path / "checkpoints" / "step_2", state)
        await told(asks["hub"], fleet["hub"], "open files")
        allow(fleet["hub"], FILES)
        await told(asks["hub"], fleet["hub"], "")
        await told(asks["peer"], fleet["peer"], "open files")
        for process in fleet.values():
            allow(process, FILES)
        assert json.loads(await text(fleet["peer"], f"/wait?version=0.2&timeout_s={DEADLINE_S}"))["waited_s"] >= 0
        for name, process in fleet.items():
            await told(asks[name], process, "")
            assert process.log.stat().st_size < MOST_LOG_BYTES, process.log.read_text()[-2000:]
