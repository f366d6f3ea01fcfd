"""A trainer's client of the ledger: takes, applies, and acknowledges batches with the checkpoint that contains them.

    client = BatchClient("http://127.0.0.1:7079", bearer_file="ledger/http.token")
    client.resume(branch=0, step=0)
    while (batch := client.take(step)) is not None:
        ...                                     # train on batch.groups
        step += 1
        client.applied(batch, step)
        ...                                     # write a checkpoint of all batches since the last, then
        client.ack(step, batches, checkpoint_digest)

A ledger on a different machine is reached over https, with a certificate that the hub issues:

    client = BatchClient("https://ledger.example:7080", hub="hub.example:7077", token_file="trainer.join")

Guarantees: every request may be repeated, and is repeated until the ledger answers or ``give_up_s`` has passed. A
learner that a different learner has replaced gets RefusedError, and must exit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from p2pcast.ground.errors import RemoteError, UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api import trainer_api as api
from p2pcast.ledger_api.api_route import MAX_LIST, Nothing
from p2pcast.ledger_api.ledger_connection import LedgerConnection
from p2pcast.rollouts.job import Group
from p2pcast.rollouts.overlong import Overlong, overlong_of
from p2pcast.rollouts.result import Result

WAIT_S: Final = 0.02
WAIT_MOST_S: Final = 5.0
"""Limits of the delay that the ledger asks for, in seconds."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """``reward``: computed by the ledger. ``worker``: its name. ``settled_step``: the learner's step when the result
    reached the ledger. The steps until then passed in flight, and later ones in the queue.
    """

    result: Result
    reward: float
    worker: str
    settled_step: int


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """Samples of one prompt, whose rewards are compared."""

    group: Group
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The batch for one learner step. ``groups_played`` and ``mean_reward`` include groups without a gradient."""

    id: bytes
    step: int
    groups: tuple[RolloutGroup, ...]
    groups_played: int
    mean_reward: float | None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of the ledger's run. ``staleness``: S, in learner steps. ``batch_groups``: groups per batch. ``step``: the
    learner's. ``acknowledged``: the step up to which checkpoints contain all batches.
    """

    task: str
    staleness: int
    batch_groups: int
    step: int = 0
    acknowledged: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is over."""


