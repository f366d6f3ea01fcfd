"""Rivals without deltas: they get a whole state of which one word in a hundred has changed. Roles of
``netem.broadcast.contenders``.

Each process generates the state from its number: bf16 words of normally distributed weights. Each step changes the
share CHANGED of the words at random places. Nine in ten of these change by one unit in the last place, the others by
two to four. A peer's final state is compared with the hub's file by BLAKE3, after the clock has stopped.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from netem.broadcast.json_lines import PORT, carried, orders, write_facts
from netem.emulation.description import EmulatedNetwork

CHANGED = 0.01
SCALE = 0.02
FARTHER = 0.1
FARTHEST = 4
ZSTD_LEVEL = 1
ZSTD_THREADS = 4
READ_BYTES = 1 << 20
RSYNC_OPTIONS = (
    "--inplace", "--no-whole-file", "--ignore-times", "--compress", "--compress-choice=zstd", "--compress-level=1",
)  # fmt: skip
RSYNC_BLOCK_BYTES = 128
"""Small enough that many blocks are unchanged. With rsync's own choice (the root of the size) every block has a change,
and everything is sent. Smaller blocks move less and take longer.
"""
RSYNC_PORT = 873

Words = npt.NDArray[np.uint16]


def rsync_options(network: EmulatedNetwork) -> list[str]:
    """With one processor for all hosts (user-mode Linux), searching small blocks takes four times as long as sending
    everything; there rsync chooses the size.
    """
    return [*RSYNC_OPTIONS, *([f"--block-size={RSYNC_BLOCK_BYTES}"] if network.only_rates else [])]


def first(words: int) -> Words:
    weights = np.random.default_rng(0).standard_normal(words, np.float32) * np.float32(SCALE)
    return (weights.view(np.uint32) >> 16).astype(np.uint16)


def stepped(words: Words, step: int) -> Words:
    """The state after one more step with that number."""
    random = np.random.default_rng(step)
    where = np.flatnonzero(random.random(words.size, np.float32) < CHANGED)
    far = np.where(random.random(where.size) < FARTHER, random.integers(2, FARTHEST + 1, where.size), 1)
    # Away from zero or towards it: the sign bit stays.
    moved = words[where].astype(np.int64) + far * random.choice((-1, 1), where.size)
    after = words.copy()
    after[where] = np.where((moved ^ words[where]) & 0x8000, words[where] ^ 1, moved).astype(np.uint16)
    return after


class StateSequence:
    """Consecutive states, in one file."""

    def __init__(self, state_bytes: int, path: Path) -> None:
        self.path = path
        self.step = 0
        self._words = first(state_bytes // 2)

    def save(self) -> None:
        """Write the state and rename it into place."""
        part = self.path.with_suffix(".part")
        self._words.tofile(part)
        part.rename(self.path)

    def next(self) -> None:
        self.step += 1
        self._words = stepped(self._words, self.step)


def digest(path: Path) -> str:
    from blake3 import blake3

    return blake3(path.read_bytes()).hexdigest()


@contextmanager
def _folder(settings: dict[str, Any]) -> Iterator[Path]:
    name = tempfile.mkdtemp(prefix="p2pcast-dense-", dir=settings["folder"])
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True)


def _report_facts(path: Path, before: tuple[int, int]) -> None:
    """Answer the request for facts, which comes after the clock has stopped."""
    received, sent = (now - then for now, then in zip(carried(), before, strict=True))
    write_facts(facts={"digest": digest(path), "received_bytes": received, "sent_bytes": sent})


# -- rsync: a daemon at the hub, every peer fetches the new file against its old one


def rsync_hub(settings: dict[str, Any]) -> None:
    """``state_bytes``. An order is ``{"save": true}``, answered when the next state is ready, or ``{"facts": true}``.
    Each connection gets its own rsync process, as under inetd.
    """
    with _folder(settings) as folder:
        course = StateSequence(settings["state_bytes"], folder / "state")
        config = folder / "rsyncd.conf"
        config.write_text(f"use chroot = no\nuid = {os.getuid()}\ngid = {os.getgid()}\n[state]\npath = {folder}\n")
        server = socket.create_server(("", RSYNC_PORT), backlog=128)
        threading.Thread(target=_serve, args=(server, config), daemon=True).start()
        write_facts(ready=True)
        before = carried()
        for order in orders():
            if "save" in order:
                course.next()
                course.save()
                before = carried()
                write_facts(saved=course.step)
            else:
                _report_facts(course.path, before)


def _serve(server: socket.socket, config: Path) -> None:
    def one(connection: socket.socket) -> None:
        with connection:
            words = ["rsync", "--daemon", f"--config={config}"]
            subprocess.run(
                words, stdin=connection.fileno(), stdout=connection.fileno(), stderr=subprocess.DEVNULL, check=False
            )

    while True:
        threading.Thread(target=one, args=(server.accept()[0],), daemon=True).start()


def rsync(settings: dict[str, Any]) -> None:
    """``hub``: its address. ``options``: of rsync. The first state exists already. An order is ``{"fetch": N}`` or
    ``{"facts": true}``.
    """
    with _folder(settings) as folder:
        course = StateSequence(settings["state_bytes"], folder / "state")
        course.save()
        write_facts(ready=True)
        before = carried()
        for order in orders():
            if "fetch" in order:
                before = carried()
                words = [
                    "rsync",
                    *settings["options"],
                    f"--port={RSYNC_PORT}",
                    f"rsync://{settings['hub']}/state/state",
                    str(course.path),
                ]
                done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(f"rsync ended with {done.returncode}: {done.stderr.strip()}")
                write_facts(done_s=time.time())
            else:
                _report_facts(course.path, before)


# -- the whole file, compressed by zstd while it is sent over HTTP


class Stream:
    """One state, compressed once; every client reads the part compressed so far."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._whole = False
        self._grown = asyncio.Event()

    def add(self, chunk: bytes, *, whole: bool) -> None:
        if chunk:
            self._chunks.append(chunk)
        self._whole = whole
        self._grown.set()
        self._grown = asyncio.Event()

    async def read(self) -> AsyncIterator[bytes]:
        at = 0
        while at < len(self._chunks) or not self._whole:
            if at == len(self._chunks):
                await self._grown.wait()
                continue
            yield self._chunks[at]
            at += 1


