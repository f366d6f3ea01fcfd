"""Background tasks with an owner: named, referenced, cancelled on shutdown, and reported when they fail.

Guarantees: each failure in a daemon is in its log with the task's name and a traceback, in ``/status``, in an event
``task_failed`` and in a metric. The consequence depends on the work and on the exception:

- Any work runs into a shortage on this machine (``p2pcast.process.shortages``: a full disk, no free descriptor). Then
  ``/healthz`` answers 503 with the reason, and ``short`` in ``/status`` lists the work. The daemon's loops, and other
  work that may be repeated, are restarted after growing pauses. The daemon is healthy again once the work has
  succeeded.
- The daemon's own work (``Tasks.group``, ``Tasks.later``) fails with another exception that is not a P2PCastError, or
  one of its loops returns. Then the daemon exits with code 1, and its last line names the task.
- Work of ``Tasks.later`` fails with a LocalError. The daemon continues, and ``/healthz`` answers 503 with the reason.
- Work of ``Tasks.later`` fails with any other P2PCastError. It is only logged and emitted: another node caused it.
- Work for one connection (``vital=False``, ``spawn``), a callback or a thread fails with an exception that is not a
  P2PCastError. Then the connection closes, and ``/healthz`` answers 503 with the reason.

After a bug in the daemon's own work, its state in memory cannot be trusted, so the next start reads the state from
disk, as after a crash. One peer's input must not be able to stop a daemon. So a failure that a connection may have
caused only makes the daemon unhealthy, and the operator's probe decides whether to restart it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from p2pcast.ground import limits
from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import LocalError, P2PCastError
from p2pcast.ground.private_random import uniform
from p2pcast.process.events import Events
from p2pcast.process.shortages import shortage

logger = logging.getLogger("p2pcast.tasks")

T = TypeVar("T")

END_S = 1.0
"""Seconds that background tasks get to finish on shutdown, for instance to complete a write to the state folder."""
RETRY_S, RETRY_MOST_S = 0.5, 30.0
"""First and longest pause, in seconds before jitter, between a shortage and the next attempt."""
PROVED_S = 2.0
"""A restarted loop counts as working once it has run for this many seconds, and for twice its last pause."""
LAPSE_S = 30.0
"""Seconds for which a shortage makes the daemon unhealthy if the work is not repeated."""

Work = Callable[[], Coroutine[Any, Any, None]]
"""Starts the work; called again after a shortage, so the work must be able to resume."""


class TaskFailedError(LocalError):
    """A task of this daemon failed with an unexpected exception."""


@dataclass(frozen=True, slots=True)
class Failure:
    """``why``: for the log, events and ``/status``. ``kind``: the exception's type, safe to show to any caller."""

    task: str
    why: str
    kind: str


def unexpected(error: BaseException) -> BaseException | None:
    """Return the first exception in ``error`` (itself, or in its group) that is neither a P2PCastError nor a
    cancellation; None if there is none.
    """
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := unexpected(inner)) is not None), None)
    return None if isinstance(error, P2PCastError | asyncio.CancelledError) else error


