"""Background tasks with an owner: named, kept referenced, cancelled at the end; no failure goes unreported.

Promises: each failure in a daemon is in its log with the task's name and a traceback, in ``/status``, in an event ``task_failed`` and in a metric. The consequence depends
on which work failed:

| what failed | with | then |
|---|---|---|
| the daemon's own work (``Tasks.group``, ``Tasks.later``) | an exception that is no P2PCastError; a loop that ends by itself | the daemon ends with exit code 1; its last line names the task |
| the same, of ``Tasks.later`` | LocalError | the daemon goes on, and ``/healthz`` answers 503 with the reason |
| the same, of ``Tasks.later`` | another P2PCastError | log and event alone: it concerns others |
| work for one connection (``vital=False``, ``spawn``), a callback, a thread | an exception that is no P2PCastError | the connection ends, ``/healthz`` answers 503 with the reason |

After a bug in the daemon's own work its state in memory cannot be trusted; the next start reads the state from disk, as after a crash. One peer's input must not be able to end a
daemon: so a failure that one connection may have caused makes the daemon unhealthy, and the operator's probe decides on a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from p2pcast import limits
from p2pcast.errors import LocalError, P2PCastError
from p2pcast.events import Events

logger = logging.getLogger("p2pcast.tasks")

T = TypeVar("T")

END_S = 1.0
"""At the daemon's end: for background tasks to finish what they have begun, such as a write to the state folder."""


class TaskFailedError(LocalError):
    """A task of this daemon failed with an exception that nobody expected."""


@dataclass(frozen=True, slots=True)
class Failure:
    """``why``: for the log, events and ``/status``. ``kind``: the exception's type, fit for everybody."""

    task: str
    why: str
    kind: str


def unexpected(error: BaseException) -> BaseException | None:
    """``error``, or the first one of a group, that is no P2PCastError and no cancellation; None when there is none."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := unexpected(inner)) is not None), None)
    return None if isinstance(error, P2PCastError | asyncio.CancelledError) else error


def spawn(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """A task that the caller keeps and cancels, and whose result nobody awaits. Its exception goes to the loop's exception handler, which is the daemon's."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_settled)
    return task


def _settled(task: asyncio.Task[Any]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    if unexpected(error) is None:
        logger.warning("background task %r: %s", task.get_name(), error)
        return
    context = {"message": f"background task {task.get_name()!r} failed", "exception": error, "task": task}
    task.get_loop().call_exception_handler(context)


def unforeseen(what: str, error: Exception) -> None:
    """Report a bug that does not stop the daemon's work to the daemon on this loop: ``what`` names the failed work in health, status and log."""
    asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})


