"""The probe set at the ledger: which worker scores it next, scores that wait for the learner, and its verdicts. Pure.

Guarantees: a worker is asked once for each version that its engine serves. A worker's scores wait for the learner at
most MAX_WAITING_OF_ONE times, and those of all workers in at most MAX_WAITING places; older ones give way. All of it is
in memory alone: a ledger that restarts gets the probe set from the learner again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from p2pcast.ground.version import Version
from p2pcast.ledger_api.trainer_api import ProbeVerdict
from p2pcast.rollouts.probe_set import ProbeSet

MAX_WAITING: Final = 1024
"""Scores of all workers: 16 MiB at most."""
MAX_WAITING_OF_ONE: Final = 4
MAX_WORKERS_PROBED: Final = 1024
"""Workers whose last probe is kept."""
MISSED: Final = 8
"""Successive requests that a worker has not answered, from which on its probes are missing. A busy engine, or a version
that passes within a second, costs one.
"""
REPEAT_S: Final = 60.0
"""Time in seconds after which a worker that was asked and did not answer is asked again."""


class Scored(NamedTuple):
    """``worker``: name. ``engine``: name at its peer. ``scores``: packed. ``id``: of this answer."""

    id: bytes
    worker: str
    engine: str
    version: Version
    scores: bytes


class ProbeComparison(NamedTuple):
    """The newest verdict on a worker's engine. ``began``: the alarm is new; ``ended``: it is over."""

    worker: str
    engine: str
    version: Version
    kl: float
    floor: float | None
    alarm: bool
    began: bool
    ended: bool

    def document(self) -> dict[str, Any]:
        named = {"worker": self.worker, "engine": self.engine, "version": str(self.version)}
        return named | {"kl": self.kl, "floor": self.floor, "alarm": self.alarm}


@dataclass(slots=True)
class _Worker:
    version: Version | None = None
    asked_s: float = 0.0
    answered: bool = False
    name: str = ""
    missed: int = 0
    """Requests since the newest answer that were not answered."""
    newest: ProbeComparison | None = None


@dataclass(slots=True)
class ProbeDesk:
    """Workers are named by their ids. ``now_s``: seconds from any origin."""

    probe_set: ProbeSet | None = None
    _workers: OrderedDict[bytes, _Worker] = field(default_factory=OrderedDict)
    _waiting: OrderedDict[bytes, tuple[bytes, Scored]] = field(default_factory=OrderedDict)
    """Worker and scores, by the answer's id, the oldest first."""
    alarms: int = 0
    """Alarms since the start, one for each time that an engine's divergence rose above the limit."""

    def put(self, probe_set: ProbeSet) -> None:
        """The learner's set. Another one than before makes all scores void."""
        if self.probe_set is None or self.probe_set.id != probe_set.id:
            self.probe_set = probe_set
            self._workers.clear()
            self._waiting.clear()

    def take(self, worker: bytes, name: str, version: Version, now_s: float) -> ProbeSet | None:
        """The set, if this worker has not scored it with ``version``."""
        if self.probe_set is None:
            return None
        one = self._of(worker)
        if one.version == version and (one.answered or now_s - one.asked_s < REPEAT_S):
            return None
        if one.version is not None and not one.answered:
            one.missed += 1
        one.name, one.version, one.asked_s, one.answered = name, version, now_s, False
        return self.probe_set

    def answer(self, worker: bytes, probe_set: bytes, scored: Scored) -> bool:
        """Whether the scores are wanted: they are those that this worker was asked for last."""
        one = self._workers.get(worker)
        if self.probe_set is None or self.probe_set.id != probe_set or one is None or one.version != scored.version:
            return False
        if one.answered:
            return False
        one.answered, one.missed = True, 0
        mine = [id for id, (of, _) in self._waiting.items() if of == worker]
        if len(mine) >= MAX_WAITING_OF_ONE:
            del self._waiting[mine[0]]
        self._waiting[scored.id] = worker, scored
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)
        return True

    def read(self, probe_set: bytes) -> list[Scored] | None:
        """Scores without a verdict, oldest first; None if this is not the present set."""
        if self.probe_set is None or self.probe_set.id != probe_set:
            return None
        return [scored for _, scored in self._waiting.values()]

    def judge(self, verdict: ProbeVerdict) -> ProbeComparison | None:
        """Scores with a verdict wait no longer. None: there is nothing to tell, for instance after a repetition."""
        found = self._waiting.pop(verdict.id, None)
        if found is None or verdict.kl is None:
            return None
        worker, scored = found
        one = self._of(worker)
        before = one.newest is not None and one.newest.alarm
        one.newest = ProbeComparison(
            scored.worker, scored.engine, scored.version, verdict.kl, verdict.floor, verdict.alarm,
            began=verdict.alarm and not before, ended=before and not verdict.alarm,
        )  # fmt: skip
        self.alarms += one.newest.began
        return one.newest

    def newest(self) -> list[ProbeComparison]:
        """The newest comparison of each worker, by name."""
        found = [one.newest for one in self._workers.values() if one.newest is not None]
        return sorted(found, key=lambda one: one.worker)

    def misses(self, worker: bytes) -> bool:
        """Whether this worker's probes are missing: the weights of its engine are not checked."""
        return (one := self._workers.get(worker)) is not None and one.missed >= MISSED

    def missing(self) -> list[str]:
        """Names of the workers whose probes are missing. A worker that was started again has another id."""
        newest = sorted(self._workers.values(), key=lambda one: one.asked_s)
        found = {one.name: one.missed >= MISSED for one in newest}
        return sorted(name for name, missing in found.items() if missing)

    def retain(self, names: set[str]) -> None:
        """Forget workers that the ledger has forgotten. ``names``: of the others."""
        for worker, one in list(self._workers.items()):
            if one.name not in names:
                del self._workers[worker]

    def document(self) -> dict[str, Any]:
        """``tokens``: of the set. ``alarm``: engines whose newest divergence is above the limit. ``missing``: names of
        workers.
        """
        newest = self.newest()
        return {
            "tokens": None if self.probe_set is None else self.probe_set.tokens,
            "alarm": sum(one.alarm for one in newest),
            "alarms": self.alarms,
            "missing": self.missing(),
            "engines": [one.document() for one in newest],
        }

    def most(self) -> dict[str, float]:
        """For each worker's name its largest newest divergence, in nats a token."""
        found: dict[str, float] = {}
        for one in self.newest():
            found[one.worker] = max(found.get(one.worker, 0.0), one.kl)
        return found

    def _of(self, worker: bytes) -> _Worker:
        one = self._workers.setdefault(worker, _Worker())
        self._workers.move_to_end(worker)
        if len(self._workers) > MAX_WORKERS_PROBED:
            self._workers.popitem(last=False)
        return one
