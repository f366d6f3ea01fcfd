"""The loop of ``p2pcast audit``, which has this engine rescore accepted results from other engines.

Guarantees: a result is scored by the version named in its span, or not at all. An engine that is unreachable or changes
its weights costs no worker anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final, Protocol, TypeVar

from p2pcast.ground.errors import RemoteError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.api_route import ApiRecord, ApiRoute
from p2pcast.ledger_api.trainer_api import REPORT_AUDIT, TAKE_AUDIT, ReportAuditRequest, TakeAuditRequest
from p2pcast.rollouts.result import Result
from rollout_node.worker import recomputation
from rollout_node.worker.engine_versions import EngineVersions
from rollout_node.worker.probe_loop import Scorer
from rollout_node.worker.recomputation import Gaps

logger = logging.getLogger("p2pcast.audit")

IDLE_S: Final = 0.5
"""Least time in seconds before the next attempt if nothing was scored."""
LARGEST: Final = 3.0
"""Largest gap of one token, in nats, that numerics may explain: the least likely tokens differ most."""


Q = TypeVar("Q", bound=ApiRecord)
A = TypeVar("A", bound=ApiRecord)


class AuditLedger(Protocol):
    """``p2pcast.ledger_api.ledger_connection.LedgerConnection``, whose calls block."""

    def ask(self, route: ApiRoute[Q, A], asked: Q) -> A: ...


class Auditor:
    """``scorer``: the sampler of an engine. ``tolerance``: largest mean gap in nats that numerics may explain.
    ``interval_s``: seconds between two audits.
    """

    def __init__(
        self,
        ledger: AuditLedger,
        scorer: Scorer,
        versions: EngineVersions,
        *,
        tolerance: float,
        interval_s: float,
    ) -> None:
        self._ledger, self._scorer, self._versions = ledger, scorer, versions
        self._tolerance, self._interval_s = tolerance, interval_s
        self.found: Counter[str] = Counter()
        """Numbers of audits that agree and disagree, and of results that were not scored."""

    async def run(self, count: int | None = None) -> None:
        """Score ``count`` results, or results without end if it is None. Raises RefusedError, LocalError."""
        while count is None or self.found["agrees"] + self.found["disagrees"] < count:
            try:
                scored = await self._one()
            except (RetryableError, RemoteError) as error:
                logger.warning("%s", error)
                scored = False
            await asyncio.sleep(self._interval_s if scored else max(IDLE_S, self._interval_s))

    async def _one(self) -> bool:
        """Audit one result, and return whether it was scored. Raises P2PCastError."""
        served = (await self._versions.refresh()).version
        audit = await asyncio.to_thread(self._ledger.ask, TAKE_AUDIT, TakeAuditRequest(str(served)))
        if audit.result is None:
            return False
        result = Result.from_bytes(audit.result)
        reason = recomputation.obstacle(result)
        gaps = None if reason else await self._gaps(result, served)
        if gaps is None:
            self.found["not scored"] += 1
            logger.info("%s: not scored: %s", audit.worker, reason or "the engine's weights changed meanwhile")
            return False
        agrees = gaps.mean <= self._tolerance and gaps.largest <= LARGEST
        found = ReportAuditRequest(result.job, result.lease, gaps.mean, gaps.largest, agrees)
        await asyncio.to_thread(self._ledger.ask, REPORT_AUDIT, found)
        self.found["agrees" if agrees else "disagrees"] += 1
        logger.log(
            logging.INFO if agrees else logging.WARNING,
            "%s: job %s, version %s: mean gap %.4f, largest %.4f nats: %s",
            audit.worker, result.job.hex(), served, gaps.mean, gaps.largest, "agrees" if agrees else "DISAGREES",
        )  # fmt: skip
        return True

    async def _gaps(self, result: Result, served: Version) -> Gaps | None:
        """Score the result. None unless ``served`` computed the whole answer. Raises P2PCastError."""
        scores, version = await self._scorer.score([int(token) for token in result.token_ids])
        return recomputation.gaps(result, scores) if version == served else None