class Tasks:
    """All background tasks of one daemon, and what has failed in it."""

    def __init__(self, events: Events) -> None:
        self.failures: list[Failure] = []
        """Failures that make the daemon unhealthy; the first MAX_FAILURES_KEPT."""
        self.failed = 0
        """Tasks and callbacks, since the start."""
        self._first: Failure | None = None
        self._events = events
        self._running: set[asyncio.Task[Any]] = set()
        self._fatal: asyncio.Future[None] | None = None
        self._ending = False
        self._thread = 0

    # -- work

    def later(self, work: Coroutine[Any, Any, None], name: str, *, vital: bool = True) -> None:
        """A task that nobody waits for. ``vital``: the daemon's own work; else work for one connection."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(lambda done: self._over(done, vital))

    def _over(self, task: asyncio.Task[Any], vital: bool) -> None:
        self._running.discard(task)
        if task.cancelled() or (error := task.exception()) is None or self._ending:
            return
        if unexpected(error) is not None:
            self.fail(task.get_name(), error, fatal=vital)
        elif vital and isinstance(error, LocalError):
            self.fail(task.get_name(), error)
        else:
            self.failed += 1
            logger.warning("background task %r: %s", task.get_name(), error)
            self._events.emit("task_failed", task=task.get_name(), why=str(error))

    @contextlib.asynccontextmanager
    async def group(self) -> AsyncIterator[Group]:
        """A TaskGroup for what runs as long as the daemon. Raises TaskFailedError, in a group, when a task of it or of ``later`` fails with what nobody expected."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.run(), name="background tasks")
            yield Group(self, group)

    async def run(self) -> None:
        """Until cancelled. Raises TaskFailedError when vital work has failed."""
        self._fatal = asyncio.get_running_loop().create_future()
        self._look()
        await self._fatal

    async def end(self) -> None:
        """Those that have begun get END_S; what still fails is no news."""
        self._ending = True
        if self._running:
            _, left = await asyncio.wait(self._running, timeout=END_S)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)

    # -- what has failed

    def fail(self, task: str, error: BaseException, *, fatal: bool = False) -> TaskFailedError:
        """Note it. With ``fatal`` the daemon ends."""
        bug = unexpected(error)
        failure = Failure(
            task, str(error) if bug is None else f"{type(bug).__name__}: {bug}"[: limits.MAX_EVENT_TEXT], type(error).__name__
        )
        self.failed += 1
        if len(self.failures) < limits.MAX_FAILURES_KEPT:
            self.failures.append(failure)
        logger.error("background task %r failed: %s", task, failure.why, exc_info=bug)
        self._events.emit("task_failed", task=task, why=failure.why)
        if fatal and self._first is None:
            self._first = failure
            self._look()
        return _ended(failure)

    def _look(self) -> None:
        if self._first is not None and self._fatal is not None and not self._fatal.done():
            self._fatal.set_exception(_ended(self._first))

    def healthy(self) -> tuple[bool, str]:
        """For /healthz, which is open to everybody: no message of an exception that nobody expected."""
        if not self.failures:
            return True, ""
        failure = self.failures[0]
        return (
            False,
            f"task {failure.task!r} failed ({failure.kind}), {self.failed} failures in all; see the log, and restart this daemon",
        )

    def status(self) -> list[dict[str, str]]:
        """For /status."""
        return [{"task": f.task, "why": f.why} for f in self.failures]

    # -- where failures come from that no task of ours has

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Exceptions in protocols, timers, callbacks and futures of this loop, and in threads, until the block ends."""
        loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        watchers = _WATCHERS.setdefault(loop, [])
        watchers.append(self)
        if len(watchers) == 1:
            loop.set_exception_handler(_heard)
        before = threading.excepthook

        def hook(args: threading.ExceptHookArgs) -> None:
            before(args)
            if args.exc_value is not None and not isinstance(args.exc_value, SystemExit) and not self._ending:
                name = "thread" if args.thread is None else args.thread.name
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    loop.call_soon_threadsafe(self.fail, f"thread {name}", args.exc_value)

        threading.excepthook = hook
        try:
            yield
        finally:
            if threading.excepthook is hook:
                threading.excepthook = before
            watchers.remove(self)
            if not watchers:
                del _WATCHERS[loop]
                loop.set_exception_handler(None)

    def heard(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> bool:
        """What the loop's exception handler is given. False where nothing failed that is ours."""
        error = context.get("exception")
        if self._ending or error is None or unexpected(error) is None:
            return False
        if isinstance(error, OSError) and "transport" in context:
            return False  # a connection that broke: its protocol is told
        task = context.get("task") or context.get("future")
        name = task.get_name() if isinstance(task, asyncio.Task) else str(context.get("message", "callback"))
        if (transport := context.get("transport")) is not None and (peer := transport.get_extra_info("peername")):
            name += f" (connection with {peer[0] if isinstance(peer, tuple) else peer})"
        if threading.get_ident() == self._thread:
            self.fail(name, error)
        else:  # a task that was collected by another thread
            loop.call_soon_threadsafe(self.fail, name, error)
        return True


_WATCHERS: dict[asyncio.AbstractEventLoop, list[Tasks]] = {}
"""Daemons by loop: one, but for tests. A callback belongs to its loop, so each of them is told."""


def _heard(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    ours = False
    for tasks in tuple(_WATCHERS.get(loop, ())):
        ours |= tasks.heard(loop, context)
    if not ours:
        loop.default_exception_handler(context)


class Group:
    """``Tasks.group`` gives one."""

    def __init__(self, tasks: Tasks, group: asyncio.TaskGroup) -> None:
        self._tasks, self._group = tasks, group

    def create_task(self, work: Coroutine[Any, Any, None], *, name: str, ends: bool = False) -> asyncio.Task[None]:
        """``ends``: whether the work may come to an end while the daemon goes on."""
        return self._group.create_task(self._part(work, name, ends), name=name)

    async def _part(self, work: Coroutine[Any, Any, None], name: str, ends: bool) -> None:
        try:
            await work
            if not ends:
                raise RuntimeError("it ended by itself")
        except Exception as error:
            if unexpected(error) is None:
                raise
            raise self._tasks.fail(name, error, fatal=True) from error


def _ended(failure: Failure) -> TaskFailedError:
    return TaskFailedError(
        f"ended, because its task {failure.task!r} failed: {failure.why}; the log has the traceback, and a restarted daemon goes on from the state folder"
    )
