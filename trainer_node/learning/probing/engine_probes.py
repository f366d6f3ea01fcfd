"""The learner's watch over engines: compares their scores of the probe set with its own, version by version.

Guarantees: scores are compared with those of the version that the engine named, by the words that were published. Each
comparison is one event ``probe`` of the run's log. A failure here never ends the training.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from p2pcast.ground.errors import P2PCastError, RefusedError, RemoteError, UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api import trainer_api as api
from p2pcast.ledger_api.ledger_connection import LedgerConnection
from p2pcast.ledger_api.trainer_api import ProbeVerdict
from p2pcast.rollouts.probe_set import ProbeSet, unpacked_scores
from trainer_node.learning.probing.probe_rule import ProbeRule, divergence

logger = logging.getLogger("p2pcast.learner")

CHECK_S: Final = 1.0
"""Interval in seconds at which the ledger is asked for scores."""
VERSIONS: Final = 64
"""Newest published steps whose scores are kept: 1 MiB."""
JOIN_S: Final = 10.0
UNPROBED: Final = 8
"""Versions in a row that no engine was compared at, from which on the learner warns."""


@dataclass(frozen=True, slots=True)
class EngineScores:
    """``scores``: float32, of each scored token of the set. ``worker``, ``engine``: names."""

    id: bytes
    worker: str
    engine: str
    version: Version
    scores: np.ndarray


class ProbeCalls(Protocol):
    """``ProbeClient``."""

    def put(self, probe_set: ProbeSet) -> None: ...
    def read(self, probe_set: ProbeSet) -> Sequence[EngineScores] | None: ...
    def judge(self, verdicts: Sequence[ProbeVerdict]) -> None: ...


class ProbeClient:
    def __init__(self, ledger: LedgerConnection) -> None:
        self._ledger = ledger

    def put(self, probe_set: ProbeSet) -> None:
        """Workers score this set from now on. Raises RefusedError, RetryableError."""
        self._ledger.ask(api.PUT_PROBES, api.PutProbesRequest(probe_set.sequences))

    def read(self, probe_set: ProbeSet) -> list[EngineScores] | None:
        """Scores without a verdict; None if the ledger does not have this set. Raises RefusedError, RemoteError,
        RetryableError.
        """
        answer = self._ledger.ask(api.READ_PROBES, api.ProbeSetId(probe_set.id))
        if not answer.known:
            return None
        try:
            found = [
                EngineScores(o.id, o.worker, o.engine, Version.parse(o.version), unpacked_scores(o.scores))
                for o in answer.answers
            ]
        except UsageError as error:
            raise RemoteError(f"the ledger's answer to {api.READ_PROBES.path} is malformed: {error}") from None
        if any(len(one.scores) != probe_set.scores for one in found):
            raise RemoteError("the ledger's scores are not those of the probe set")
        return found

    def judge(self, verdicts: Sequence[ProbeVerdict]) -> None:
        """Raises RefusedError, RetryableError."""
        self._ledger.ask(api.JUDGE_PROBES, api.JudgeProbesRequest(verdicts))


class EngineProbes:
    """``floor``: of an earlier start of the run, in nats a token. ``write``: of the run's log."""

    def __init__(
        self,
        client: ProbeCalls,
        probe_set: ProbeSet,
        write: Callable[[Mapping[str, object]], object],
        floor: float | None = None,
    ) -> None:
        self._client, self._set, self._write = client, probe_set, write
        self._rule = ProbeRule(floor)
        self._lock = threading.Lock()
        self._scores: dict[int, np.ndarray] = {}
        """The learner's scores by step."""
        self._unprobed = 0
        """Versions that were published since the newest comparison."""
        self._first_branch: int | None = None
        self._judged: dict[bytes, ProbeVerdict] = {}
        """Verdicts that the ledger may not have yet."""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="p2pcast probes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look once more, and end."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def published(self, step: int, branch: int, scores: np.ndarray) -> None:
        """``scores``: the learner's, by the words of ``step``. ``branch``: live now, or a later one will hold them."""
        with self._lock:
            self._first_branch = branch if self._first_branch is None else self._first_branch
            self._scores[step] = scores
            self._unprobed += 1
            if self._unprobed == UNPROBED:
                logger.warning(
                    "no engine was probed at the newest %d versions, so no engine's weights are checked: see `missing`"
                    " among the probes of the ledger's /status", UNPROBED,
                )  # fmt: skip
            if len(self._scores) > VERSIONS:
                del self._scores[min(self._scores)]

    def look(self) -> None:
        """Compare all scores that wait at the ledger. Raises P2PCastError."""
        answers = self._client.read(self._set)
        if answers is None:
            self._client.put(self._set)
            return
        self._judged = {one.id: self._judged[one.id] for one in answers if one.id in self._judged}
        for one in answers:
            if one.id not in self._judged and self._due(one.version):
                self._judged[one.id] = self._judge(one)
        if self._judged:
            self._client.judge(list(self._judged.values()))

    def _due(self, version: Version) -> bool:
        """False until the learner has scored the version itself."""
        with self._lock:
            return bool(self._scores) and (version.step in self._scores or version.step < max(self._scores))

    def _judge(self, one: EngineScores) -> ProbeVerdict:
        version = one.version
        with self._lock:
            mine = self._scores.get(version.step)
            lineage = self._first_branch is not None and version.branch >= self._first_branch
        if mine is None or not lineage:  # of a process before this one, or too old
            return ProbeVerdict(one.id, alarm=False)
        with self._lock:
            self._unprobed = 0
        kl, floor, alarm = self._rule.judge(version, divergence(mine, one.scores))
        names = {"version": str(version), "engine": f"{one.engine} of {one.worker}"}
        self._write({"event": "probe", **names, "kl": kl, "floor": floor, "alarm": alarm})
        if alarm:
            logger.warning(
                "the weights of %s (worker %s) are not those of version %s: KL %.3g nats a token on the probe set, "
                "floor %s; compare with `p2pcast verify --live`",
                one.engine, one.worker, version, kl, "not measured yet" if floor is None else f"{floor:.3g}",
            )  # fmt: skip
        return ProbeVerdict(one.id, alarm, kl, floor)

    def _run(self) -> None:
        while True:
            last = self._stopped.wait(CHECK_S)
            try:
                self.look()
            except RefusedError as error:
                logger.warning("engines are not probed: %s", error)
                return
            except P2PCastError as error:
                logger.warning("probes wait: %s", error)
            except Exception:
                logger.exception("probes ended")
                return
            if last:
                return
