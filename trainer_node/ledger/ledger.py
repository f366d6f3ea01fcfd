"""The ledger: which rollouts are wanted, leased, accepted and trained. Every public method is one transaction; methods
that change nothing read beside the writer.

Guarantees: a crash between any two transitions loses nothing. A job has at most one accepted result. A group is in at
most one live batch, and each batch is applied at most once in the lineage of any checkpoint that survives. All counts
are queries over rows. ``results`` is the one method of two transactions: rewards are computed between them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, insert, update

from p2pcast.ground.errors import IntegrityError, RefusedError, UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.api_route import MAX_LIST
from p2pcast.ledger_api.trainer_api import GroupRow
from p2pcast.ledger_api.worker_api import HeldLease, Registered, Registration, Settled
from p2pcast.rollouts.job import Group, Job
from p2pcast.rollouts.overlong import Overlong
from p2pcast.rollouts.result import Result
from p2pcast.rollouts.return_reason import Returned
from trainer_node.ledger import (
    batch_transitions,
    job_groups,
    leasing,
    ledger_report,
    ledger_retention,
    resuming,
    share_ceiling,
)
from trainer_node.ledger.acceptance import Rejection, rejection
from trainer_node.ledger.audits import auditing, replaying
from trainer_node.ledger.audits.auditing import AuditSample, SampledLease
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.body_segments import Place
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.database.transitions import Transitions
from trainer_node.ledger.drained_workers import DrainedWorkers
from trainer_node.ledger.failures.failed_jobs import fail_job
from trainer_node.ledger.leased_jobs import LeasedJobs
from trainer_node.ledger.ledger_rows import Policy, Present
from trainer_node.ledger.prompts import prompting
from trainer_node.ledger.result_transitions import Verdicts, judge_all, settle_all, standards_of
from trainer_node.ledger.worker_rates import WorkerRates
from trainer_node.ledger.workers.registration import Registrations
from trainer_node.scheduling.served_versions import KnownEngine

logger = logging.getLogger("p2pcast.ledger")

T = TypeVar("T")
NO_REASONS: Final[Mapping[bytes, Returned]] = {}
_DRAW = secrets.SystemRandom().random


def _new_id() -> bytes:
    return os.urandom(16)


def _waits(taken: batch_transitions.Taken | None) -> bool:
    return taken is not None and taken.batch is None and not taken.finished


class Ledger:
    """``now``: seconds from any origin; a step back counts as no time. ``shared_commits``: calls of several threads
    share commits; otherwise one thread at a time may call. ``draw``: a number from 0, below 1, that no worker can
    predict. ``happened``: called in the caller's thread after each commit of a transition that reports acts.
    """

    def __init__(
        self,
        store: LedgerStore,
        policy: Policy,
        *,
        now: Callable[[], float] = time.monotonic,
        new_id: Callable[[], bytes] = _new_id,
        shared_commits: bool = False,
        draw: Callable[[], float] = _DRAW,
        happened: Callable[[Counter[tuple[str, ...]]], object] = lambda counts: None,
    ) -> None:
        self._store = store
        self._policy = policy
        self._new_id, self._draw = new_id, draw
        self._rates = WorkerRates(policy.guess_s)
        self._registrations = Registrations(new_id)
        self._leased = LeasedJobs()
        self._drained = DrainedWorkers()
        self._audits = AuditSample(secrets.randbelow)
        self._transitions = Transitions(store, self._rates, now, happened)
        dropped = self._transitions.start(
            lambda conn, now: job_groups.enter_task(conn, now, policy.task_hash), shared_commits=shared_commits
        )
        self.foreign_groups = dropped
        """Groups of an earlier task that were dropped at the start."""
        self._warn_of_foreign(dropped)

    def _warn_of_foreign(self, dropped: int) -> None:
        if dropped:
            logger.warning("%d groups of another task were dropped: workers of this task cannot play them", dropped)

    def close(self) -> None:
        self._transitions.close()
        self._store.close()

    # -- workers

    def register(self, caller: str, one: Registration) -> Registered:
        """The same caller with the same name takes its record over, unless it turns out that two workers use the name:
        then one of them gets another name. ``caller``: of a certificate, or BEARER. Raises CapReachedError.
        """
        return self._transitions.at_present(lambda conn, now: self._registrations.register(conn, now, caller, one))

    def grant(
        self,
        session: bytes,
        slots: int,
        served: Version,
        manifest: bytes,
        staged: Version | None = None,
        known: KnownEngine | None = None,
    ) -> leasing.Grant:
        """``served``, ``staged``: as the worker states; the engine could serve ``staged`` at once. ``known``: the
        hub's knowledge of the engine.
        """

        def transition(conn: Connection, now: Present) -> leasing.Grant:
            leasing.expire(conn, now, self._rates)
            begun = leasing.lease(
                conn,
                now,
                self._policy,
                self._rates,
                self._new_id,
                self._drained,
                session=session,
                slots=slots,
                served=served,
                manifest=manifest,
                staged=staged,
                known=known,
            )
            self._leased.add({one.lease: one.job for one in begun.leases})
            return begun

        # An engine may be idle until the answer.
        return self._transitions.at_present(transition, urgent=True)

    def drain(self, name: str, for_s: float) -> tuple[int, bool]:
        """Give the workers of this name no leases for ``for_s`` seconds; 0: give them leases again. Returns how many
        leases they still hold, and whether the order changed the present state. Raises UsageError, RefusedError.
        """

        def transition(conn: Connection, now: Present) -> tuple[int, bool]:
            # Leases are begun in transitions too: each one that began earlier is counted.
            changed = self._drained.order(name, now.now_s, for_s)
            return leasing.held_by(conn, name), changed

        return self._transitions.at_present(transition)

    @property
    def heartbeat_s(self) -> float:
        """Return the interval between a worker's heartbeats, in seconds."""
        return self._rates.heartbeat_s

    def pace_heartbeats(self, workers: int) -> None:
        """Adapt the heartbeat interval. ``workers``: how many are not silent."""
        self._rates.count_workers(workers)

    def heartbeat(self, session: bytes, tokens: Mapping[bytes, int]) -> list[HeldLease]:
        """Handle one heartbeat. Raises UnknownIdError for an unknown session."""
        (held,) = self.heartbeats([leasing.Beat(session, tokens)])
        if held is None:
            raise leasing.unknown_session()
        return held

    def heartbeats(self, beats: Sequence[leasing.Beat]) -> list[list[HeldLease] | None]:
        """Handle several heartbeats at once. Returns None for each unknown session."""
        return self._transitions.at_present(
            lambda conn, now: leasing.heartbeats(conn, now, self._policy, self._rates, beats)
        )

    def give_back(self, session: bytes, leases: Sequence[bytes], why: Mapping[bytes, Returned] = NO_REASONS) -> None:
        """Return unfinished leases. ``why``: the reason for each lease whose worker gives one."""
        self._transitions.at_present(lambda conn, now: leasing.give_back(conn, now, self._rates, session, leases, why))

    def expire(self) -> int:
        """End expired leases; returns how many."""
        return self._transitions.at_present(lambda conn, now: leasing.expire(conn, now, self._rates))

    def results(
        self, session: bytes, handed_in: Sequence[Result], reward: Callable[[Job, Result], float | Rejection]
    ) -> list[Settled]:
        """``unscored``, the rewards, and ``settle``. ``reward``: from the job and the token ids; a worker's own figure
        does not count.
        """
        jobs = self.unscored(session, handed_in)
        rewards = [None if job is None else reward(job, one) for job, one in zip(jobs, handed_in, strict=True)]
        return self.settle(session, handed_in, rewards)

    def unscored(self, session: bytes, handed_in: Sequence[Result]) -> Sequence[Job | None]:
        """For each result that needs a reward, its job. Raises RefusedError if one lease was settled with another
        result.
        """
        if len(handed_in) > MAX_LIST:
            raise UsageError(f"{len(handed_in)} results in one request, and {MAX_LIST} are allowed")
        if len({(r.job, r.lease) for r in handed_in}) < len(handed_in):
            raise UsageError("two results of one lease in one request")
        if (known := self._known_jobs(handed_in)) is not None:
            return known

        def look(conn: Connection, now: Present) -> list[Job | None]:
            worker = leasing.worker_of(conn, session)
            judged = judge_all(conn, now, self._policy, bytes(worker.id), handed_in)
            return [j.job if j.answer is None and j.wrong is None else None for j in judged]

        return self._transitions.read(look)

    def _known_jobs(self, handed_in: Sequence[Result]) -> Sequence[Job] | None:
        """The jobs of results that would all be accepted, as far as memory says; None if the database has to be asked.
        ``settle`` judges again.
        """
        if (newest := self._transitions.newest) is None:
            return None
        standards, jobs = standards_of(newest, self._policy), []
        for result in handed_in:
            job = self._leased.job(result.lease)
            if job is None or job.job != result.job:
                return None
            if rejection(result, job, standards, settled=False, in_time=True) is not None:
                return None
            jobs.append(job)
        return jobs

    def settle(
        self, session: bytes, handed_in: Sequence[Result], rewards: Sequence[float | Rejection | None]
    ) -> list[Settled]:
        """The verdicts, in the same order. ``rewards``: of each result, or why it has none; None where none was needed.
        The same result again gets the same verdict. Raises RefusedError, and changes nothing, if one lease was settled
        with another result.
        """

        def record(conn: Connection, now: Present) -> Verdicts:
            worker = leasing.worker_of(conn, session)
            append = self._store.segments.append
            terms = (bytes(worker.id), handed_in, rewards, self._draw)
            verdicts = settle_all(conn, now, self._policy, self._rates, append, *terms)
            for one in verdicts.new:
                if one.reason is not None:
                    now.happened["results_rejected", worker.name, one.reason] += 1
            self._leased.remove([result.lease for result in handed_in])
            return verdicts

        verdicts = self._transitions.at_present(record)
        spans = {(result.job, result.lease): result.spans for result in handed_in}
        for one in verdicts.new:
            versions = {span.version for span in spans[one.job, one.lease]}
            # A result that is sent again must not be likelier to be audited.
            if one.verdict == "accepted" and len(versions) == 1:
                self._audits.offer(versions.pop(), SampledLease(one.job, one.lease))
        return verdicts.given

    # -- trainer

    def add_groups(self, groups: Sequence[Group]) -> int:
        """Add groups to the pool. Raises RefusedError, CapReachedError."""
        # Requests for leases, which are urgent, may wait for them.
        return self._transitions.at_present(
            lambda conn, now: job_groups.add_groups(conn, now, self._policy.task_hash, groups), urgent=True
        )

    def prompts(self, seed: int) -> prompting.PromptPosition:
        """How far the task's prompts for the seed have been passed on, and how many groups to train wait."""
        with self._store.reading() as conn:
            return prompting.position(conn, self._policy.task_hash, seed)

    def add_prompts(self, seed: int, passed: prompting.PassedPrompts) -> None:
        """Groups made from prompts, and the cursor behind these prompts. Raises as ``add_groups``, and RefusedError if
        the prompts do not follow those before.
        """
        source = (self._policy.task_hash, seed)
        self._transitions.at_present(lambda conn, now: prompting.add(conn, now, *source, passed), urgent=True)

    def hook_state(self, seed: int, hooks: str) -> dict[str, str]:
        """Return the stored values of these hooks as text, by name."""
        return self._transitions.call(lambda conn: prompting.state_of(conn, self._policy.task_hash, seed, hooks))

    def histories(self, prompts: Sequence[bytes]) -> list[list[float]]:
        """For each prompt, return the mean rewards of its newest groups that hooks chose, oldest first."""
        return self._transitions.call(lambda conn: prompting.histories(conn, self._policy.task_hash, prompts))

    def publish(self, version: Version, manifest: bytes, schedule: bytes | None = None) -> None:
        """A version of the weights, with the hash of its signed manifest. ``schedule``: BLAKE3 of the schedule of
        sparse attention that the version carries; None: it carries none. A schedule may be stated later than its
        version, as for versions of an older database. Raises RefusedError if the version is known with another hash.
        """

        def transition(conn: Connection, now: Present) -> None:
            known = now.manifests.get(version)
            if known is None:
                row = {"branch": version.branch, "step": version.step, "manifest": manifest, "known_s": now.now_s}
                share_ceiling.count_publication(conn, now, self._policy, self._rates, version)
                conn.execute(insert(db.versions).values(**row))
            elif known != manifest:
                raise RefusedError(f"version {version} is known with another manifest")
            carried = now.schedules.get(version)
            if carried not in (None, schedule):
                raise RefusedError(f"version {version} is known with another schedule of sparse attention")
            if carried is None and schedule is not None:
                named = {"branch": version.branch, "step": version.step, "name": schedule}
                conn.execute(insert(db.schedules).values(**named))

        self._transitions.changing_versions(transition)

    def take(self, epoch: int, branch: int, step: int, overlong: Overlong = "keep") -> batch_transitions.Taken:
        """``overlong``: as of ``batch_transitions.take``. Raises RefusedError for another epoch or step, and if no
        group that was played can be trained.
        """
        bounds = self._policy.bounds
        overdue_s = self._rates.overdue_s() if self._policy.rule == "bounded" else math.inf

        def look(conn: Connection, now: Present) -> batch_transitions.Taken | None:
            found = batch_transitions.foreseen(
                conn, now, bounds, epoch=epoch, branch=branch, step=step, overlong=overlong
            )
            return None if _waits(found) and leasing.are_overdue(conn, now, overdue_s) else found

        def transition(conn: Connection, now: Present) -> batch_transitions.Taken:
            taken = batch_transitions.take(
                conn, now, bounds, self._new_id, epoch=epoch, branch=branch, step=step, overlong=overlong
            )
            if _waits(taken):
                leasing.release_overdue(conn, now, overdue_s)
            return taken

        taken = self._transitions.read(look) or self._transitions.at_present(transition)
        if taken.refusal is not None:
            # After the commit: the groups stay dropped.
            raise RefusedError(taken.refusal)
        return taken

    def body(self, place: Place) -> bytes:
        """Return a result's bytes. Raises IntegrityError."""
        return self._store.segments.read(place)

    def reopen_damaged(self, batch: batch_transitions.CutBatch) -> int:
        """Read all bodies of a cut batch. If some are corrupt, reopen the batch and return their jobs to the pool.
        Returns the number of corrupt results.
        """
        damaged = []
        for place in (result.place for member in batch.members for result in member.results):
            try:
                self.body(place)
            except IntegrityError as error:
                logger.error("%s: its job is played again", error)
                damaged.append(place)

        def transition(conn: Connection, now: Present) -> int:
            reopened = resuming.reopen_damaged(conn, batch.id, damaged)
            replaying.distrust_reopened(conn, now, self._policy, fail_job)
            return reopened

        return self._transitions.at_present(transition) if damaged else 0

    def applied(self, epoch: int, batch: bytes, step: int) -> None:
        self._transitions.at_present(
            lambda conn, now: batch_transitions.applied(conn, now, epoch=epoch, batch=batch, step=step)
        )

    def ack(self, epoch: int, step: int, batches: Sequence[bytes], checkpoint: bytes) -> None:
        self._transitions.at_present(
            lambda conn, now: batch_transitions.ack(
                conn, now, epoch=epoch, step=step, batch_ids=batches, checkpoint=checkpoint
            )
        )

    def resume(
        self,
        branch: int,
        step: int,
        checkpoint: bytes | None,
        batches: Sequence[bytes],
        *,
        from_start: bool = False,
    ) -> int:
        def transition(conn: Connection, now: Present) -> tuple[int, int]:
            epoch = resuming.resume(
                conn, now, branch=branch, step=step, checkpoint=checkpoint, batch_ids=batches, from_start=from_start
            )
            replaying.distrust_reopened(conn, now, self._policy, fail_job)
            # A batch of an earlier task may have been reopened.
            return epoch, job_groups.drop_foreign(conn, now, self._policy.task_hash)

        epoch, dropped = self._transitions.changing_versions(transition)
        self._warn_of_foreign(dropped)
        return epoch

    def check_room(self) -> None:
        """After a write failed for lack of a resource, try one write of each kind. Raises LocalError if one fails."""

        def touch(conn: Connection) -> None:
            conn.execute(update(db.meta).values(ran_s=db.meta.c.ran_s))

        if self._store.short is not None:
            self._store.segments.check_room()
            self._transitions.call(touch)
            self._store.short = None

    def prune(self) -> None:
        """Delete everything that no resume needs: rows first, then the segments that no row points to."""
        self._transitions.at_present(ledger_retention.prune_batches)
        for groups in self._transitions.read(ledger_retention.old_groups):
            self._transitions.call(functools.partial(ledger_retention.prune_groups, groups=groups))
        segments = self._store.segments
        # A segment that is current now may get rows that the query does not see.
        staleness = self._policy.bounds.staleness

        def transition(conn: Connection, now: Present) -> tuple[set[int], int]:
            used, workers = ledger_retention.prune_rest(conn, now, staleness)
            self._rates.retain(workers)
            return used, segments.current

        used, before = self._transitions.changing_versions(transition)
        segments.prune(used, before)

    # -- audits

    def next_audit(self, version: Version) -> tuple[str, bytes] | None:
        """A random accepted result that the version made alone, with its worker's name; None without one. Each result
        comes at most once.
        """
        while (one := self._audits.take(version)) is not None:
            with self._store.reading() as conn:
                found = auditing.accepted_result(conn, one)
            if found is not None:
                # The batch with a damaged result finds it again.
                with contextlib.suppress(IntegrityError):
                    return found.worker, self.body(found.place)
        return None

    def audited(self, job: bytes, lease: bytes, *, agrees: bool) -> str:
        """Count an audit for its worker and return the worker's name. Raises UnknownIdError."""
        return self._transitions.call(lambda conn: auditing.count(conn, SampledLease(job, lease), agrees=agrees))

    def prober(self, session: bytes, version: Version, manifest: bytes) -> tuple[bytes, str] | None:
        """Id and name of the session's worker; None unless the version is known with this manifest. Raises
        UnknownIdError.
        """

        def look(conn: Connection, now: Present) -> tuple[bytes, str] | None:
            worker = leasing.worker_of(conn, session)
            return (bytes(worker.id), str(worker.name)) if now.manifests.get(version) == manifest else None

        return self._transitions.read(look)

    def due_replays(self, most: int) -> list[replaying.Due]:
        """Return results whose trusted rewards are due to be recomputed, taking turns between parties."""
        return self._transitions.call(lambda conn: replaying.due(conn, self._policy.task_hash, most))

    def replay(self, one: replaying.Due) -> tuple[Job, Result] | None:
        """Return a replay's job and result, or None if no longer due. Raises IntegrityError for a corrupt result."""
        found = self._transitions.call(lambda conn: replaying.read(conn, one))
        return None if found is None else (found.job, Result.from_bytes(self.body(found.place)))

    def replayed(self, one: replaying.Due, found: float | Rejection) -> replaying.ReplayEnded | None:
        """``found``: the reward, or why there is none. Repeated after its commit, changes nothing: None."""
        return self._transitions.at_present(
            lambda conn, now: replaying.end(conn, now, self._policy, one, found, fail_job)
        )

    # -- reports

    def group(self, group_id: bytes) -> GroupRow:
        """Raises UnknownIdError."""
        return self.groups([group_id])[0]

    def groups(self, group_ids: Sequence[bytes]) -> list[GroupRow]:
        """Return the state and rewards of each group, in the order of the ids. Raises UnknownIdError."""
        with self._store.reading() as conn:
            return ledger_report.groups(conn, group_ids)

    def workers(self, region: Callable[[bytes], str | None] = lambda session: None) -> list[dict[str, Any]]:
        """Return one row per worker, by name. ``drained_s``: seconds until it gets leases again, 0 if it gets them now.
        ``region``: that of a session's engine, or None if unknown.
        """

        def look(conn: Connection, now: Present) -> list[dict[str, Any]]:
            rows = ledger_report.workers(conn, now, self._rates.estimates(), region)
            return [row | {"drained_s": round(self._drained.left_s(row["name"], now.now_s), 3)} for row in rows]

        return self._transitions.read(look)

    def status(self) -> dict[str, Any]:
        return self._transitions.read(lambda conn, now: ledger_report.status(conn, now, self._policy.bounds))