@dataclass(frozen=True, slots=True)
class Wait:
    """There is no batch yet. ``wait_s``: how long to wait before the next request, in seconds."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class GroupReport:
    """``state``: waiting, open, complete, short, trained or dropped. ``reason``: why a group was dropped. ``rewards``:
    those of accepted results, in the order of the samples.
    """

    id: bytes
    state: str
    reason: str | None
    rewards: tuple[float, ...]

    @property
    def ended(self) -> bool:
        """Whether no further result counts."""
        return self.state not in ("waiting", "open")


class BatchClient:
    """Arguments as for LedgerConnection. ``overlong``: how the trainer treats truncated rollouts
    (``p2pcast.rollouts.overlong``). The ledger drops groups whose rewards are then all equal; a ledger of an earlier
    release compares the original rewards. Raises UsageError or LocalError.
    """

    def __init__(
        self,
        url: str,
        *,
        bearer_file: str | os.PathLike[str] | None = None,
        hub: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        name: str | None = None,
        give_up_s: float | None = None,
        overlong: Overlong = "keep",
    ) -> None:
        self._overlong = overlong_of(overlong)
        self._ledger = LedgerConnection(
            url, bearer_file=bearer_file, hub=hub, token_file=token_file, name=name, give_up_s=give_up_s
        )
        self._epoch, self._branch = -1, 0

    @property
    def connection(self) -> LedgerConnection:
        """The connection, for other clients of the same ledger."""
        return self._ledger

    def facts(self) -> RunFacts:
        """Fetch the facts of the run. Raises RefusedError or RemoteError."""
        found = self._ledger.ask(api.STATUS, Nothing())
        try:
            step = Version.parse(found.learner).step
        except UsageError as error:
            raise RemoteError(f"the ledger's status is malformed: {error}") from None
        return RunFacts(found.task, found.staleness, found.batch_groups, step, found.acknowledged)

    def resume(
        self,
        branch: int,
        step: int,
        checkpoint: bytes | None = None,
        batches: Sequence[bytes] = (),
        *,
        from_start: bool = False,
    ) -> int:
        """Begin an epoch and return it: this learner continues from ``checkpoint``, which has ``step`` steps and
        contains ``batches``. ``from_start``: begin even if that undoes the run, for example because the checkpoint
        folder is empty. Raises RefusedError.
        """
        asked = api.ResumeRequest(branch, step, batches, checkpoint, from_start or None)
        self._epoch, self._branch = self._ledger.ask(api.RESUME, asked).epoch, branch
        return self._epoch

    def take(self, step: int) -> RolloutBatch | None:
        """Wait for the batch of the learner's ``step`` and return it, or None if the run is over. A repeated call
        returns the same batch. Raises RefusedError.
        """
        while isinstance(found := self.poll(step), Wait):
            time.sleep(found.wait_s)
        return None if isinstance(found, Finished) else found

    def poll(self, step: int) -> RolloutBatch | Finished | Wait:
        """Return the batch of the learner's ``step`` if there is one now. A repeated call returns the same batch.
        Raises RefusedError.
        """
        overlong = None if self._overlong == "keep" else self._overlong
        found = self._ledger.ask(api.TAKE, api.TakeRequest(self._epoch, self._branch, step, overlong))
        if found.batch is not None:
            return _batch_of(found, found.batch)
        if found.wait is None and not found.finished:
            raise RemoteError(f"the ledger's answer to {api.TAKE.path} has neither a batch nor a wait")
        return Finished() if found.wait is None else Wait(min(WAIT_MOST_S, max(WAIT_S, found.wait)))

    def applied(self, batch: RolloutBatch, step: int) -> None:
        """Report that the learner has applied the batch, and is now at ``step``. Raises RefusedError."""
        self._ledger.ask(api.APPLIED, api.AppliedRequest(self._epoch, batch.id, step))

    def ack(self, step: int, batches: Sequence[bytes], checkpoint: bytes) -> None:
        """Report a checkpoint of ``step`` steps with the batches. ``checkpoint``: its hash. Raises RefusedError."""
        self._ledger.ask(api.ACK, api.AckRequest(self._epoch, step, batches, checkpoint))

    def add_groups(self, groups: Sequence[Group]) -> int:
        """Add groups to the pool, and return how many are new. Raises RefusedError."""
        added = 0
        for first in range(0, len(groups), MAX_LIST):
            rows = [group.to_bytes() for group in groups[first : first + MAX_LIST]]
            added += self._ledger.ask(api.GROUPS, api.GroupsRequest(rows)).added
        return added

    def read_groups(self, groups: Sequence[bytes]) -> list[GroupReport]:
        """Return the states and rewards of groups that were added, in the order of the ids. Raises RefusedError for an
        unknown id.
        """
        found: list[GroupReport] = []
        for first in range(0, len(groups), api.MAX_READ):
            asked = api.ReadGroupsRequest(groups[first : first + api.MAX_READ])
            answer = self._ledger.ask(api.READ_GROUPS, asked)
            found += [GroupReport(o.group, o.state, o.reason, tuple(o.rewards)) for o in answer.groups]
        return found

    def stay(self, for_s: float) -> None:
        """Let workers stay for ``for_s`` seconds after the run's last step, at most a day, to play evaluations; with 0,
        they exit when the run is over.
        """
        self._ledger.ask(api.STAY, api.StayRequest(for_s))

    def publish(self, version: Version, manifest: bytes, schedule: bytes | None = None) -> None:
        """Report a version and the hash of its signed manifest, if the ledger does not follow a hub. ``schedule``:
        BLAKE3 of the version's file ``sparse_attention.json``, or None if it has none; results that claim one are then
        rejected.
        """
        self._ledger.ask(api.PUBLISH, api.PublishRequest(str(version), manifest, schedule))


def _batch_of(found: api.TakeAnswer, batch: bytes) -> RolloutBatch:
    groups = tuple(
        RolloutGroup(
            Group.from_bytes(row.group),
            tuple(
                Rollout(Result.from_bytes(one.result), one.reward, one.worker, one.settled_step) for one in row.results
            ),
        )
        for row in found.groups
    )
    return RolloutBatch(batch, found.step, groups, found.report.groups_played, found.report.mean_reward)
