"""Hub and ledger of one run in this process. Each dies at most once, and starts again from its remains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Concatenate

from netem.fleet.processes import free_port
from p2pcast.process import event_loop
from tests.support.until import wait_until
from tests.trainer_node.learning.death_points import LEDGER, DiskWatcher, HubDisk, PassedPoints
from tests.trainer_node.ledger.crash_points import Answer, Died, Terms, as_crashed
from trainer_node.hub import Hub, opened
from trainer_node.hub_config import HubConfig
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.ledger import Ledger
from trainer_node.ledger.ledger_rows import Policy

END_S, POLL_S = 600.0, 0.01
AGAIN_S = 0.2
"""Time between two cancellations of a dead hub, in seconds."""


class HubPart:
    """A hub on an event loop of its own. ``base``: folder of the first weights."""

    def __init__(self, folder: Path, base: Path, points: PassedPoints, watcher: DiskWatcher) -> None:
        self._folder, self._base = folder, base
        self._points, self._watcher = points, watcher
        self._listen, self._http = free_port(), free_port()
        self.token_file = folder / "token"
        self._cut = threading.Event()
        self._address: Path | None = None
        """Written by the hub once it serves."""
        self._hub: Hub | None = None
        self._work: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._stopping = False
        self._loop = event_loop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="hub")
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listen}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http}"

    def wait_up(self) -> Path:
        """Returns while a hub serves, with the file of its address. Raises the error that ended it."""

        def check() -> None:
            if self._error is not None:
                raise self._error

        return wait_until(
            lambda: self._address, "the hub starts", holds=lambda file: file and file.exists(), check=check
        )

    def deltas(self) -> list[Path]:
        """Files of the deltas that the hub stores, once it serves."""
        return sorted((self.wait_up().parent / "deltas").glob("*.p2pd"))

    def stop(self) -> None:
        self._stopping = True
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(END_S)
        if self._error is not None:
            raise self._error

    # -- in the thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._processes())
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            self._error = error

    async def _processes(self) -> None:
        disk = HubDisk(self._points, self._folder / "hub", self._cut_off)
        self._watcher.hub = disk
        try:
            await self._process(disk.root, disk)
        finally:
            self._watcher.hub = None
        if self._cut.is_set():
            root = self._folder / "hub-again"
            disk.restore(root)
            await self._process(root, None)

    async def _process(self, root: Path, disk: HubDisk | None) -> None:
        self._work = asyncio.ensure_future(self._serve(root, disk))
        if self._stopping:
            self._work.cancel()
        while not self._work.done():
            await asyncio.wait([self._work], timeout=AGAIN_S)
            if disk is not None and self._cut.is_set():
                # An error of a dead hub's disk may have replaced the cancellation of a task.
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
        dead = disk is not None and self._cut.is_set()
        if not dead and not self._work.cancelled():
            self._work.result()

    async def _serve(self, root: Path, disk: HubDisk | None) -> None:
        address = root / "state" / "daemon.json"
        address.unlink(missing_ok=True)
        self._address = address
        config = HubConfig(
            checkpoints=None,
            state=root / "state",
            shadow=root / "tmpfs" / "shadow",
            base=self._base,
            listen=("127.0.0.1", self._listen),
            http=("127.0.0.1", self._http),
            token_file=self.token_file,
            plaintext=True,
            recall_s=0.0,
        )
        async with opened(config) as hub:
            self._hub = hub
            try:
                await hub.run()
            finally:
                self._hub = None
                if disk is not None and self._cut.is_set():
                    await hub.http.stop()
                    disk.abandoned = True
        assert self._cut.is_set() or not hub.tasks.status()

    def _cancel(self) -> None:
        if self._work is not None:
            self._work.cancel()

    def _cut_off(self) -> None:
        """The hub dies: its connections end here, and nothing that it does from now on is seen."""
        if threading.current_thread() is not self._thread:
            self._loop.call_soon_threadsafe(self._sever)
            assert self._cut.wait(END_S)
        elif not self._cut.is_set():
            self._sever()

    def _sever(self) -> None:
        if self._cut.is_set():
            return
        self._address = None
        if self._hub is not None:
            listener = self._hub.control.listener
            for server in listener._servers:
                server.close()
            for stripe in listener._waiting.all():
                stripe.abort()
            for link in listener._all():
                link.abort()
        self._cut.set()
        self._cancel()


class LedgerPart:
    """A ledger, which one caller at a time asks. ``now``, ``new_id``: as of Ledger."""

    def __init__(
        self,
        folder: Path,
        policy: Policy,
        points: PassedPoints,
        now: Callable[[], float],
        new_id: Callable[[], bytes],
    ) -> None:
        self._folder, self._policy, self._points = folder, policy, points
        self._now, self._new_id = now, new_id
        self._calling = "the start"
        self._died_into: Path | None = None
        self._open()

    def ask(
        self, method: Callable[Concatenate[Ledger, Terms], Answer], *terms: Terms.args, **named: Terms.kwargs
    ) -> Answer:
        """Repeated until there is an answer, as BatchClient and the workers do."""
        while True:
            try:
                return self.ask_once(method, *terms, **named)
            except Died:
                continue

    def ask_once(
        self, method: Callable[Concatenate[Ledger, Terms], Answer], *terms: Terms.args, **named: Terms.kwargs
    ) -> Answer:
        """Raises Died if the ledger has died instead of an answer; another one is there then."""
        self._calling = method.__name__
        try:
            return method(self.ledger, *terms, **named)
        except Died:
            self.ledger.close()
            self._open()
            raise

    def close(self) -> None:
        self.ledger.close()

    def _open(self) -> None:
        while True:
            if self._died_into is not None:
                self._folder, self._died_into = self._died_into, None
            self.store = LedgerStore(self._folder, boundary=self._boundary, segment_bytes=2048)
            try:
                self.ledger = Ledger(self.store, self._policy, now=self._now, new_id=self._new_id)
                return
            except Died:
                self.store.close()

    def _boundary(self, name: str) -> None:
        if self._points.reached(LEDGER, f"{name} of {self._calling}") is not None:
            self._died_into = as_crashed(self._folder, "again")
            raise Died(LEDGER)
