"""The loop of an audit, with a real engine's HTTP form and a ledger in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from background_run import run_until
from scripted_sampler import jobs_of

from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.api_route import ApiRoute, Nothing
from p2pcast.ledger_api.trainer_api import REPORT_AUDIT, TakeAuditAnswer
from p2pcast.rollouts.result import Result
from p2pcast.tasks.play import result_of
from p2pcast.tasks.sums import Sums
from rollout_node.worker import auditor as module
from rollout_node.worker.auditor import Auditor
from rollout_node.worker.engine_versions import EngineVersions
from rollout_node.worker.generate_sampler import GenerateSampler
from tests.support.fake_engine import FakeEngine

END_S = 600.0


class Ledger:
    """``results``: to be audited. ``asked``: the versions of requests; ``reports``: mean, largest, agrees."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.asked: list[Version] = []
        self.reports: list[tuple[float, float, bool]] = []
        self.fails = 0
        self.on_take: Callable[[], None] = lambda: None

    def ask(self, route: ApiRoute[Any, Any], asked: Any) -> Any:
        if route is REPORT_AUDIT:
            self.reports.append((asked.mean_gap, asked.largest_gap, asked.agrees))
            return Nothing()
        self.asked.append(Version.parse(asked.version))
        if self.fails:
            self.fails -= 1
            raise RetryableError("the ledger does not answer")
        self.on_take()
        return TakeAuditAnswer("w", self.results.pop(0).to_bytes()) if self.results else TakeAuditAnswer()


class Parts:
    def __init__(self, http: aiohttp.ClientSession, engine: FakeEngine) -> None:
        self.http, self.engine, self.ledger = http, engine, Ledger()
        self.versions = EngineVersions(http, engine.url, engine.url)
        scorer = GenerateSampler(http, engine.url, self.versions)
        self.auditor = Auditor(self.ledger, scorer, self.versions, tolerance=0.05, interval_s=0.0)

    async def play(self, engine: FakeEngine | None = None) -> Result:
        """A result of an engine, this one unless another is given."""
        url = (engine or self.engine).url
        task = Sums()
        (job,) = jobs_of(task, 1)
        played = await task.play(GenerateSampler(self.http, url, EngineVersions(self.http, url, url)), job)
        return result_of(job, bytes(16), played, 0.0)

    async def run(self, count: int) -> None:
        async with asyncio.timeout(END_S):
            await self.auditor.run(count)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Audit until the condition holds."""
        await run_until(self.auditor.run(), condition)


@pytest.fixture
async def parts(engine: FakeEngine, monkeypatch) -> AsyncIterator[Parts]:
    monkeypatch.setattr(module, "IDLE_S", 0.001)
    async with aiohttp.ClientSession() as http:
        yield Parts(http, engine)


async def test_a_result_of_the_same_weights_agrees(parts: Parts) -> None:
    parts.ledger.results = [await parts.play()]
    await parts.run(1)
    ((mean, largest, agrees),) = parts.ledger.reports
    assert agrees
    assert (mean, largest) == pytest.approx((0.0, 0.0), abs=1e-5)
    assert parts.ledger.asked == [Version(0, 1)], "results of the version that the engine serves"
    assert parts.auditor.found == {"agrees": 1}


async def test_a_result_of_other_weights_disagrees(parts: Parts, caplog) -> None:
    liar = FakeEngine(true_weights="0.9")
    await liar.start()
    parts.ledger.results = [await parts.play(liar)]
    await liar.stop()
    await parts.run(1)
    ((mean, _, agrees),) = parts.ledger.reports
    assert mean > 0.05
    assert not agrees
    assert "DISAGREES" in caplog.text


async def test_one_large_gap_disagrees_at_a_small_mean(parts: Parts) -> None:
    found = await parts.play()
    at = int(found.mask.argmax())
    logprobs = found.logprobs.copy()
    logprobs[at] -= module.LARGEST + 0.5
    parts.ledger.results = [replace(found, logprobs=logprobs)]
    parts.auditor._tolerance = 100.0
    await parts.run(1)
    assert parts.ledger.reports[0][2] is False


async def test_results_that_cannot_be_scored_cost_no_worker_anything(parts: Parts) -> None:
    found = await parts.play()
    parts.ledger.results = [replace(found, temperature=0.5), found]
    await parts.run(1)
    assert parts.auditor.found == {"not scored": 1, "agrees": 1}
    assert len(parts.ledger.reports) == 1


async def test_weights_that_change_during_the_audit_cost_no_worker_anything(parts: Parts) -> None:
    parts.ledger.results = [await parts.play()]
    parts.ledger.on_take = lambda: setattr(parts.engine, "versions", ["0.2"])
    await parts.until(lambda: bool(parts.auditor.found))
    assert parts.auditor.found == {"not scored": 1}
    assert parts.ledger.reports == []


async def test_an_auditor_goes_on_when_ledger_or_engine_is_away(parts: Parts, caplog) -> None:
    parts.ledger.results = [await parts.play()]
    parts.ledger.fails = 2
    await parts.run(1)
    assert len(parts.ledger.asked) == 3
    assert caplog.text.count("the ledger does not answer") == 2


async def test_without_results_the_auditor_asks_again(parts: Parts) -> None:
    await parts.until(lambda: len(parts.ledger.asked) >= 3)
    assert parts.auditor.found == {}
