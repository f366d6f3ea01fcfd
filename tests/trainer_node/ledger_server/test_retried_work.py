"""Background work that fails for a while delays the ledger and does not end it."""

from __future__ import annotations

import asyncio

import pytest

from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError, RefusedError, RemoteError, RetryableError
from p2pcast.process.background_tasks import Tasks
from p2pcast.process.events import Events
from tests.support.until import until
from trainer_node.ledger_server import retried_work
from trainer_node.ledger_server.retried_work import RetriedWork


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retried_work, "RETRY_S", 0.001)


@pytest.mark.parametrize("kind", [LocalError, RetryableError, RemoteError])
async def test_failing_work_is_repeated_and_named_until_a_success(kind: type[P2PCastError]) -> None:
    events, tried, done = Events(), 0, asyncio.Event()
    retried, named = RetriedWork(events, Tasks(events)), []

    async def work() -> None:
        nonlocal tried
        tried += 1
        named.append(retried.why)
        if tried <= 3:
            raise kind(f"the disk is full, {tried}")
        if tried == 5:
            done.set()

    task = asyncio.create_task(retried.repeat("status", 0.0, work))
    await done.wait()
    task.cancel()
    assert named == [
        "", "status: the disk is full, 1", "status: the disk is full, 2", "status: the disk is full, 3", "",
    ]  # fmt: skip
    _, found = events.after(0)
    assert [(event.kind, event.facts["work"]) for event in found] == [
        ("work_fails", "status"),
        ("work_recovers", "status"),
    ]


@pytest.mark.parametrize("kind", [RefusedError, IntegrityError, ValueError])
async def test_an_error_that_repeating_cannot_mend_is_raised(kind: type[Exception]) -> None:
    async def work() -> None:
        raise kind("another run")

    with pytest.raises(kind, match="another run"):
        await RetriedWork(Events(), Tasks(Events())).repeat("versions", 0.0, work)


async def test_all_failing_work_is_named() -> None:
    retried = RetriedWork(Events(), Tasks(Events()))

    async def work() -> None:
        raise LocalError("no")

    tasks = [asyncio.create_task(retried.repeat(name, 0.0, work)) for name in ("b", "a")]
    await until(lambda: retried.why == "a: no; b: no")
    for task in tasks:
        task.cancel()
