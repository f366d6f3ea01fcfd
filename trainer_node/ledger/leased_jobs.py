"""The jobs of recent leases, in memory: most results then need no look into the database before their reward.

Guarantee: nothing is decided from here. A reward that was computed for a result that turns out to be rejected is not
used; a result that is missing here is looked up in the database.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from p2pcast.ground import limits
from p2pcast.rollouts.job import Job

MAX_BYTES = 64 * limits.MIB
"""Of all prompts together; each job counts JOB_BYTES more."""
JOB_BYTES = 512


class LeasedJobs:
    """Not thread-safe for writers: one thread adds and removes, any may read."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._jobs: dict[bytes, Job] = {}
        self._max_bytes, self._bytes = max_bytes, 0

    def add(self, leases: Mapping[bytes, Job]) -> None:
        """Add jobs by lease, evicting the oldest leases when full."""
        for lease, job in leases.items():
            self._jobs[lease] = job
            self._bytes += _size(job)
        while self._bytes > self._max_bytes:
            self.remove([next(iter(self._jobs))])

    def remove(self, leases: Collection[bytes]) -> None:
        for lease in leases:
            if (job := self._jobs.pop(lease, None)) is not None:
                self._bytes -= _size(job)

    def job(self, lease: bytes) -> Job | None:
        return self._jobs.get(lease)


def _size(job: Job) -> int:
    return JOB_BYTES + len(job.prompt)
