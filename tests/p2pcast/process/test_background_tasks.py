"""Failures of background tasks, callbacks, timers, futures and threads: each is reported, with the consequence that
p2pcast.process.background_tasks states.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import threading
from functools import partial

import pytest

from p2pcast.ground.errors import LocalError, RemoteError
from p2pcast.process import event_loop
from p2pcast.process.background_tasks import TaskFailedError, Tasks, spawn
from p2pcast.process.events import Events
from tests.support.until import until

LIMIT_S = 600.0


class Bug(Exception):
    """An unexpected exception."""


async def fails(error: BaseException) -> None:
    raise error


def raises(error: BaseException) -> None:
    raise error


def events_of(tasks: Tasks) -> list[tuple[str, str, str]]:
    return [(e.kind, e.facts["task"], e.facts["why"]) for e in tasks._events.after(0)[1]]


@pytest.fixture(params=[asyncio.new_event_loop, event_loop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    """``run(coroutine)`` on a fresh loop of either kind."""

    def on_loop(work) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(work)

    return on_loop


def test_a_bug_in_vital_work_ends_the_group_with_the_tasks_name(run, caplog):
    async def work() -> None:
        tasks = Tasks(Events())
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
            async with tasks.group() as group:
                group.create_task(asyncio.Event().wait, name="a loop")
                tasks.later(fails(Bug("oh")), "seal 0.1")
        error = caught.value.exceptions[0]
        assert isinstance(error, TaskFailedError)
        assert (error.exit_code, "task 'seal 0.1' failed: Bug: oh" in str(error)) == (1, True)
        assert events_of(tasks) == [("task_failed", "seal 0.1", "Bug: oh")]
        assert tasks.healthy() == (
            False,
            "task 'seal 0.1' failed (Bug), 1 failures in all; see the log, and restart this daemon",
        )

    run(work())
    assert any(record.exc_info for record in caplog.records)


def test_a_bug_before_the_group_begins_ends_the_group(run):
    async def work() -> None:
        tasks = Tasks(Events())
        tasks.later(fails(Bug()), "early")
        await until(lambda: tasks.failed)
        with pytest.raises(ExceptionGroup, match="unhandled"):
            async with tasks.group() as group:
                group.create_task(asyncio.Event().wait, name="a loop")

    run(work())


def test_a_bug_in_a_loop_of_the_daemon_is_named(run):
    async def work() -> None:
        tasks = Tasks(Events())
        with pytest.raises(ExceptionGroup) as caught:
            async with tasks.group() as group:
                group.create_task(partial(fails, ExceptionGroup("inside", [Bug("oh")])), name="keepalives")
        assert "task 'keepalives' failed" in str(caught.value.exceptions[0])

    run(work())


@pytest.mark.parametrize("ends", [False, True])
def test_a_daemon_loop_that_ends_is_a_failure(run, ends):
    async def work() -> None:
        tasks = Tasks(Events())
        async with tasks.group() as group:
            group.create_task(partial(asyncio.sleep, 0), name="keepalives", ends=ends)
            for _ in range(10):
                await asyncio.sleep(0)
            raise LocalError("the end of the test")

    with pytest.raises(ExceptionGroup) as caught:
        run(work())
    assert (
        "'keepalives' failed: RuntimeError: the task ended before the daemon" in str(caught.value.exceptions)
    ) is not ends


def test_an_expected_error_of_a_loop_is_raised_unchanged(run):
    async def work() -> None:
        tasks = Tasks(Events())
        with pytest.raises(ExceptionGroup) as caught:
            async with tasks.group() as group:
                group.create_task(partial(fails, LocalError("the disk is full")), name="node")
        assert [str(e) for e in caught.value.exceptions] == ["the disk is full"]
        assert tasks.failed == 0

    run(work())


@pytest.mark.parametrize(
    ("error", "vital", "healthy"),
    [
        (LocalError("the disk is full"), True, False),
        (LocalError("the disk is full"), False, True),
        (RemoteError("it said no"), True, True),
        (Bug("oh"), False, False),
    ],
)
def test_nonfatal_failures_are_reported_and_may_make_the_daemon_unhealthy(run, error, vital, healthy):
    async def work() -> None:
        tasks = Tasks(Events())
        async with tasks.group():
            tasks.later(fails(error), "renew b", vital=vital)
            await until(lambda: tasks.failed)
            await asyncio.sleep(0)
            # The group goes on.
            tasks.later(asyncio.sleep(0), "another")
            await until(lambda: not tasks._running)
            assert tasks.healthy()[0] is healthy
            assert [(kind, task) for kind, task, _ in events_of(tasks)] == [("task_failed", "renew b")]
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run(work())


def test_failures_of_callbacks_timers_futures_and_tasks_are_recorded(run):
    async def work() -> None:
        tasks, loop = Tasks(Events()), asyncio.get_running_loop()
        with tasks.watching():
            loop.call_soon(raises, Bug("callback"))
            loop.call_later(0, raises, Bug("timer"))
            done = loop.create_future()
            done.add_done_callback(lambda _: raises(Bug("future's callback")))
            done.set_result(None)
            kept = spawn(fails(Bug("task")), "owned")
            await until(lambda: tasks.failed == 4)
            lost = loop.create_future()
            lost.set_exception(Bug("not retrieved"))
            del lost
            gc.collect()
            await until(lambda: tasks.failed == 5)
        assert kept.done()
        whys = {why for _, _, why in events_of(tasks)}
        assert whys == {"Bug: callback", "Bug: timer", "Bug: future's callback", "Bug: task", "Bug: not retrieved"}
        assert "owned" in {task for _, task, _ in events_of(tasks)}
        assert not tasks.healthy()[0]

    run(work())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_thread_is_recorded(run, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    async def work() -> None:
        tasks = Tasks(Events())
        with tasks.watching():
            thread = threading.Thread(target=raises, args=(Bug("oh"),), name="worker")
            thread.start()
            await until(lambda: tasks.failed)
            thread.join()
        assert events_of(tasks) == [("task_failed", "thread worker", "Bug: oh")]

    run(work())


def test_a_failed_protocol_is_recorded_with_its_address(run):
    class Broken(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            raise Bug("oh")

    async def work() -> None:
        tasks, loop = Tasks(Events()), asyncio.get_running_loop()
        with tasks.watching():
            server = await loop.create_server(Broken, "127.0.0.1", 0)
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"x")
            await until(lambda: tasks.failed)
            writer.close()
            server.close()
            await server.wait_closed()
        [(_, task, why)] = events_of(tasks)
        assert "127.0.0.1" in task
        assert why == "Bug: oh"

    run(work())


def test_a_broken_connection_is_no_failure(run):
    async def work() -> None:
        tasks, loop = Tasks(Events()), asyncio.get_running_loop()
        with tasks.watching():
            transport = type("T", (), {"get_extra_info": lambda self, name: None})()
            loop.call_exception_handler(
                {"message": "lost", "exception": ConnectionResetError(), "transport": transport}
            )
            loop.call_exception_handler({"message": "a warning without an exception"})
        assert tasks.failed == 0

    run(work())


def test_all_running_daemons_of_a_loop_record_its_errors(run):
    async def work() -> None:
        one, two, loop = Tasks(Events()), Tasks(Events()), asyncio.get_running_loop()
        with one.watching():
            with two.watching():
                loop.call_exception_handler({"message": "x", "exception": Bug()})
            loop.call_exception_handler({"message": "x", "exception": Bug()})
        assert (one.failed, two.failed) == (2, 1)
        logging.getLogger("asyncio").disabled = True
        try:
            loop.call_exception_handler({"message": "x", "exception": Bug()})
        finally:
            logging.getLogger("asyncio").disabled = False
        assert (one.failed, two.failed) == (2, 1)

    run(work())


def test_at_the_end_running_tasks_finish_and_hanging_tasks_are_cancelled(run, monkeypatch):
    monkeypatch.setattr("p2pcast.process.background_tasks.END_S", 0.01)

    async def work() -> None:
        tasks, done = Tasks(Events()), []

        async def writes() -> None:
            await asyncio.to_thread(done.append, 1)

        hangs = asyncio.Event()
        tasks.later(writes(), "evicted")
        tasks.later(hangs.wait(), "hangs")
        tasks.later(fails(Bug()), "fails while it ends")
        monkeypatch.setattr("p2pcast.process.background_tasks.END_S", 0.2)
        await tasks.end()
        assert done == [1]
        assert not tasks._running
        assert tasks.healthy()[0]

    run(work())


def test_failures_are_bounded_and_the_first_is_shown(run):
    async def work() -> None:
        tasks = Tasks(Events())
        for number in range(100):
            tasks.fail(f"task {number}", Bug())
        assert (len(tasks.status()), tasks.failed) == (16, 100)
        assert "'task 0'" in tasks.healthy()[1]

    run(work())


# -- shortages of the machine


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", "/secret/state")


class Fails:
    """Work that fails ``times`` times, and then goes on until cancelled, or ends."""

    def __init__(self, times: int, error: Exception, *, ends: bool = False) -> None:
        self.times, self.error, self.ends = times, error, ends
        self.begun = 0

    async def work(self) -> None:
        self.begun += 1
        if self.begun <= self.times:
            raise self.error
        if not self.ends:
            await asyncio.Event().wait()


@pytest.fixture
def quick(monkeypatch):
    for name in ("RETRY_S", "PROVED_S"):
        monkeypatch.setattr(f"p2pcast.process.background_tasks.{name}", 0.001)


@pytest.mark.parametrize("ends", [False, True])
def test_a_loop_that_meets_a_shortage_is_begun_again_and_red_until_the_loop_works(run, quick, ends):
    async def work() -> None:
        tasks, loop = Tasks(Events()), Fails(3, full(), ends=ends)
        async with tasks.group() as group:
            group.create_task(loop.work, name="checkpoints", ends=ends)
            await until(lambda: loop.begun)
            assert tasks.healthy() == (
                False,
                "task 'checkpoints' waits: no space is left on the device: make room on the disk",
            )
            assert tasks.short() == [
                {"task": "checkpoints", "why": "no space is left on the device: make room on the disk"}
            ]
            assert (tasks.failed, tasks.status()) == (1, [])
            await until(lambda: tasks.healthy()[0])
            assert (loop.begun, tasks.failed) == (4, 1)
            kinds = [(e.kind, e.facts["work"]) for e in tasks._events.after(0)[1]]
            assert kinds == [("work_fails", "checkpoints"), ("work_recovers", "checkpoints")]
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run(work())


def test_a_bug_after_a_shortage_ends_the_group(run, quick):
    async def work() -> None:
        tasks, loop = Tasks(Events()), Fails(2, full())

        async def fails_then() -> None:
            try:
                await loop.work()
            finally:
                if loop.begun == 2:
                    loop.error = Bug("oh")

        loop.times = 9
        with pytest.raises(ExceptionGroup) as caught:
            async with tasks.group() as group:
                group.create_task(fails_then, name="checkpoints")
        assert "task 'checkpoints' failed: Bug: oh" in str(caught.value.exceptions[0])

    run(work())


def test_later_work_is_repeated_only_if_its_beginning_is_given(run, quick, monkeypatch):
    monkeypatch.setattr("p2pcast.process.background_tasks.LAPSE_S", 0.001)

    async def work() -> None:
        tasks, again, once = Tasks(Events()), Fails(2, full(), ends=True), Fails(2, full(), ends=True)
        async with tasks.group():
            tasks.later(again.work, "retention")
            tasks.later(once.work(), "abandon")
            await until(lambda: not tasks._running)
            assert (again.begun, once.begun, tasks.failed) == (3, 1, 2)
            await until(lambda: tasks.healthy()[0])
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run(work())


def test_a_shortage_in_a_callback_makes_the_daemon_red_for_a_while(run, monkeypatch):
    monkeypatch.setattr("p2pcast.process.background_tasks.LAPSE_S", 0.001)

    async def work() -> None:
        tasks = Tasks(Events())
        with tasks.watching():
            asyncio.get_running_loop().call_soon(raises, full())
            kept = spawn(fails(full()), "read ahead")
            await until(lambda: tasks.failed == 2)
            assert not tasks.healthy()[0]
            await until(lambda: tasks.healthy()[0])
        assert kept.done()

    run(work())


def test_the_number_of_remembered_shortages_is_bounded(run):
    async def work() -> None:
        tasks = Tasks(Events())
        for number in range(100):
            tasks.note_shortage(f"enrol {number}", "too many files", full(), lapses=True)
        assert len(tasks.short()) == 16
        await tasks.end()

    run(work())
