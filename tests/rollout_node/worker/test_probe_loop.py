"""A worker's probes: scores of one version alone, once for each version, and no failure that costs a play."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable

import aiohttp
import numpy as np
import pytest
from background_run import run_until

from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from p2pcast.rollouts.probe_set import ProbeSet, unpacked_scores
from rollout_node.worker import probe_loop as module
from rollout_node.worker.completions_sampler import CompletionsSampler
from rollout_node.worker.engine_versions import EngineVersions, Served
from rollout_node.worker.generate_sampler import GenerateSampler
from rollout_node.worker.probe_loop import ProbeLoop
from tests.support.fake_engine import FakeEngine, logprobs

SESSION = bytes(range(16))
SET = ProbeSet.checked([[1, 4, 5, 6], [1, 7, 8]])


class Ledger:
    """Wants scores of each version once. ``fails``: requests that fail."""

    def __init__(self) -> None:
        self.probe_set: ProbeSet | None = SET
        self.reports: dict[Version, np.ndarray] = {}
        self.asked = self.fails = 0
        self.on_take: Callable[[], None] = lambda: None

    async def take_probe(self, session: bytes, served: Served) -> ProbeSet | None:
        assert session == SESSION
        self.asked += 1
        if self.fails:
            self.fails -= 1
            raise RetryableError("the ledger does not answer")
        self.on_take()
        return None if served.version in self.reports else self.probe_set

    async def report_probe(self, session: bytes, served: Served, probe_set: ProbeSet, scores: bytes) -> None:
        assert probe_set == SET
        assert served.version not in self.reports
        self.reports[served.version] = unpacked_scores(scores)


class Parts:
    def __init__(self, http: aiohttp.ClientSession, engine: FakeEngine) -> None:
        self.engine, self.ledger = engine, Ledger()
        self.versions = EngineVersions(http, engine.url, engine.url)
        self.http = http
        self.sampler: GenerateSampler | CompletionsSampler = GenerateSampler(http, engine.url, self.versions)
        self.session: bytes | None = SESSION

    async def until(self, condition: Callable[[], bool], vocabulary: int = 16) -> None:
        """Probe until the condition holds."""
        loop = ProbeLoop(self.ledger, self.sampler, self.versions, vocabulary)
        await run_until(loop.run(lambda: self.session), condition)


@pytest.fixture
async def parts(engine: FakeEngine, monkeypatch) -> AsyncIterator[Parts]:
    for name in ("CHECK_S", "ASK_S"):
        monkeypatch.setattr(module, name, 0.001)
    async with aiohttp.ClientSession() as http:
        yield Parts(http, engine)


def true_scores(version: str) -> list[float]:
    """By the engine's model."""
    return [
        logprobs(sequence[:at], version, 1.0)[sequence[at]]
        for sequence in SET.sequences
        for at in range(1, len(sequence))
    ]


async def test_each_version_is_scored_once(parts: Parts) -> None:
    await parts.until(lambda: len(parts.ledger.reports) == 1)
    parts.engine.versions = ["0.2"]
    await parts.until(lambda: len(parts.ledger.reports) == 2)
    assert list(parts.ledger.reports) == [Version(0, 1), Version(0, 2)]
    for version, scores in parts.ledger.reports.items():
        assert scores == pytest.approx(true_scores(str(version)), abs=1e-5)
    asked = len(parts.engine.asked)
    assert asked == 2 * len(SET.sequences)


async def test_a_ledger_that_wants_no_scores_is_asked_ever_more_rarely(parts: Parts, monkeypatch) -> None:
    monkeypatch.setattr(module, "ASK_MOST_S", 1e9)
    parts.ledger.probe_set = None
    refresh, asked_by_look = parts.versions.refresh, []

    async def counted() -> Served:
        asked_by_look.append(parts.ledger.asked)
        if len(asked_by_look) == 200:
            parts.engine.versions = ["0.2"]
        return await refresh()

    monkeypatch.setattr(parts.versions, "refresh", counted)
    await parts.until(lambda: len(asked_by_look) > 201)
    before, after = asked_by_look[199], asked_by_look[200]
    assert 2 <= before < 40
    assert after == before + 1, "a new version is asked about at once"


async def test_completions_are_scored_by_the_version_of_their_serving_epoch(parts: Parts) -> None:
    parts.engine.kv = "drain"
    parts.sampler = CompletionsSampler(parts.http, parts.engine.url, parts.versions)
    await parts.until(lambda: len(parts.ledger.reports) == 1)
    assert parts.ledger.reports[Version(0, 1)] == pytest.approx(true_scores("0.1"), abs=1e-5)


@pytest.mark.parametrize("kind", ["generate", "completions"])
async def test_scores_of_two_versions_are_not_reported(parts: Parts, kind: str) -> None:
    """The engine switches while it scores, and later stays at the second version."""
    if kind == "completions":
        parts.engine.kv = "drain"
        parts.sampler = CompletionsSampler(parts.http, parts.engine.url, parts.versions)
    parts.ledger.on_take = lambda: setattr(parts.engine, "versions", ["0.2"])
    await parts.until(lambda: bool(parts.ledger.reports))
    assert list(parts.ledger.reports) == [Version(0, 2)]
    assert parts.ledger.reports[Version(0, 2)] == pytest.approx(true_scores("0.2"), abs=1e-5)


async def test_probes_go_on_when_the_ledger_or_the_engine_fails(parts: Parts, caplog) -> None:
    parts.ledger.fails, parts.engine.status = 3, 500
    looks = itertools.count()

    def up() -> None:
        if next(looks) == 2:
            parts.engine.status = 200

    parts.ledger.on_take = up
    await parts.until(lambda: bool(parts.ledger.reports))
    assert "the ledger does not answer" in caplog.text
    assert "answered 500" in caplog.text


async def test_worker_without_a_session_asks_for_nothing(parts: Parts) -> None:
    parts.session = None
    await parts.until(lambda: parts.engine.looks > 5)
    assert parts.ledger.asked == 0


async def test_tokens_beyond_the_vocabulary_do_not_reach_the_engine(parts: Parts, caplog) -> None:
    await parts.until(lambda: parts.ledger.asked > 2, vocabulary=8)
    assert parts.engine.asked == []
    assert "beyond the task's vocabulary" in caplog.text


async def test_ledger_without_a_probe_set_costs_the_engine_nothing(parts: Parts) -> None:
    parts.ledger.probe_set = None
    await parts.until(lambda: parts.ledger.asked > 2)
    assert parts.engine.asked == []