def _compress(path: Path, loop: asyncio.AbstractEventLoop, stream: Stream) -> None:
    import zstandard

    packer = zstandard.ZstdCompressor(level=ZSTD_LEVEL, threads=ZSTD_THREADS).compressobj()
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            loop.call_soon_threadsafe(lambda chunk: stream.add(chunk, whole=False), packer.compress(part))
    loop.call_soon_threadsafe(lambda chunk: stream.add(chunk, whole=True), packer.flush())


def zstd_hub(settings: dict[str, Any]) -> None:
    """``state_bytes``. Orders: ``{"save": true}``, as above; ``{"publish": true}`` to read and compress it (/N is the
    Nth state); ``{"facts": true}``.
    """
    from aiohttp import web

    streams: dict[int, Stream] = {}

    async def get(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for chunk in streams.setdefault(int(request.match_info["number"]), Stream()).read():
            await response.write(chunk)
        await response.write_eof()
        return response

    async def work(folder: Path) -> None:
        loop = asyncio.get_running_loop()
        app = web.Application()
        app.router.add_get("/{number:[0-9]+}", get)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, port=PORT).start()
        course = StateSequence(settings["state_bytes"], folder / "state")
        write_facts(ready=True)
        before = carried()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            if "save" in line:
                course.next()
                course.save()
                before = carried()
                write_facts(saved=course.step)
            elif "publish" in line:
                stream = streams.setdefault(course.step, Stream())
                await loop.run_in_executor(None, _compress, course.path, loop, stream)
            else:
                _report_facts(course.path, before)
                streams.clear()
        await runner.cleanup()

    with _folder(settings) as folder:
        asyncio.run(work(folder))


def zstd(settings: dict[str, Any]) -> None:
    """``url``. An order is ``{"fetch": N}``, to fetch, decompress and write the Nth state, or ``{"facts": true}``."""
    import json

    import aiohttp
    import zstandard

    async def fetch(http: aiohttp.ClientSession, number: int, path: Path) -> None:
        unpacker = zstandard.ZstdDecompressor().decompressobj()
        async with http.get(f"{settings['url']}/{number}") as response:
            with path.open("wb") as file:
                async for chunk in response.content.iter_any():
                    file.write(unpacker.decompress(chunk))
        write_facts(done_s=time.time())

    async def work(path: Path) -> None:
        loop = asyncio.get_running_loop()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as http:
            write_facts(ready=True)
            before = carried()
            while line := await loop.run_in_executor(None, sys.stdin.readline):
                if "fetch" in line:
                    before = carried()
                    await fetch(http, json.loads(line)["fetch"], path)
                else:
                    _report_facts(path, before)

    with _folder(settings) as folder:
        asyncio.run(work(folder / "state"))
