"""Groups of jobs: the samples to be taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from p2pcast.ground import limits
from p2pcast.ground.version import Version
from p2pcast.rollouts.record_form import RolloutRecord, record
from p2pcast.rollouts.rollout_fields import MAX_GROUP, MAX_TOKENS, Count, Hash, Id, Seed, TaskName, Temperature
from p2pcast.wire.constraints import AtMost, Blob, Integer, OneOf

MAX_PROMPT_BYTES = 4 * limits.MIB
MAX_JOB_BYTES = MAX_PROMPT_BYTES + 64 * limits.KIB


@record("group", MAX_JOB_BYTES)
class Group(RolloutRecord):
    """``size`` samples of one prompt, whose rewards are compared. ``prompt``: for the task alone. ``task_hash``: of the
    task's code and settings. ``purpose``: a group for evaluation is played by the version ``pinned`` and never trained.
    """

    id: Id
    size: Annotated[int, Integer(1, MAX_GROUP)]
    purpose: Annotated[str, OneOf(("train", "evaluate"))]
    task: TaskName
    task_hash: Hash
    prompt: Annotated[bytes, Blob(MAX_PROMPT_BYTES)]
    seed: Seed
    temperature: Temperature
    max_tokens: Annotated[int, Integer(1, MAX_TOKENS)]
    stop_token_ids: Annotated[Sequence[Annotated[int, Integer(0, (1 << 32) - 1)]], AtMost(256)] = ()
    pinned: Version | None = None


@record("job", MAX_JOB_BYTES + limits.KIB)
class Job(Group):
    """One sample of a group. ``index``: its number there. ``oldest``: no span of an older version is accepted."""

    job: Id
    index: Count
    oldest: Version

    @property
    def sample_seed(self) -> int:
        """This sample's seed, which differs from those of the group's other samples."""
        return (self.seed + self.index) % (1 << 64)


def job_of(group: Group, index: int, job: bytes, oldest: Version) -> Job:
    shared = {name: getattr(group, name) for name in Group._reads}
    return Job(**shared, job=job, index=index, oldest=oldest)
