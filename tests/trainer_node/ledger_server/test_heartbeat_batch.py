"""Heartbeats that arrive close together share a transition, and each caller gets its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from p2pcast.ground.errors import LocalError
from p2pcast.ledger_api.worker_api import HeldLease
from tests.support.until import until
from trainer_node.ledger.leasing import Beat
from trainer_node.ledger.ledger_rows import UnknownIdError
from trainer_node.ledger_server import heartbeat_batch
from trainer_node.ledger_server.heartbeat_batch import AT_ONCE, MOST_LEASES, HeartbeatBatch

UNKNOWN = b"unknown"


def leases(count: int) -> dict[bytes, int]:
    return {number.to_bytes(2, "big"): number for number in range(count)}


class Transitions:
    """``sessions``: those of each transition. ``error``: ends the next one."""

    def __init__(self) -> None:
        self.sessions: list[list[bytes]] = []
        self.error: Exception | None = None

    async def beat(self, beats: Sequence[Beat]) -> list[list[HeldLease] | None]:
        self.sessions.append([beat.session for beat in beats])
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return [
            None if beat.session == UNKNOWN else [HeldLease(lease, "held", 1.0) for lease in beat.tokens]
            for beat in beats
        ]


@pytest.fixture
def transitions() -> Transitions:
    return Transitions()


@pytest.fixture
async def batch(transitions: Transitions, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HeartbeatBatch]:
    monkeypatch.setattr(heartbeat_batch, "GATHER_S", 1e-3)
    found = HeartbeatBatch(transitions.beat)
    running = asyncio.create_task(found.run())
    yield found
    running.cancel()
    await asyncio.wait([running])


async def test_heartbeats_of_one_moment_are_one_transition(batch: HeartbeatBatch, transitions: Transitions) -> None:
    answers = await asyncio.gather(*(batch.ask(bytes([n]), leases(n)) for n in range(5)))
    assert transitions.sessions == [[bytes([n]) for n in range(5)]]
    assert [len(held) for held in answers] == [0, 1, 2, 3, 4]


async def test_an_unknown_session_costs_its_own_caller_alone(batch: HeartbeatBatch) -> None:
    known, unknown = await asyncio.gather(
        batch.ask(b"a", leases(1)), batch.ask(UNKNOWN, leases(1)), return_exceptions=True
    )
    assert known == [HeldLease(b"\0\0", "held", 1.0)]
    assert isinstance(unknown, UnknownIdError)


async def test_a_failed_transition_reaches_every_caller_and_the_next_one_runs(
    batch: HeartbeatBatch, transitions: Transitions
) -> None:
    transitions.error = LocalError("the disk is full")
    failed = await asyncio.gather(*(batch.ask(s, {}) for s in (b"a", b"b")), return_exceptions=True)
    assert [str(error) for error in failed] == ["the disk is full"] * 2
    assert await batch.ask(b"a", {}) == []


async def test_a_transition_is_bounded_in_leases(batch: HeartbeatBatch, transitions: Transitions) -> None:
    sizes = {b"a": MOST_LEASES + 1, b"b": MOST_LEASES - 1, b"c": 1, b"d": 1}
    await asyncio.gather(*(batch.ask(session, leases(count)) for session, count in sizes.items()))
    assert transitions.sessions == [[b"a"], [b"b", b"c"], [b"d"]]


async def test_a_few_transitions_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared commit answers all of them; each alone would wait for a commit of its own."""
    monkeypatch.setattr(heartbeat_batch, "GATHER_S", 1e-3)
    begun, committed = [], asyncio.Event()

    async def beat(beats: Sequence[Beat]) -> list[list[HeldLease] | None]:
        begun.append(beats[0].session)
        await committed.wait()
        return [[] for _ in beats]

    found = HeartbeatBatch(beat)
    running = asyncio.create_task(found.run())
    asked = [asyncio.create_task(found.ask(bytes([n]), leases(MOST_LEASES))) for n in range(AT_ONCE + 1)]
    await until(lambda: len(begun) >= AT_ONCE)
    await asyncio.sleep(0.01)
    assert len(begun) == AT_ONCE
    committed.set()
    await asyncio.gather(*asked)
    assert len(begun) == AT_ONCE + 1
    running.cancel()
    await asyncio.wait([running])


async def test_a_caller_that_has_gone_delays_no_other(batch: HeartbeatBatch, transitions: Transitions) -> None:
    gone, unknown, staying = (asyncio.create_task(batch.ask(s, {})) for s in (b"gone", UNKNOWN, b"staying"))
    await asyncio.sleep(0)
    gone.cancel()
    unknown.cancel()
    assert await staying == []
    assert transitions.sessions == [[b"gone", UNKNOWN, b"staying"]]


@pytest.mark.parametrize("begun", [False, True])
async def test_heartbeats_get_an_error_when_the_ledger_ends(monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    monkeypatch.setattr(heartbeat_batch, "GATHER_S", 1e-3 if begun else 3600.0)
    called = asyncio.Event()

    async def beat(beats: Sequence[Beat]) -> list[list[HeldLease] | None]:
        called.set()
        await asyncio.Event().wait()
        raise AssertionError

    batch = HeartbeatBatch(beat)
    running = asyncio.create_task(batch.run())
    asking = [asyncio.create_task(batch.ask(bytes([n]), {})) for n in range(2)]
    await (called.wait() if begun else asyncio.sleep(0))
    running.cancel()
    await asyncio.wait([running, *asking])
    assert [str(task.exception()) for task in asking] == ["the ledger is closing: try again later"] * 2
    with pytest.raises(LocalError, match="the ledger is closing"):
        await batch.ask(b"", {})
