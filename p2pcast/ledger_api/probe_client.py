"""A learner's side of probes: its probe set to the ledger, workers' scores from there, and the learner's verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from p2pcast.ground.errors import RemoteError, UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.ledger_connection import LedgerConnection
from p2pcast.rollouts.probe_set import ProbeSet, unpacked_scores


@dataclass(frozen=True, slots=True)
class EngineScores:
    """``scores``: float32, of each scored token of the set. ``worker``, ``engine``: names."""

    id: bytes
    worker: str
    engine: str
    version: Version
    scores: np.ndarray


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """Of the scores ``id``. ``kl``, ``floor``: nats a token. ``kl`` None: the scores could not be compared."""

    id: bytes
    kl: float | None = None
    floor: float | None = None
    alarm: bool = False


class ProbeClient:
    def __init__(self, ledger: LedgerConnection) -> None:
        self._ledger = ledger

    def put(self, probe_set: ProbeSet) -> None:
        """Workers score this set from now on. Raises RefusedError, RetryableError."""
        self._ledger.post("probes/set", {"sequences": probe_set.sequences})

    def read(self, probe_set: ProbeSet) -> list[EngineScores] | None:
        """Scores without a verdict; None if the ledger does not have this set. Raises RefusedError, RemoteError,
        RetryableError.
        """
        answer = self._ledger.post("probes/read", {"set": probe_set.id.hex()})
        try:
            if not answer["known"]:
                return None
            found = [
                EngineScores(
                    bytes(row["id"]),
                    str(row["worker"]),
                    str(row["engine"]),
                    Version.parse(row["version"]),
                    unpacked_scores(row["scores"]),
                )
                for row in answer["answers"]
            ]
        except (KeyError, TypeError, ValueError, UsageError):
            raise RemoteError("the ledger's answer to probes/read is malformed") from None
        if any(len(one.scores) != probe_set.scores for one in found):
            raise RemoteError("the ledger's scores are not those of the probe set")
        return found

    def judge(self, verdicts: Sequence[ProbeVerdict]) -> None:
        """Raises RefusedError, RetryableError."""
        rows = [{"id": v.id.hex(), "kl": v.kl, "floor": v.floor, "alarm": v.alarm} for v in verdicts]
        self._ledger.post("probes/judged", {"verdicts": rows})
