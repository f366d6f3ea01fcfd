"""A trainer's client of the ledger: asked once for a batch, and groups that are read together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from ledger_stage import END_S, Up, config_of
from parity_task import Parity
from test_ledger_daemon import client_of
from test_ledger_requests import MANIFEST, ZERO, Stage, played

from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.ledger_api.api_route import MAX_LIST
from p2pcast.ledger_api.batch_client import BatchClient, Finished, GroupReport, RolloutBatch, Wait
from p2pcast.rollouts.job import Group, Job
from p2pcast.rollouts.result import Result, Span
from p2pcast.tasks.play import Play, result_of
from p2pcast.tasks.task import Sample


def groups(count: int, purpose: str) -> list[Group]:
    prompt = next(iter(Parity().jobs(0)))
    return [
        Group(
            id=bytes([len(purpose), *number.to_bytes(15, "big")]), size=2, purpose=purpose, task="parity",
            task_hash=Parity().hash, prompt=prompt.prompt, seed=number, max_tokens=8,
            temperature=1.0 if purpose == "train" else 0.0,
            pinned=ZERO if purpose == "evaluate" else None,
        )
        for number in range(count)
    ]  # fmt: skip


def at_step_0(client: BatchClient) -> Wait | Finished | RolloutBatch:
    client.resume(0, 0)
    client.publish(ZERO, MANIFEST)
    return client.poll(0)


async def cut_play(lease: bytes, job: Job) -> Result:
    """Reward 1, as of a whole play, but cut off at the job's limit."""

    class LongSampler:
        async def sample(self, prompt_ids: Any, **more: Any) -> Sample:
            ids = [3, *[4] * (job.max_tokens - 1)]
            return Sample(ids, [-1.0] * len(ids), [Span(ZERO, 0, len(ids), MANIFEST, "recompute")], "length")

    play = Play(job.prompt)
    sample = await play.turn(LongSampler(), job, job.max_tokens, (2,))
    return result_of(job, lease, play.end(sample.stop), 0.0)


async def test_a_poll_finds_a_wait_a_batch_or_the_end(tmp_path: Path, up: Up) -> None:
    config = config_of(tmp_path, batch_groups=1, last_step=1)
    async with asyncio.timeout(END_S), up(config) as daemon, aiohttp.ClientSession() as http:
        client, stage = client_of(daemon, tmp_path), Stage(daemon, tmp_path, http)
        waits = await asyncio.to_thread(at_step_0, client)
        assert isinstance(waits, Wait)
        assert waits.wait_s > 0
        session = await stage.register("w")
        leases = await stage.lease(session, 4)
        results = [await played(lease, job, odd=bool(job.index % 2)) for lease, job in leases]
        assert (await stage.hand_in(session, *results))[0] == 200
        batch = await asyncio.to_thread(client.poll, 0)
        assert isinstance(batch, RolloutBatch)
        assert {one.settled_step for group in batch.groups for one in group.rollouts} == {0}
        await asyncio.to_thread(client.applied, batch, 1)
        assert await asyncio.to_thread(client.poll, 1) == Finished()


async def test_a_trainer_that_pays_cut_answers_nothing_gets_groups_of_equal_rewards(tmp_path: Path, up: Up) -> None:
    config = config_of(tmp_path, batch_groups=1, last_step=1)
    async with asyncio.timeout(END_S), up(config) as daemon, aiohttp.ClientSession() as http:
        client, stage = client_of(daemon, tmp_path, overlong="zero"), Stage(daemon, tmp_path, http)
        assert isinstance(await asyncio.to_thread(at_step_0, client), Wait)
        session = await stage.register("w")
        [(lease, job), *others] = await stage.lease(session, 4)
        results = [await played(lease, job) for lease, job in others]
        cut_off = await cut_play(lease, job)
        _, answer = await stage.hand_in(session, cut_off, *results)
        assert {row["verdict"] for row in answer["results"]} == {"accepted"}, answer
        batch = await asyncio.to_thread(client.poll, 0)
        assert isinstance(batch, RolloutBatch)
        (group,) = batch.groups
        assert [one.reward for one in group.rollouts] == [1.0] * len(group.rollouts), "rewards are stated as they are"
        assert sorted(one.result.stop for one in group.rollouts)[-1] == "length"


async def test_a_treatment_without_a_name_is_refused_before_any_request() -> None:
    with pytest.raises(UsageError, match="use keep, mask or zero"):
        BatchClient("http://127.0.0.1:1", overlong="drop")  # type: ignore[arg-type]


async def test_groups_of_an_evaluation_are_read_together(tmp_path: Path, up: Up) -> None:
    config = config_of(tmp_path, feed=None)
    async with asyncio.timeout(END_S), up(config) as daemon, aiohttp.ClientSession() as http:
        client, stage = client_of(daemon, tmp_path), Stage(daemon, tmp_path, http)
        await asyncio.to_thread(at_step_0, client)
        session = await stage.register("w")
        added = groups(2, "evaluate")
        assert await asyncio.to_thread(client.add_groups, added) == 2
        leases = await stage.lease(session, 2)
        await stage.hand_in(session, *[await played(lease, job) for lease, job in leases])
        ids = [group.id for group in added]
        found = await asyncio.to_thread(client.read_groups, ids)
        assert found == [
            GroupReport(ids[0], "complete", None, (1.0, 1.0)),
            GroupReport(ids[1], "waiting", None, ()),
        ]
        assert [one.ended for one in found] == [True, False]
        many = await asyncio.to_thread(client.read_groups, ids * 1024)
        assert many == found * 1024
        with pytest.raises(RefusedError, match="no group 00000000"):
            await asyncio.to_thread(client.read_groups, [bytes(16)])
        assert (await stage.ask("/v1/groups/read", {"groups": []}))[0] == 403
        assert (await stage.ask("/v1/groups/read", {"groups": ["0" * 32] * 1025}, "trainer"))[0] == 400


async def test_groups_beyond_one_request_are_added_in_parts(tmp_path: Path, up: Up) -> None:
    config = config_of(tmp_path, feed=None)
    async with asyncio.timeout(END_S), up(config) as daemon:
        client = client_of(daemon, tmp_path)
        await asyncio.to_thread(at_step_0, client)
        added = groups(2 * MAX_LIST + 1, "evaluate")
        assert await asyncio.to_thread(client.add_groups, added) == len(added)
        assert await asyncio.to_thread(client.add_groups, added) == 0
        found = await asyncio.to_thread(client.read_groups, [group.id for group in added])
        assert {one.state for one in found} == {"waiting"}
