"""The peer's side of the install socket: an engine's ranks fetch patches here as file descriptors, and report here.

Guarantees:

- Only processes of the same user, or of root, are served.
- A rank can request versions, never paths.
- A stuck or hostile client costs one bounded connection and nothing else.

Frames: ``rollout_node.in_engine.install_frames``.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from p2pcast.checkpoint.adapter_form import adapter_configs
from p2pcast.ground import limits
from p2pcast.ground.errors import LocalError, P2PCastError, RemoteError
from p2pcast.ground.version import Version
from p2pcast.process.background_tasks import spawn
from rollout_node.in_engine.install_frames import ALIVE, LENGTH, other_user, pack, unpack
from rollout_node.installers.install_instructions import Report
from rollout_node.installers.weight_provider import WeightProvider

EXHAUSTED_S = 0.5
"""Seconds for which no connection is accepted after the process has run out of descriptors."""


class Expectation:
    """Collects one report per rank. ``wait`` returns once all ranks have reported."""

    def __init__(self, matches: Callable[[Report], bool], ranks: int) -> None:
        self._matches, self._ranks = matches, ranks
        self._found: dict[int, Report] = {}
        self._complete = asyncio.Event()
        self._lost: P2PCastError | None = None
        self._began_at = asyncio.get_running_loop().time()

    def awaits(self, report: Report, made_at: float) -> bool:
        return made_at >= self._began_at and self._matches(report)

    def check(self, report: Report) -> None:
        """Raises RemoteError if the engine does not have the report's rank, or if ranks disagree on how many ranks the
        engine has.
        """
        rank, ranks = report["rank"], report.get("ranks")
        if rank >= self._ranks:
            raise RemoteError(f"a report of rank {rank}: this engine has {self._ranks} workers, and ranks count from 0")
        others = {known.get("ranks") for known in self._found.values()}
        if others - {ranks}:
            raise RemoteError(
                f"a report says that the engine has {ranks} workers, others say {', '.join(map(str, others))}"
            )

    def offer(self, report: Report, made_at: float) -> None:
        """Count a report, unless it was made (``made_at``, loop clock) before this question was asked."""
        if self.awaits(report, made_at):
            self._found[report["rank"]] = report
            if len(self._found) >= self._ranks:
                self._complete.set()

    async def wait(self, timeout_s: float) -> list[Report]:
        """Return the reports in order of rank. Raises TimeoutError, or the error given to ``lose``."""
        async with asyncio.timeout(timeout_s):
            await self._complete.wait()
        if self._lost is not None:
            raise self._lost
        return [self._found[rank] for rank in sorted(self._found)]

    @property
    def missing(self) -> int:
        return max(0, self._ranks - len(self._found))

    @property
    def missing_ranks(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank not in self._found]

    def lose(self, ranks: Collection[int], error: P2PCastError) -> None:
        """Give up on reports of ``ranks``: ``wait`` raises ``error`` if one of them is missing."""
        if not self._complete.is_set() and not self._found.keys() >= set(ranks):
            self._lost = error
            self._complete.set()


class InstallSocket:
    """An asyncio server on a Unix socket at ``path`` (mode 0600)."""

    def __init__(self, path: Path, provider: WeightProvider) -> None:
        self.path, self._provider = path, provider
        self._sock: socket.socket | None = None
        self._again: asyncio.TimerHandle | None = None
        """Timer that starts accepting again after the process ran out of descriptors."""
        self._serving: set[asyncio.Task[None]] = set()
        self._expecting: set[Expectation] = set()
        self.signs: dict[str, Callable[[Report, float], None]] = {}
        """By engine: called with each sign of life of its processes, and the loop-clock time at which it was sent."""
        self.elsewhere: Callable[[], str] | None = None
        """Returns the names of the members that forward reports from other hosts; None if there are none."""

    async def start(self) -> None:
        """Listen, replacing a socket left behind by a dead process. Raises LocalError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        mask = os.umask(0o177)
        try:
            if self._is_dead():
                self.path.unlink()
            sock.bind(str(self.path))
            sock.listen(limits.MAX_INSTALL_CONNECTIONS)
        except OSError as error:
            sock.close()
            raise LocalError(
                f"install socket {self.path}: {error.strerror or error}; choose a shorter or another path with --state"
            ) from None
        finally:
            os.umask(mask)
        self._sock = sock
        self._attend(sock)

    async def close(self) -> None:
        if self._sock is None:
            return
        if self._again is not None:
            self._again.cancel()
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        self._sock = None
        self.path.unlink(missing_ok=True)
        tasks = tuple(self._serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.contextmanager
    def expect(self, matches: Callable[[Report], bool], ranks: int) -> Any:
        """Collect the reports that match until the ``with`` block exits; yields an Expectation."""
        expectation = Expectation(matches, ranks)
        self._expecting.add(expectation)
        try:
            yield expectation
        finally:
            self._expecting.discard(expectation)

    def layout_document(self) -> bytes:
        return self._provider.layout_document()

    def offer(
        self, request: Mapping[str, Any], age_s: float = 0.0, claim: Callable[[Report], None] | None = None
    ) -> None:
        """Handle a report made ``age_s`` ago by a rank on this or another host. Raises RemoteError if it is malformed.

        ``claim`` is called first if the report answers a pending question. Only the engine's own ranks know its nonce.
        """
        report, made_at = _checked(request), asyncio.get_running_loop().time() - age_s
        if report["phase"] == ALIVE and (note := self.signs.get(report["engine"])) is not None:
            note(report, made_at)
        awaited = [e for e in self._expecting if e.awaits(report, made_at)]
        for expectation in awaited:
            expectation.check(report)
        if claim is not None and awaited:
            claim(report)
        for expectation in tuple(self._expecting):
            expectation.offer(report, made_at)
        if "process" not in report:  # a report with this field comes from a process that is not a rank
            self._provider.report(report)

    def lose(self, ranks: Collection[int], error: P2PCastError) -> None:
        """Give up on the reports that ``ranks`` still owe."""
        for expectation in tuple(self._expecting):
            expectation.lose(ranks, error)

    def _is_dead(self) -> bool:
        if not self.path.is_socket():
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(str(self.path)) != 0

    def _attend(self, listener: socket.socket) -> None:
        if listener is self._sock:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection. Above the limit, close it at once: a rank retries, and a flood gains nothing."""
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # the client left before it was served
        except OSError:
            # No descriptor is left. The connection stays queued and the socket readable, so accepting again at once
            # would spin.
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            self._again = loop.call_later(EXHAUSTED_S, self._attend, listener)
            return
        if len(self._serving) >= limits.MAX_INSTALL_CONNECTIONS:
            sock.close()
            return

        def done(task: asyncio.Task[None]) -> None:
            self._serving.discard(task)
            sock.close()  # here: a task that is cancelled before it starts closes nothing

        task = spawn(self._serve(sock), "install-connection")
        self._serving.add(task)
        task.add_done_callback(done)

    async def _serve(self, sock: socket.socket) -> None:
        """Serve one connection until the client closes it or breaks a rule."""
        with contextlib.suppress(OSError, TimeoutError, EOFError):
            sock.setblocking(False)
            if other_user(sock) is not None:
                return
            while True:
                async with asyncio.timeout(limits.INSTALL_IDLE_S):
                    (length,) = LENGTH.unpack(await _receive(sock, LENGTH.size))
                    if length > limits.MAX_INSTALL_REQUEST_BYTES:
                        return
                    body = await _receive(sock, length)
                    fds: list[int] = []
                    try:
                        answer = self._answer(body, fds)
                    except P2PCastError as error:
                        answer = {"error": str(error), "kind": error.wire_code}
                    try:
                        await _send(sock, pack(answer, limits.MAX_LAYOUT_BYTES + limits.KIB), fds)
                    finally:
                        for fd in fds:
                            os.close(fd)

    def _answer(self, body: bytes, fds: list[int]) -> dict[str, Any]:
        request = unpack(body)
        op = request.get("op")
        if op == "layout":
            return {"layout": self._provider.layout_document()}
        if op == "patches":
            base, to = request.get("from"), request.get("to")
            if not isinstance(to, str) or not (base is None or isinstance(base, str)):
                raise RemoteError("a request for patches names versions as text")
            version = Version.parse(to)
            found = self._provider.patches(Version.parse(base) if base else None, version)
            schedule, config = self._provider.schedule(version), self._provider.config(version)
            paths = [found] if isinstance(found, Path) else found
            if not 1 <= len(paths) <= limits.MAX_INSTALL_FILES:
                raise LocalError(
                    f"{len(paths)} patch files lead to {to}; at most {limits.MAX_INSTALL_FILES} go at once"
                )
            for path in paths:
                fds.append(_open(path))  # noqa: PERF401 - what was opened before a failure must still be closed
            return {"dense": isinstance(found, Path), "schedule": schedule, "config": config}
        if op == "adapters":
            named = request.get("version")
            if not isinstance(named, str):
                raise RemoteError("a request for adapters names a version as text")
            return {"configs": adapter_configs(self._provider.small_files(Version.parse(named)))}
        if op == "report":
            self.offer(request)
            return {}
        raise RemoteError("the install socket knows the requests layout, patches, adapters and report")


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise LocalError(f"{path.name}: {error.strerror or error}; stage the version again") from None


def _checked(request: Mapping[str, Any]) -> Report:
    """Return the report after checking all required fields. Raises RemoteError."""
    wanted: dict[str, type | tuple[type, ...]] = {
        "engine": str,
        "rank": int,
        "phase": str,
        "version": (str, type(None)),
        "error": (str, type(None)),
    }
    for field, kinds in wanted.items():
        if not isinstance(request.get(field), kinds):
            raise RemoteError(f"a report's field {field!r} is missing or of another kind")
    rank, ranks = request["rank"], request.get("ranks", 1)
    if (
        type(rank) is not int
        or not 0 <= rank < limits.MAX_RANKS
        or type(ranks) is not int
        or not 1 <= ranks <= limits.MAX_RANKS
    ):
        raise RemoteError(
            f"a report's rank must be from 0 to {limits.MAX_RANKS - 1},"
            f" the number of ranks from 1 to {limits.MAX_RANKS}"
        )
    return {key: value for key, value in request.items() if key != "op"}


async def _receive(sock: socket.socket, n: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < n:  # grows as bytes arrive, so a length by itself allocates nothing
        got = await loop.sock_recv(sock, min(n - len(data), limits.MIB))
        if not got:
            raise EOFError
        data += got
    return bytes(data)


async def _send(sock: socket.socket, frame: bytes, fds: list[int]) -> None:
    """Send the frame, with the descriptors attached to its first bytes."""
    loop = asyncio.get_running_loop()
    sent = 0
    if fds:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        while True:
            try:
                sent = sock.sendmsg([frame[: LENGTH.size]], rights)
                break
            except BlockingIOError:
                writable: asyncio.Future[None] = loop.create_future()
                loop.add_writer(sock, writable.set_result, None)
                try:
                    await writable
                finally:
                    loop.remove_writer(sock)
    await loop.sock_sendall(sock, frame[sent:])
