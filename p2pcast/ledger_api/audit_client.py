"""An auditor's side of the ledger: accepted results to check, and what the checks found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from p2pcast.ground.errors import RemoteError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.ledger_connection import LedgerConnection
from p2pcast.rollouts.result import Result


@dataclass(frozen=True, slots=True)
class Audit:
    """``worker``: name."""

    worker: str
    result: Result


class AuditClient:
    def __init__(self, ledger: LedgerConnection) -> None:
        self._ledger = ledger

    def take(self, version: Version) -> Audit | None:
        """A random accepted result that ``version`` made alone; None without one. Each result comes at most once.
        Raises RefusedError, RemoteError.
        """
        answer: Any = self._ledger.post("audits/take", {"version": str(version)})
        if not answer:
            return None
        try:
            return Audit(str(answer["worker"]), Result.from_bytes(answer["result"]))
        except (KeyError, TypeError):
            raise RemoteError("the ledger's answer to audits/take is malformed") from None

    def report(self, audit: Audit, mean_gap: float, largest_gap: float, *, agrees: bool) -> None:
        """``mean_gap``, ``largest_gap``: between the worker's and the recomputed log-probabilities, in nats. Raises
        RefusedError.
        """
        ids = {"job": audit.result.job.hex(), "lease": audit.result.lease.hex()}
        gaps = {"mean_gap": mean_gap, "largest_gap": largest_gap}
        self._ledger.post("audits/report", ids | gaps | {"agrees": agrees})
