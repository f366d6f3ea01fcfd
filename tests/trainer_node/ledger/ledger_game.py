"""One worker and one learner at a ledger, in steps that a test writes down."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from p2pcast.ground.version import Version
from p2pcast.ledger_api.worker_api import DeviceClasses, Leased, Registration, Settled
from p2pcast.rollouts.job import Group, Job
from p2pcast.rollouts.overlong import Overlong
from p2pcast.rollouts.result import Result, Span
from tests.trainer_node.ledger.crash_run import TASK_HASH, group, manifest
from trainer_node.ledger.batch_transitions import Taken
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.ledger import Ledger
from trainer_node.ledger.ledger_rows import Policy
from trainer_node.ledger.staleness_rule import StalenessBounds

ZERO = Version(0, 0)


def last_token(job: Job, result: Result) -> float:
    return float(result.token_ids[-1])


def sample(leased: Leased, version: Version, reward: int, *, tokens: int = 3, stop: str = "end") -> Result:
    """A result of one turn by one version."""
    ids = np.full(tokens, 2, "<u4")
    ids[-1] = reward
    mask = np.ones(tokens, "u1")
    mask[0] = 0
    return Result(
        job=leased.job.job,
        lease=leased.lease,
        task_hash=leased.job.task_hash,
        token_ids=ids,
        mask=mask,
        logprobs=-mask.astype("<f4"),
        spans=[Span(version, 1, tokens, manifest(version), "keep")],
        temperature=leased.job.temperature,
        reward=0.0,
        stop=stop,
    )


class Game:
    """``staleness``: S; two groups of three make a batch. The learner begins at step 0 with version 0.0 published."""

    def __init__(
        self,
        opened: Callable[[], LedgerStore],
        *,
        staleness: int = 3,
        rule: str = "bounded",
        last_step: int | None = None,
        shared_commits: bool = False,
        asks_hub: bool = False,
    ) -> None:
        self._opened, self._shared = opened, shared_commits
        bounds = StalenessBounds(staleness, 2, last_step)
        self.policy = Policy(bounds, rule, 10, guess_s=30.0, task_hash=TASK_HASH, asks_hub=asks_hub)  # type: ignore[arg-type]
        self.source_s, self.step, self.branch = 0.0, 0, 0
        self._numbers = itertools.count(1)
        self.start()
        self.epoch = self.ledger.resume(0, 0, None, [])
        self.publish()

    def start(self) -> None:
        """Open the ledger, as a new process would."""
        self.store = self._opened()
        self.told: Counter[Any] = Counter()
        """Everything that happened since the process's start, with its number."""
        shared, told = self._shared, self.told.update
        self.ledger = Ledger(self.store, self.policy, now=lambda: self.source_s, shared_commits=shared, happened=told)

    @property
    def version(self) -> Version:
        return Version(self.branch, self.step)

    def publish(self) -> None:
        self.ledger.publish(self.version, manifest(self.version))

    def join(self, name: str, slots: int = 8, device_class: str = "", caller: str | None = None) -> bytes:
        """``caller``: as of ``register``; the name, if None."""
        one = Registration(name, slots, "sums", TASK_HASH, classes=DeviceClasses(device_class))
        return self.ledger.register(name if caller is None else caller, one).session

    def add(self, count: int = 4, **changes: object) -> list[bytes]:
        if changes.get("purpose") == "evaluate":
            changes.setdefault("temperature", 0.0)
        groups = [dataclasses.replace(group(next(self._numbers)), **changes) for _ in range(count)]
        self.ledger.add_groups(groups)
        return [one.id for one in groups]

    def lease(
        self, session: bytes, slots: int = 6, served: Version | None = None, staged: Version | None = None
    ) -> list[Leased]:
        served = self.version if served is None else served
        return self.ledger.grant(session, slots, served, manifest(served), staged).leases

    def hand_in(
        self, session: bytes, leases: Sequence[Leased], version: Version | None = None, reward: int | None = None
    ) -> list[Settled]:
        """Rewards alternate within a group, unless one is given."""
        version = self.version if version is None else version
        done = [sample(one, version, one.job.index % 2 if reward is None else reward) for one in leases]
        return self.ledger.results(session, done, last_token)

    def take(self, overlong: Overlong = "keep") -> Taken:
        return self.ledger.take(self.epoch, self.branch, self.step, overlong)

    def learn(self) -> bytes:
        """Take the batch, apply it, and publish."""
        batch = self.take().batch
        assert batch is not None
        self.ledger.applied(self.epoch, batch.id, self.step + 1)
        self.step += 1
        self.publish()
        return batch.id

    def fill(self, session: bytes) -> None:
        """Play until there is a batch."""
        while (taken := self.take()).batch is None:
            assert not taken.finished
            leases = self.lease(session)
            assert leases
            self.hand_in(session, leases)

    def whole_step(self, session: bytes) -> bytes:
        self.add(2)
        self.fill(session)
        return self.learn()

    def state(self, group_id: bytes) -> str:
        return str(self.ledger.group(group_id).state)


def groups_of(taken: Taken) -> list[bytes]:
    assert taken.batch is not None
    return [Group.from_bytes(member.group).id for member in taken.batch.members]
