"""Rewards are computed once, and callers take turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from p2pcast.ground.errors import RetryableError
from p2pcast.ledger_api.worker_api import Leased
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import Result
from tests.trainer_node.ledger.ledger_game import ZERO, sample
from tests.trainer_node.ledger.test_acceptance import job as job_record
from trainer_node.ledger_server.rewards.reward_desk import RewardDesk, Turns


def result(number: int) -> tuple[Job, Result]:
    job = job_record()
    return job, sample(Leased(number.to_bytes(16, "big"), job, 1.0, 1.0), ZERO, 1)


class Scorer:
    """Checks that end when the test says."""

    def __init__(self, *, places: int = 1) -> None:
        self.begun: list[bytes] = []
        self.gate = asyncio.Event()
        self.failure: Exception | None = None
        self.desk = RewardDesk(self.score, places)

    async def score(self, handed_in: Sequence[tuple[Job, Result]]) -> list[float]:
        self.begun += [one.lease for _, one in handed_in]
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return [1.0] * len(handed_in)

    async def ask(self, *numbers: int, caller: str = "a") -> list[object]:
        made = [result(number) for number in numbers]
        async with self.desk.rewards(caller, [job for job, _ in made], [one for _, one in made]) as found:
            return list(found)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_result_that_is_sent_again_is_checked_once() -> None:
    scorer = Scorer(places=4)
    asked = [asyncio.create_task(scorer.ask(1, 2)) for _ in range(5)]
    await settled()
    assert len(scorer.begun) == 2
    asked[1].cancel()
    scorer.gate.set()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [one for one in found if not isinstance(one, BaseException)] == [[1.0, 1.0]] * 4
    assert not scorer.desk._shared
    await scorer.ask(1)
    assert len(scorer.begun) == 3, "a reward is forgotten with its last request"


async def test_a_reward_is_found_until_its_request_has_settled() -> None:
    scorer = Scorer()
    scorer.gate.set()
    job, one = result(1)
    async with scorer.desk.rewards("a", [None, job], [one, one]) as first:
        assert first == [None, 1.0]
        assert await scorer.ask(1) == [1.0]
    assert len(scorer.begun) == 1


async def test_a_failure_reaches_every_request_and_is_not_kept() -> None:
    scorer = Scorer(places=2)
    scorer.failure = RetryableError("no process")
    asked = [asyncio.create_task(scorer.ask(1, 2)) for _ in range(2)]
    await settled()
    scorer.gate.set()
    for one in asked:
        with pytest.raises(RetryableError, match="no process"):
            await one
    scorer.failure = None
    assert await scorer.ask(1, 2) == [1.0, 1.0]


async def test_a_first_request_that_is_cancelled_has_the_others_send_again() -> None:
    scorer = Scorer()
    first, other = asyncio.create_task(scorer.ask(1)), asyncio.create_task(scorer.ask(1))
    await settled()
    first.cancel()
    with pytest.raises(RetryableError, match="send again"):
        await other


async def test_a_caller_with_many_checks_delays_another_by_one() -> None:
    scorer = Scorer()
    many = asyncio.create_task(scorer.ask(*range(10), caller="a"))
    await settled()
    few = asyncio.create_task(scorer.ask(90, caller="b"))
    await settled()
    scorer.gate.set()
    await asyncio.gather(many, few)
    assert scorer.begun.index((90).to_bytes(16, "big")) == 1


@pytest.mark.parametrize("most", [1, 3, 100])
async def test_each_reward_is_that_of_its_result_however_many_fit_into_a_turn(most: int) -> None:
    turns: list[int] = []

    async def score(handed_in: Sequence[tuple[Job, Result]]) -> list[float]:
        turns.append(len(handed_in))
        await asyncio.sleep(0)
        return [float(one.lease[-1]) for _, one in handed_in[:most]]

    for places in (1, 4):
        desk, made = RewardDesk(score, places), [result(number) for number in range(32)]
        turns.clear()
        async with desk.rewards("a", [job for job, _ in made], [one for _, one in made]) as found:
            assert found == [float(number) for number in range(32)]
        assert not desk._shared
        assert max(turns) <= 2 * most, "no request is sent again and again as a whole"
        if most == 100 and places == 1:
            assert turns == [1, 2, 4, 8, 16, 1]


async def test_a_failure_ends_the_request_at_once() -> None:
    scorer = Scorer()
    scorer.failure = RetryableError("no process")
    scorer.gate.set()
    with pytest.raises(RetryableError, match="no process"):
        await scorer.ask(*range(8))
    assert len(scorer.begun) == 1
    assert not scorer.desk._shared


async def test_a_caller_with_many_requests_delays_another_by_one() -> None:
    turns, begun, gate = Turns(1), list[str](), asyncio.Event()

    async def run(caller: str) -> None:
        async with turns.place(caller):
            begun.append(caller)
            await gate.wait()

    tasks = [asyncio.create_task(run(caller)) for caller in ("a", "a", "a", "b", "a", "b")]
    await settled()
    gate.set()
    await asyncio.gather(*tasks)
    assert begun[:4] == ["a", "b", "a", "b"]


async def test_the_last_free_place_is_for_a_caller_without_one() -> None:
    turns, running = Turns(3), Counter[str]()

    async def run(caller: str) -> None:
        async with turns.place(caller):
            running[caller] += 1
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(run("a")) for _ in range(5)]
    await settled()
    assert running == {"a": 2}
    tasks.append(asyncio.create_task(run("b")))
    await settled()
    assert running == {"a": 2, "b": 1}
    for task in tasks[:2]:
        task.cancel()
    await settled()
    assert running == {"a": 3, "b": 1}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert turns._free == 3
    assert not turns._callers


class Shares:
    """One place, a clock of its own, and callers whose turns take a stated time and who always want another."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns = Turns(1, clock=lambda: self.now_s)
        self.took_s = Counter[str]()

    async def run(self, until_s: float, **turn_s: float) -> None:
        async def one(caller: str) -> None:
            while self.now_s < until_s:
                async with self.turns.place(caller):
                    await asyncio.sleep(0)
                    self.now_s += turn_s[caller]
                    self.took_s[caller] += turn_s[caller]

        await asyncio.gather(*(one(caller) for caller in turn_s for _ in range(2)))
        assert not self.turns._callers


async def test_callers_get_shares_by_time_and_not_by_turns() -> None:
    shares = Shares()
    await shares.run(60.0, honest=0.05, slow=1.0)
    assert shares.took_s["honest"] > 30.0
    equal = Shares()
    await equal.run(600.0, a=1.0, b=2.0)
    assert abs(equal.took_s["a"] - equal.took_s["b"]) < 300.0


async def test_ten_callers_whose_checks_hang_leave_an_honest_one_half_of_the_time() -> None:
    shares = Shares()
    await shares.run(200.0, honest=0.05, **{f"hostile{n}": 1.0 for n in range(10)})
    assert shares.took_s["honest"] > 100.0


async def test_a_returning_caller_owes_its_used_time() -> None:
    shares, begun = Shares(), list[str]()

    async def one(caller: str, took_s: float) -> None:
        async with shares.turns.place(caller):
            begun.append(caller)
            await asyncio.sleep(0)
            shares.now_s += took_s

    running = [asyncio.create_task(one("slow", 1.0)), *(asyncio.create_task(one("honest", 0.05)) for _ in range(4))]
    await asyncio.wait(running[:2])
    await asyncio.gather(*running, asyncio.create_task(one("slow", 1.0)))
    assert begun == ["slow", *["honest"] * 4, "slow"]