def _alone(error: BaseException) -> BaseException:
    """Return the first error in a group or its nested groups."""
    return _alone(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def spawn(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task whose result is never awaited. The caller keeps the task and cancels it. The task's exception goes
    to the loop's exception handler, which ``Tasks.watching`` sets.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_report_result)
    return task


def _report_result(task: asyncio.Task[Any]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    if unexpected(error) is None and shortage(error) is None:
        logger.warning("background task %r: %s", task.get_name(), error)
        return
    context = {"message": f"background task {task.get_name()!r} failed", "exception": error, "task": task}
    task.get_loop().call_exception_handler(context)


def report_bug(what: str, error: Exception) -> None:
    """Report a bug that does not stop the daemon's work. ``what`` names the failed work in health, status and log."""
    asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})


class Tasks:
    """All background tasks of one daemon, and its failures."""

    def __init__(self, events: Events) -> None:
        self.failures: list[Failure] = []
        """The first MAX_FAILURES_KEPT failures that make the daemon unhealthy."""
        self.failed = 0
        """Number of failed tasks, callbacks and threads since the start; work that is repeated counts once."""
        self._short: dict[str, tuple[Failure, asyncio.TimerHandle | None]] = {}
        """The newest MAX_FAILURES_KEPT current shortages by task, with a timer for those that lapse."""
        self._first: Failure | None = None
        self._events = events
        self._running: set[asyncio.Task[Any]] = set()
        self._fatal: asyncio.Future[None] | None = None
        self._ending = False
        self._thread = 0

    # -- work

    def later(self, work: Coroutine[Any, Any, None] | Work, name: str, *, vital: bool = True) -> None:
        """Start a task whose result is never awaited. ``vital``: the daemon's own work; otherwise work for one
        connection. Only a ``Work`` is repeated after a shortage.
        """
        begun = self.repeated(work, name) if callable(work) else work
        task = asyncio.get_running_loop().create_task(begun, name=name)
        self._running.add(task)
        task.add_done_callback(lambda done: self._finished(done, vital))

    def _finished(self, task: asyncio.Task[Any], vital: bool) -> None:
        self._running.discard(task)
        if task.cancelled() or (error := task.exception()) is None or self._ending:
            return
        if (short := shortage(error)) is not None:
            self.note_shortage(task.get_name(), short, error, lapses=True)
        elif unexpected(error) is not None:
            self.fail(task.get_name(), error, fatal=vital)
        elif vital and isinstance(error, LocalError):
            self.fail(task.get_name(), error)
        else:
            self.failed += 1
            logger.warning("background task %r: %s", task.get_name(), error)
            self._events.emit("task_failed", task=task.get_name(), why=str(error))

    async def repeated(self, work: Work, name: str) -> None:
        """Do ``work``, and restart it after each shortage, with growing pauses. Raises all its other errors."""
        loop, pauses = asyncio.get_running_loop(), Backoff(RETRY_S, RETRY_MOST_S, uniform)
        pause_s: float | None = None

        def proved() -> None:
            self.end_shortage(name)
            pauses.reset()

        while True:
            proof = None if pause_s is None else loop.call_later(max(PROVED_S, 2 * pause_s), proved)
            try:
                await work()
                self.end_shortage(name)
                return
            except Exception as error:
                if (short := shortage(error)) is None:
                    raise
                self.note_shortage(name, short, error)
            finally:
                if proof is not None:
                    proof.cancel()
            pause_s = pauses.next_s()
            await asyncio.sleep(pause_s)

    @contextlib.asynccontextmanager
    async def group(self) -> AsyncIterator[DaemonTaskGroup]:
        """A TaskGroup for work that runs as long as the daemon. Raises TaskFailedError, in an exception group, when a
        task of the group, or a vital task of ``later``, fails with an unexpected exception.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self.run(), name="background tasks")
            yield DaemonTaskGroup(self, group)

    async def run(self) -> None:
        """Wait until cancelled. Raises TaskFailedError when vital work has failed."""
        self._fatal = asyncio.get_running_loop().create_future()
        self._raise_first_failure()
        await self._fatal

    async def end(self) -> None:
        """Give running tasks END_S to finish, then cancel them. Failures from now on are not reported."""
        self._ending = True
        for _, timer in self._short.values():
            if timer is not None:
                timer.cancel()
        if self._running:
            _, left = await asyncio.wait(self._running, timeout=END_S)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)

    # -- failures

    def fail(self, task: str, error: BaseException, *, fatal: bool = False) -> TaskFailedError:
        """Record and report a failure. If ``fatal``, the daemon stops. Returns the error with which it stops."""
        bug = unexpected(error)
        failure = Failure(
            task,
            str(error) if bug is None else f"{type(bug).__name__}: {bug}"[: limits.MAX_EVENT_TEXT],
            type(error).__name__,
        )
        self.failed += 1
        if len(self.failures) < limits.MAX_FAILURES_KEPT:
            self.failures.append(failure)
        logger.error("background task %r failed: %s", task, failure.why, exc_info=bug)
        self._events.emit("task_failed", task=task, why=failure.why)
        if fatal and self._first is None:
            self._first = failure
            self._raise_first_failure()
        return _daemon_ended(failure)

    def _raise_first_failure(self) -> None:
        if self._first is not None and self._fatal is not None and not self._fatal.done():
            self._fatal.set_exception(_daemon_ended(self._first))

    def note_shortage(self, task: str, short: str, error: BaseException, *, lapses: bool = False) -> None:
        """Record that the machine is too short of something for this work; see ``shortage``. Unless ``lapses``, the
        record stays until ``end_shortage``.
        """
        known = self._short.get(task)
        if known is not None and known[1] is not None:
            known[1].cancel()
        elif known is None:
            self.failed += 1
            logger.error("%s: %s (%s)", task, short, _alone(error))
            self._events.emit("work_fails", work=task, why=short)
            if len(self._short) >= limits.MAX_FAILURES_KEPT:
                self.end_shortage(next(iter(self._short)))
        timer = asyncio.get_running_loop().call_later(LAPSE_S, self.end_shortage, task) if lapses else None
        self._short[task] = Failure(task, short, type(error).__name__), timer

    def note_outcome(self, task: str, error: BaseException | None) -> None:
        """Record that the work has succeeded, or has failed with ``error`` and will be retried by its owner."""
        if (short := shortage(error)) is not None and error is not None:
            self.note_shortage(task, short, error)
        else:
            self.end_shortage(task)

    def end_shortage(self, task: str) -> bool:
        """Record that the work has succeeded. Returns False if it had no shortage."""
        known = self._short.pop(task, None)
        if known is None:
            return False
        if known[1] is not None:
            known[1].cancel()
        logger.info("%s: goes on", task)
        self._events.emit("work_recovers", work=task)
        return True

    def healthy(self) -> tuple[bool, str]:
        """Return the answer to /healthz. It needs no token, so the text omits messages of unexpected exceptions."""
        if not self.failures and self._short:
            task, (short, _) = next(iter(self._short.items()))
            return False, f"task {task!r} waits: {short.why}"
        if not self.failures:
            return True, ""
        failure = self.failures[0]
        return (
            False,
            f"task {failure.task!r} failed ({failure.kind}), {self.failed} failures in all; "
            "see the log, and restart this daemon",
        )

    def status(self) -> list[dict[str, str]]:
        """Return the failures in the form /status shows."""
        return [{"task": f.task, "why": f.why} for f in self.failures]

    def short(self) -> list[dict[str, str]]:
        """Return the tasks that wait for a resource to free up, in the form /status shows."""
        return [{"task": f.task, "why": f.why} for f, _ in self._short.values()]

    # -- failures outside of the tasks above

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record exceptions of this loop (protocols, timers, callbacks, futures) and of threads inside the block."""
        loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        watchers = _WATCHERS.setdefault(loop, [])
        watchers.append(self)
        if len(watchers) == 1:
            loop.set_exception_handler(_handle_loop_error)
        before = threading.excepthook

        def hook(args: threading.ExceptHookArgs) -> None:
            before(args)
            if args.exc_value is not None and not isinstance(args.exc_value, SystemExit) and not self._ending:
                name = "thread" if args.thread is None else args.thread.name
                with contextlib.suppress(RuntimeError):  # the loop is already closed
                    loop.call_soon_threadsafe(self._lost, f"thread {name}", args.exc_value)

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

    def handle_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> bool:
        """Record an error from the loop's exception handler. Returns False if it is not a failure of this daemon."""
        error = context.get("exception")
        if self._ending or error is None or (unexpected(error) is None and shortage(error) is None):
            return False
        if isinstance(error, OSError) and "transport" in context:
            return False  # a broken connection: its protocol's connection_lost reports the error
        task = context.get("task") or context.get("future")
        name = task.get_name() if isinstance(task, asyncio.Task) else str(context.get("message", "callback"))
        if (transport := context.get("transport")) is not None and (peer := transport.get_extra_info("peername")):
            name += f" (connection with {peer[0] if isinstance(peer, tuple) else peer})"
        if threading.get_ident() == self._thread:
            self._lost(name, error)
        else:  # another thread's garbage collection destroyed a task
            loop.call_soon_threadsafe(self._lost, name, error)
        return True

    def _lost(self, name: str, error: BaseException) -> None:
        if (short := shortage(error)) is not None:
            self.note_shortage(name, short, error, lapses=True)
        else:
            self.fail(name, error)


_WATCHERS: dict[asyncio.AbstractEventLoop, list[Tasks]] = {}
"""Daemons by loop: one, except in tests. A loop's error may belong to any of its daemons, so all of them record it."""


def _handle_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    recorded = False
    for tasks in tuple(_WATCHERS.get(loop, ())):
        recorded |= tasks.handle_loop_error(loop, context)
    if not recorded:
        loop.default_exception_handler(context)


class DaemonTaskGroup:
    """The task group of a daemon, from ``Tasks.group``."""

    def __init__(self, tasks: Tasks, group: asyncio.TaskGroup) -> None:
        self._tasks, self._group = tasks, group

    def create_task(self, work: Work, *, name: str, ends: bool = False) -> asyncio.Task[None]:
        """Start a task. ``ends``: the work may finish before the daemon stops; otherwise finishing is a failure."""
        return self._group.create_task(self._part(work, name, ends), name=name)

    async def _part(self, work: Work, name: str, ends: bool) -> None:
        try:
            await self._tasks.repeated(work, name)
            if not ends:
                raise RuntimeError("the task ended before the daemon")
        except Exception as error:
            if unexpected(error) is None:
                raise
            raise self._tasks.fail(name, error, fatal=True) from error


def _daemon_ended(failure: Failure) -> TaskFailedError:
    return TaskFailedError(
        f"the daemon ended because its task {failure.task!r} failed: {failure.why}; "
        "the log has the traceback; restart the daemon, which resumes from the state folder"
    )
