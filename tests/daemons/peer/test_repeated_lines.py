"""Daemons in processes of their own log a lasting trouble once, and count its repetitions to the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.until import until

TRIES = 4


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs without room for a version."""
    place = tmp_path / "full"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k,mode=700", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@asynccontextmanager
async def process(log: Path, *words: object) -> Any:
    command = [sys.executable, "-m", "p2pcast.cli", "--log-format", "json", *map(str, words)]
    with log.open("wb") as output:
        running = await asyncio.create_subprocess_exec(*command, stderr=output)
    try:
        yield running
    finally:
        if running.returncode is None:
            running.terminate()
        await running.wait()


def peer(swarm: Any, install: str) -> list[object]:
    host, port = swarm.address
    there = ["--state", swarm.folder / "a", "--shadow", swarm.tmpfs / "a", "--token-file", swarm.folder / "token"]
    free = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    return ["join", f"{host}:{port}", "--plaintext", "--name", "a", "--install", install, *there, *free]


def warnings(log: Path, words: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in found if line["level"] == "warning" and words in line["message"]]


def counted(lines: list[dict[str, Any]]) -> int:
    """Occurrences that the lines tell of: the first in full, and the rest by their count."""
    assert "more_times" not in lines[0]
    assert all("more_times" in line for line in lines[1:])
    return sum(line.get("more_times", 1) for line in lines)


async def installed(swarm: Any, states: Any, install: str, until_tried: Callable[[], Awaitable[object]]) -> Path:
    """The log of a peer whose engine refuses each install."""
    await swarm.hub_up()
    swarm.publish(1, states.first())
    log: Path = swarm.folder / "a.log"
    async with process(log, *peer(swarm, install)) as running:
        await until_tried()
        running.terminate()
        assert await running.wait() == 0
    return log


async def test_a_refused_install_is_logged_once_and_counted(swarm, states, tmp_path):
    tries = tmp_path / "tries"

    async def tried() -> None:
        await until(lambda: tries.exists() and tries.read_text().count("x") > TRIES)

    log = await installed(swarm, states, f"exec:sh -c 'echo x >> {tries}; echo no such engine >&2; exit 7'", tried)
    lines = warnings(log, "exec")
    assert abs(counted(lines) - tries.read_text().count("x")) <= 1
    assert len(lines) < TRIES


@pytest.mark.root
async def test_a_full_disk_is_logged_once_and_counted(swarm, states, full):
    async def tried() -> None:
        await until(lambda: len(warnings(swarm.folder / "a.log", "no room")) > 1)

    log = await installed(swarm, states, f"safetensors:{full}/out", tried)
    lines = warnings(log, "no room")
    assert counted(lines) > len(lines)


async def test_a_worker_without_its_engine_logs_once_and_counts(tmp_path):
    asked = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")  # otherwise the end has one of two errors
        writer.close()

    (tmp_path / "bearer").write_text("x")
    (tmp_path / "bearer").chmod(0o600)
    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    there = "{}:{}".format(*server.sockets[0].getsockname())
    engine = ["--engine", f"http://{there}", "--peer", there]
    words = ["work", there, "--task", "sums", *engine, "--bearer-file", tmp_path / "bearer"]
    log = tmp_path / "log"
    async with server, process(log, *words) as running:
        await until(lambda: asked > TRIES)
        running.terminate()
        await running.wait()
    lines = warnings(log, "waiting for the engine")
    assert counted(lines) > 1
    assert len(lines) < TRIES
