"""Plays that block, crash, lie or take all memory, in real processes beside honest ones."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hostile_plays import HostilePlays
from scripted_sampler import RandomSampler, jobs_of

from p2pcast.ground import limits
from p2pcast.ground.errors import RetryableError
from p2pcast.rollouts.job import Job
from p2pcast.tasks.child_processes.killable_child import ChildDownError
from p2pcast.tasks.child_processes.play_pool import PlayBlockedError, Played, PlayFailedError, PlayPool
from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task import ForgedPlayError, Sample, Trajectory
from tests.support.process_ends import wait_for_end, written_pid
from tests.support.until import until

FOLDER = Path(__file__).parents[1]
NAME = "hostile_plays:HostilePlays"
STEP_S = 3.0


@dataclasses.dataclass
class GatedSampler(RandomSampler):
    """Second turns wait for ``gate``."""

    gate: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    waiting: int = 0

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        if len(prompt_ids) > 3:
            self.waiting += 1
            await self.gate.wait()
        options = {"seed": seed, "temperature": temperature, "max_tokens": max_tokens}
        return await super().sample(prompt_ids, stop_token_ids=stop_token_ids, **options)  # type: ignore[arg-type]

    async def until_waiting(self, count: int) -> None:
        await until(lambda: self.waiting >= count)


@pytest.fixture
async def pools(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., PlayPool]]:
    monkeypatch.chdir(FOLDER)
    made = []

    def pool(**settings: float) -> PlayPool:
        usual = {"step_s": STEP_S, "memory_bytes": limits.GIB}
        made.append(PlayPool(NAME, HostilePlays().hash, **(usual | settings)))  # type: ignore[arg-type]
        return made[-1]

    yield pool
    for one in made:
        await one.close()


def jobs(*prompts: str) -> list[Job]:
    made = jobs_of(HostilePlays(), len(prompts))
    return [dataclasses.replace(job, prompt=prompt.encode()) for job, prompt in zip(made, prompts, strict=True)]


def same(found: Trajectory, wanted: Trajectory) -> bool:
    pairs = [(getattr(found, name), getattr(wanted, name)) for name in ("token_ids", "mask", "logprobs", "turns")]
    rest = [(one.spans, one.stop, one.tags) for one in (found, wanted)]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs) and rest[0] == rest[1]


BROKEN = ["sleep", "regex", "thread", "exit", "nonsense", "large", "loss"]
RAISED = [
    "leave",
    "subtask",
    "raise",
    "unsendable",
    "forge tokens",
    "forge answer",
    "forge turns",
    "forge mask",
    "long",
    "flood",
]


@pytest.mark.parametrize("prompt", [*BROKEN, *RAISED, "memory"])
async def test_a_hostile_play_costs_itself_alone(pools: Callable[..., PlayPool], prompt: str) -> None:
    sampler, pool = GatedSampler(range(16)), pools()
    hostile, *honest = jobs(prompt, *["good"] * 4)
    if prompt.startswith(("forge", "long", "loss")):
        sampler.gate.set()
    plays = [asyncio.ensure_future(pool.play(sampler, job)) for job in honest]
    await sampler.until_waiting(4)
    with pytest.raises(ForgedPlayError if prompt.startswith("forge") else PlayFailedError):
        await pool.play(sampler, hostile)
    sampler.gate.set()
    found = await asyncio.gather(*plays)
    wanted = [await HostilePlays().play(RandomSampler(range(16)), job) for job in honest]
    assert all(same(one.trajectory, other) for one, other in zip(found, wanted, strict=True))
    assert sorted(sampler.prompts).count((1, 2, 3)) == 5, "no turn is sampled twice"
    assert all(one.loss_mask is not None and one.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1] for one in found)


async def test_plays_leave_a_step_that_takes_long(
    pools: Callable[..., PlayPool], caplog: pytest.LogCaptureFixture
) -> None:
    sampler, pool = GatedSampler(range(16)), pools(step_s=20.0)
    hostile, *honest = jobs("sleep", *["good"] * 4)
    plays = [asyncio.ensure_future(pool.play(sampler, job)) for job in honest]
    await sampler.until_waiting(4)
    blocked = asyncio.ensure_future(pool.play(sampler, hostile))
    await until(lambda: len(sampler.prompts) >= 5)
    sampler.gate.set()
    found = await asyncio.gather(*plays)
    assert not blocked.done()
    assert "begin again" not in caplog.text, "no process counts as blocked yet"
    assert all(len(one.trajectory.token_ids) == 9 for one in found)
    assert len(sampler.prompts) == 9, "no turn is sampled twice"
    blocked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocked


async def test_a_long_step_that_ends_costs_its_play_nothing(pools: Callable[..., PlayPool]) -> None:
    """The others have left the step meanwhile."""
    sampler, pool = RandomSampler(range(16)), pools(step_s=5.0)
    slow, *honest = jobs("slow 3", *["good"] * 4)
    found = await asyncio.gather(*(pool.play(sampler, job) for job in (slow, *honest)))
    wanted = await HostilePlays().play(RandomSampler(range(16)), jobs("good")[0])
    assert same(found[0].trajectory, wanted)


async def test_further_plays_of_a_prompt_that_blocked_disturb_no_other(
    pools: Callable[..., PlayPool], caplog: pytest.LogCaptureFixture
) -> None:
    sampler, pool = GatedSampler(range(16)), pools()
    first, *more = jobs(*["sleep"] * 4)
    with pytest.raises(PlayFailedError):
        await pool.play(sampler, first)
    plays = [asyncio.ensure_future(pool.play(sampler, job)) for job in jobs(*["good"] * 4)]
    await sampler.until_waiting(4)
    caplog.clear()
    blamed = await asyncio.gather(*(pool.play(sampler, job) for job in more), return_exceptions=True)
    assert {type(one) for one in blamed} == {PlayBlockedError}
    begin_again = [record.args[1] for record in caplog.records if "begin again" in record.msg and record.args]
    assert begin_again == [1] * 3, "each was alone"
    sampler.gate.set()
    assert all(isinstance(one, Played) for one in await asyncio.gather(*plays))


async def test_an_error_of_a_play_names_file_and_line(pools: Callable[..., PlayPool]) -> None:
    with pytest.raises(PlayFailedError, match=r"ZeroDivisionError: oops \(hostile_plays.py, line \d+\)$"):
        await pools().play(RandomSampler(range(16)), jobs("raise")[0])


async def test_the_log_has_one_traceback_for_each_place_that_raises(
    pools: Callable[..., PlayPool], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "p2pcast.tasks")
    pool = pools()
    for job in jobs("raise", "raise", "unsendable", "raise", "unsendable"):
        with pytest.raises(PlayFailedError):
            await pool.play(RandomSampler(range(16)), job)
    await pool.close()
    said = [record.getMessage() for record in caplog.records]
    assert sum("Traceback (most recent call last)" in line for line in said) == 2
    assert [sum(kind in line for line in said) for kind in ("ZeroDivisionError: oops", "ValueError: ")] == [1, 1]


async def test_a_play_that_forks_goes_on_and_its_copy_does_not(pools: Callable[..., PlayPool], tmp_path: Path) -> None:
    pool = pools()
    forking, sleeping, *honest = jobs("fork", f"fork {tmp_path / 'pid'}", *["good"] * 4)
    sampler = RandomSampler(range(16))
    found = await asyncio.gather(*(pool.play(sampler, job) for job in (forking, sleeping, *honest)))
    wanted = await HostilePlays().play(RandomSampler(range(16)), jobs("good")[0])
    assert same(found[0].trajectory, wanted)
    assert len(sampler.prompts) == 12
    while (copy := written_pid(tmp_path / "pid")) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await pool.close()
    await asyncio.to_thread(wait_for_end, copy)


async def test_a_play_states_no_figures_of_the_engine(pools: Callable[..., PlayPool]) -> None:
    (job,) = jobs("forge logprobs")
    found = await pools().play(RandomSampler(range(16)), job)
    assert same(found.trajectory, await HostilePlays().play(RandomSampler(range(16)), jobs("good")[0]))


@pytest.mark.parametrize("prompt", ["sleep", "stubborn"])
async def test_a_cancelled_play_ends_at_once_and_harms_no_later_play(
    pools: Callable[..., PlayPool], prompt: str
) -> None:
    sampler, pool = GatedSampler(range(16)), pools()
    sampler.gate.set()
    hostile, honest = jobs(prompt, "good")
    playing = asyncio.ensure_future(pool.play(sampler, hostile))
    await until(lambda: sampler.prompts)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert isinstance(await pool.play(sampler, honest), Played)


class Failing(RandomSampler):
    async def sample(self, prompt_ids: Sequence[int], **options: object) -> Sample:  # type: ignore[override]
        raise RetryableError("the engine is away")


async def test_a_failure_of_the_engine_is_not_the_plays(pools: Callable[..., PlayPool]) -> None:
    with pytest.raises(RetryableError, match="the engine is away"):
        await pools().play(Failing(range(16)), jobs("good")[0])


async def test_an_answer_without_tokens_is_not_the_plays_fault(pools: Callable[..., PlayPool]) -> None:
    class Silent(RandomSampler):
        async def sample(self, prompt_ids: Sequence[int], **options: object) -> Sample:  # type: ignore[override]
            return Sample((), (), (), "length")

    with pytest.raises(Exception, match="answered with 0 tokens") as raised:
        await pools().play(Silent(range(16)), jobs("good")[0])
    assert not isinstance(raised.value, PlayFailedError)


async def test_a_play_sees_no_secret(pools: Callable[..., PlayPool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PCAST_TOKEN", "value")
    await pools().play(RandomSampler(range(16)), jobs("environment P2PCAST_TOKEN")[0])


async def test_a_task_that_changed_on_disk_plays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    with pytest.raises(ChildDownError, match="has changed"):
        await PlayPool(NAME, bytes(32)).play(RandomSampler(range(16)), jobs("good")[0])


async def test_plays_of_many_processes_are_equal_to_plays_here() -> None:
    task, sampler = Sums(), RandomSampler(range(16))
    pool = PlayPool("sums", task.hash, processes=2)
    played = jobs_of(task, 40)
    found = await asyncio.gather(*(pool.play(sampler, job) for job in played))
    await pool.close()
    for one, job in zip(found, played, strict=True):
        assert same(one.trajectory, await task.play(sampler, job))
