"""Staging on the event loop: cells are decoded on all cores as their bytes arrive, and then the shadow is updated.

Guarantees: relaying never waits for staging. Memory is bounded (a few payloads and patches per core). The shadow does
not change until the artifact is sealed and every cell has reached its digest in the directory. An aborted artifact
leaves no files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from p2pcast.artifact.assembly import Placed
from p2pcast.codec.digest import word_dtype
from p2pcast.codec.kernel_warmup import steps, warm_up_for
from p2pcast.codec.layout import Cell, Layout
from p2pcast.ground.errors import IntegrityError, LocalError, RetryableError
from p2pcast.ground.ordered_map import cores, grouped
from p2pcast.ground.version import Version
from p2pcast.relay.holding import Holding
from p2pcast.state.patch_builder import PatchBuilder
from p2pcast.state.patch_file import PatchWriter
from p2pcast.state.shadow import Shadow

P = ParamSpec("P")
T = TypeVar("T")


class Staging:
    """Decodes on ``workers`` threads, by default one per core."""

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or cores()
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="p2pcast-decode")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def patch(self, holding: Holding, shadow: Shadow) -> Path:
        """Return the finished patch of a delta against the shadow's version, once the delta is sealed.

        Raises IntegrityError (wrong base, damage, corrupt shadow), LocalError (tmpfs full), RetryableError (aborted).
        """
        base, version = holding.open.base, holding.open.version
        assert base is not None
        writer = PatchWriter(shadow.patch_path(version), shadow.layout, base, version)
        try:
            stager = PatchBuilder(shadow, shadow.layout, version, base, writer)
            await self._decode_all(holding, stager)
            manifest = holding.assembly.manifest
            assert manifest is not None
            finishing = asyncio.get_running_loop().run_in_executor(None, stager.finish, manifest.state)
            await _wait_for_threads([finishing])
            return finishing.result()
        except BaseException as error:
            writer.abandon()
            if holding.aborted and isinstance(error, LocalError | IntegrityError):
                # The abort closed the log under the decoder, so report the abort.
                raise RetryableError(f"version {version} was aborted, or is now received another way") from None
            raise

    async def fill(self, holding: Holding, folder: Path) -> Shadow:
        """Create a shadow at ``folder``, filled from a complete anchor, in place of any older one."""
        manifest = holding.assembly.manifest
        assert manifest is not None
        placed = {p.cell: p for p in holding.assembly.directory}

        def words_of(cell: Cell) -> npt.NDArray[Any]:
            entry = placed[cell.index]
            return np.frombuffer(holding.log.read(entry.offset, entry.bytes), word_dtype(cell.word_bytes))

        return await self.new_shadow(folder, holding.assembly.layout, holding.open.version, words_of, manifest.state)

    async def new_shadow(
        self,
        folder: Path,
        layout: Layout,
        version: Version,
        words_of: Callable[[Cell], npt.NDArray[Any]],
        state: int | None,
    ) -> Shadow:
        """Create a shadow filled with a whole state. ``state``: the required digest."""

        def make() -> Shadow:
            warm_up_for(layout)
            shadow = Shadow.create(folder, layout)
            try:
                shadow.fill(version, words_of, state, workers=self.workers)
            except BaseException:
                shadow.close()
                raise
            return shadow

        return await self.run(make)

    async def apply(self, shadow: Shadow, patch: Path) -> None:
        await self.run(shadow.apply, patch, self.workers)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking work off the loop."""
        return await asyncio.get_running_loop().run_in_executor(None, partial(work, *args, **kwargs))

    async def warm_up(self) -> None:
        """Load the codec's kernels. A daemon stopped meanwhile only waits for one compilation, not for all."""
        warming = steps()
        while await self.run(next, warming, True) is None:
            pass

    def run_on_all_cores(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Run one of many jobs that keep all cores busy, on the decoder threads."""
        return asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args, **kwargs))

    async def _decode_all(self, holding: Holding, stager: PatchBuilder) -> None:
        loop = asyncio.get_running_loop()
        piece = holding.open.piece
        begun = 0
        running: set[asyncio.Future[None]] = set()
        try:
            while True:
                holding.progress.clear()
                if holding.aborted:
                    raise RetryableError(f"version {holding.open.version} was aborted, or is now received another way")
                directory = holding.assembly.directory
                readable = holding.stored.prefix * piece
                ready = begun
                while ready < len(directory) and (
                    directory[ready].offset + directory[ready].bytes <= readable or holding.finished
                ):
                    ready += 1
                for together in grouped(directory[begun:ready], _work_bytes):
                    if len(running) >= 2 * self.workers:
                        running = await _some(running)
                    running.add(loop.run_in_executor(self._pool, _decode, holding, stager, together))
                begun = ready
                if holding.finished and begun == len(directory):
                    while running:
                        running = await _some(running)
                    return
                if not holding.progress.is_set():
                    await holding.progress.wait()
        finally:
            await _wait_for_threads(running)


def _decode(holding: Holding, stager: PatchBuilder, cells: Sequence[Placed]) -> None:
    """Decode cells that are neighbours in the log, reading them at once."""
    first, last = cells[0], cells[-1]
    payloads = memoryview(holding.log.read(first.offset, last.offset + last.bytes - first.offset))
    for placed in cells:
        at = placed.offset - first.offset
        stager.decode(placed, payloads[at : at + placed.bytes])


def _work_bytes(placed: Placed) -> int:
    """Return the cost of decoding a cell, as the number of bytes scanned in the same time. 15 kB of ``flat`` take 0.27
    ms. A scanned MiB takes 0.09 ms.
    """
    return 200 * placed.bytes


async def _wait_for_threads(running: Collection[asyncio.Future[Any]]) -> None:
    """Return when all have finished, even if cancelled meanwhile. A thread cannot be stopped, and would write to a
    removed patch, or to a different file that has the number of a closed descriptor.
    """
    cancelled: asyncio.CancelledError | None = None
    while not all(future.done() for future in running):
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
    for future in running:
        if not future.cancelled():
            future.exception()  # mark it as retrieved
    if cancelled is not None:
        raise cancelled


async def _some(running: set[asyncio.Future[None]]) -> set[asyncio.Future[None]]:
    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for future in done:
        future.result()
    return running
