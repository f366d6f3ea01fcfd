"""A worker's probes: its engine scores the learner's probe set once with each version that it serves.

Guarantees: a version's scores are reported only if the engine served it before and after all of them. A probe that
fails, or that the ledger does not support, does not affect any play.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import P2PCastError, RemoteError
from p2pcast.ground.private_random import uniform
from p2pcast.ground.version import Version
from p2pcast.rollouts.probe_set import ProbeSet, packed_scores
from rollout_node.worker.engine_versions import Served

logger = logging.getLogger("p2pcast.worker")

CHECK_S: Final = 0.5
"""Seconds between checks of the engine's version."""
ASK_S, ASK_MOST_S = 2.0, 60.0
"""First and longest delay in seconds before the ledger is asked again about a version, if it wanted no scores or a
probe failed. Without a learner that probes, thousands of workers must not keep the ledger busy.
"""
PROBE_S: Final = 600.0
"""Time limit for one probe in seconds; the commit of a large model pauses the engine."""


class ProbeLedger(Protocol):
    """``rollout_node.worker.ledger_client.LedgerClient``."""

    async def take_probe(self, session: bytes, served: Served) -> ProbeSet | None: ...
    async def report_probe(self, session: bytes, served: Served, probe_set: ProbeSet, scores: bytes) -> None: ...


class Scorer(Protocol):
    async def score(self, token_ids: Sequence[int]) -> tuple[np.ndarray, Version]:
        """Return log-probabilities (the first token's is 0), and the version that the engine served at the end."""


class ProbeWeights(Protocol):
    async def refresh(self) -> Served: ...


class ProbeLoop:
    """``vocabulary``: token ids sent to the engine are below this number."""

    def __init__(self, ledger: ProbeLedger, scorer: Scorer, weights: ProbeWeights, vocabulary: int) -> None:
        self._ledger, self._scorer, self._weights, self._vocabulary = ledger, scorer, weights, vocabulary

    async def run(self, session: Callable[[], bytes | None]) -> None:
        """Run until cancelled. ``session``: returns the worker's session at the ledger, once it has one."""
        asked: Version | None = None
        delays, again_s = Backoff(ASK_S, ASK_MOST_S, uniform), 0.0
        clock = asyncio.get_running_loop().time
        while True:
            try:
                served, name = await self._weights.refresh(), session()
                if served.version != asked:
                    delays.reset()
                    asked, again_s = served.version, 0.0
                if name is not None and clock() >= again_s:
                    again_s = clock() + delays.next_s()
                    async with asyncio.timeout(PROBE_S):
                        if await self._probe(name, served):
                            again_s = math.inf
            except (P2PCastError, TimeoutError) as error:
                logger.warning("no probe of the engine: %s: %s", type(error).__name__, error)
            except Exception:
                logger.exception("a probe failed")
            await asyncio.sleep(CHECK_S)

    async def _probe(self, session: bytes, served: Served) -> bool:
        """Score the probe set, and return whether the scores were reported to the ledger. Raises P2PCastError."""
        probe_set = await self._ledger.take_probe(session, served)
        if probe_set is None:
            return False
        if max(map(max, probe_set.sequences)) >= self._vocabulary:
            raise RemoteError("the learner's probe set has tokens beyond the task's vocabulary")
        found = await self._scores(probe_set)
        if {version for _, version in found} != {served.version}:
            logger.debug("no scores of version %s: the engine's weights changed meanwhile", served.version)
            return False
        scores = packed_scores([logprobs[1:] for logprobs, _ in found])
        await self._ledger.report_probe(session, served, probe_set, scores)
        logger.debug("the engine has scored the probe set with version %s", served.version)
        return True

    async def _scores(self, probe_set: ProbeSet) -> list[tuple[np.ndarray, Version]]:
        """Score all sequences at once, so that a switch affects few of them. Raises P2PCastError."""
        scoring = (self._scorer.score(sequence) for sequence in probe_set.sequences)
        found: list[tuple[np.ndarray, Version]] = []
        # Wait for all requests, so that none is still running when the next probe starts.
        for one in await asyncio.gather(*scoring, return_exceptions=True):
            if isinstance(one, BaseException):
                raise one
            found.append(one)
        return found
