"""A whole run against a ledger that dies at random transaction boundaries: workers, learner, checkpoints."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from sqlalchemy import func, select

from p2pcast.ground.errors import RefusedError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.worker_api import Leased, Registration
from p2pcast.rollouts.job import Group, Job
from p2pcast.rollouts.result import Result, Span
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.body_segments import Place
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.ledger import Ledger
from trainer_node.ledger.ledger_rows import Policy, ahead
from trainer_node.ledger.staleness_rule import StalenessBounds

TASK_HASH = b"t" * 32
WORKERS = 3


class Killed(BaseException):
    """The process dies here."""


def manifest(version: Version) -> bytes:
    return hashlib.sha256(str(version).encode()).digest()


def group(number: int, size: int = 3) -> Group:
    return Group(
        id=number.to_bytes(16, "big"),
        size=size,
        purpose="train",
        task="sums",
        task_hash=TASK_HASH,
        prompt=b"1+1",
        seed=number,
        temperature=1.0,
        max_tokens=16,
    )


def played(leased: Leased, served: Version, *, vocabulary: int = 10) -> Result:
    draw = random.Random(leased.lease)
    ids = np.array([draw.randrange(vocabulary) for _ in range(4)], "<u4")
    return Result(
        job=leased.job.job,
        lease=leased.lease,
        task_hash=leased.job.task_hash,
        token_ids=ids,
        mask=np.array([0, 0, 1, 1], "u1"),
        logprobs=np.array([0, 0, -1, -1], "<f4"),
        spans=[Span(served, 2, 4, manifest(served), "keep")],
        temperature=1.0,
        reward=99.0,
        stop="end",
    )


def third(job: Job, result: Result) -> float:
    return float(result.token_ids[-1] % 3)


class CrashRun:
    """``kill``: chance at each boundary. ``database``: URL; None: SQLite in the folder."""

    def __init__(self, folder: Path, seed: int, *, kill: float, policy: Policy, database: str | None = None) -> None:
        self.folder, self.database, self.policy = folder, database, policy
        self.random, self.kill = random.Random(seed), kill
        self.now_s, self.kills = 1e9, 0
        self.points: Counter[str] = Counter()
        self.branch, self.step, self.epoch = 0, 0, -1
        self.highest_step = 0
        self.trained: list[bytes] = []
        """Batches in the learner's memory, one a step."""
        self.saved: tuple[int, list[bytes]] = (0, [])
        """The newest checkpoint: its step, and all batches that it contains."""
        self.members: dict[bytes, set[bytes]] = {}
        """Groups of each batch that was taken."""
        self.published: set[Version] = set()
        self.highest_branch = 0
        self.sessions: list[bytes] = []
        self.pending: list[list[Result]] = []
        """Sent, and perhaps not answered."""
        self.verdicts: dict[tuple[bytes, bytes], str] = {}
        self.groups, self.joined = 0, 0
        self.open()

    def boundary(self, name: str) -> None:
        self.points[name] += 1
        if self.random.random() < self.kill:
            self.kills += 1
            raise Killed(name)

    def open(self) -> None:
        self.store = LedgerStore(self.folder, self.database, segment_bytes=2048)
        self.ledger = Ledger(
            self.store,
            self.policy,
            now=lambda: self.now_s,
            new_id=lambda: self.random.randbytes(16),
        )
        check(self)
        self.store.boundary = self.boundary

    def run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Killed:
            self.ledger.close()
            self.open()
        self.now_s += self.random.random()

    # -- actions

    def begin(self) -> None:
        """The learner starts from its newest checkpoint, under a new branch if it has published later versions."""
        self.step, batches = self.saved
        self.trained = list(batches)
        if any(v.branch == self.branch and v.step > self.step for v in self.published):
            self.highest_branch += 1
        # An answer that was lost may have recorded the branch already: the number is then not new.
        forks = {r.branch for r in self.store.connection.execute(select(db.forks))}
        self.store.connection.rollback()
        while self.highest_branch in forks:
            self.highest_branch += 1
        self.branch = self.highest_branch
        self.epoch = -1
        self.epoch = self.ledger.resume(self.branch, self.step, b"c" * 32, self.trained[-15:])
        self.publish()

    def publish(self) -> None:
        version = Version(self.branch, self.step)
        self.published.add(version)
        self.ledger.publish(version, manifest(version))

    def learn(self) -> None:
        if self.epoch < 0:
            return self.begin()
        if len(self.trained) > self.step:
            self.ledger.applied(self.epoch, self.trained[-1], len(self.trained))
            self.step = len(self.trained)
        self.publish()
        try:
            taken = self.ledger.take(self.epoch, self.branch, self.step)
        except RefusedError as error:
            # Rewards are random here: a real learner would end.
            if "can be trained" not in str(error):
                raise
            return None
        if taken.batch is not None:
            assert self.ledger.take(self.epoch, self.branch, self.step) == taken
            groups = {Group.from_bytes(member.group).id for member in taken.batch.members}
            for batch in self.trained:
                assert not groups & self.members[batch], "trained twice in a lineage"
            self.members[taken.batch.id] = groups
            for member in taken.batch.members:
                assert len(member.results) >= 2
                for one in member.results:
                    result = Result.from_bytes(self.ledger.body(one.place))
                    assert self.step - result.oldest_step <= self.policy.bounds.staleness
            self.trained.append(taken.batch.id)
            self.highest_step = max(self.highest_step, self.step + 1)
            self.ledger.applied(self.epoch, taken.batch.id, self.step + 1)
            self.step += 1
        if self.random.random() < 0.4:
            self.saved = (self.step, list(self.trained))
            self.ledger.ack(self.epoch, self.step, self.trained[-15:], b"c" * 32)
            self.ledger.prune()
        elif self.random.random() < 0.05:
            self.epoch = -1
        return None

    def add(self) -> None:
        try:
            self.ledger.add_groups([group(self.groups + n) for n in range(4)])
        finally:
            self.groups += self.random.choice((0, 4))

    def work(self) -> None:
        while len(self.sessions) < WORKERS:
            self.joined += 1
            one = Registration(f"w{self.joined}", 6, "sums", TASK_HASH)
            self.sessions.append(self.ledger.register(f"c{self.joined}", one).session)
        session = self.random.choice(self.sessions)
        live = sorted(v for v in self.published if v.branch == self.branch)
        if not live:
            return
        served = self.random.choice(live[-2:])
        try:
            leases = self.ledger.grant(session, 6, served, manifest(served)).leases
        except RefusedError:  # blamed too often: another worker takes its place
            self.sessions.remove(session)
            return
        lost = [one.lease for one in leases if self.random.random() < 0.1]
        self.ledger.heartbeat(session, {one.lease: 1 for one in leases})
        self.ledger.give_back(session, lost[:1])
        done = [played(one, served, vocabulary=self.random.choice((10, 10, 10, 99))) for one in leases]
        done = [result for result in done if result.lease not in lost]
        if done:
            self.pending.append(done)
            self.send(session, done)

    def send(self, session: bytes, done: list[Result]) -> None:
        for settled in self.ledger.results(session, done, third):
            if settled.reason == "unknown lease":
                continue
            key = (settled.job, settled.lease)
            if self.verdicts.get(key) == "rejected":
                assert settled.verdict == "rejected"
            self.verdicts[key] = settled.verdict

    def resend(self) -> None:
        if self.pending and self.sessions:
            done = self.random.choice(self.pending)
            for session in self.sessions:
                self.send(session, done)

    def pass_time(self) -> None:
        self.now_s += self.random.choice((1, 10, 400))
        self.ledger.expire()

    def until(self, finished: Callable[[], bool], most: int) -> None:
        actions = [self.learn, self.work, self.work, self.work, self.add, self.resend, self.pass_time]
        for _ in range(most):
            if finished():
                return
            self.run(self.random.choice(actions))
        raise AssertionError(f"no end after {most} actions: {self.ledger.status()}")


def bounded(staleness: int, last_step: int | None = None) -> Policy:
    return Policy(StalenessBounds(staleness, 2, last_step), "bounded", 10, guess_s=30.0, task_hash=TASK_HASH)


def check(run: CrashRun) -> None:
    """Assert, by rows alone, the invariants of the ledger after a crash."""
    conn = run.store.connection
    with conn.begin():
        bounds = run.policy.bounds
        # After a resume, groups that were trained on the way to a higher step are ahead again.
        assert ahead(conn) <= (run.highest_step + bounds.staleness + 1) * bounds.batch_groups
        twice = select(db.results.c.job_id).where(db.results.c.verdict == "accepted")
        assert not conn.execute(twice.group_by(db.results.c.job_id).having(func.count() > 1)).all()
        accepted = set(conn.scalars(twice))
        assert accepted == set(conn.scalars(select(db.jobs.c.id).where(db.jobs.c.state == "accepted")))
        held = set(conn.scalars(select(db.leases.c.job_id).where(db.leases.c.state == "held")))
        assert held == set(conn.scalars(select(db.jobs.c.id).where(db.jobs.c.state == "leased")))
        sizes = dict(
            conn.execute(select(db.groups.c.id, db.groups.c.size).where(db.groups.c.opened.is_not(None))).all()
        )
        counted = select(db.jobs.c.group_id, func.count()).group_by(db.jobs.c.group_id)
        assert sizes == dict(conn.execute(counted).all())
        for row in conn.execute(select(db.groups.c.id, db.groups.c.state).where(db.groups.c.state != "waiting")):
            jobs = set(conn.scalars(select(db.jobs.c.state).where(db.jobs.c.group_id == row.id)))
            assert bool(jobs & {"open", "leased"}) == (row.state == "open"), (row.state, jobs)
        live = select(db.batch_members.c.group_id).join(db.batches).where(db.batches.c.state != "reopened")
        assert not conn.execute(live.group_by(db.batch_members.c.group_id).having(func.count() > 1)).all()
        bodies = conn.execute(select(db.results).where(db.results.c.segment.is_not(None))).all()
    for row in bodies:
        place = Place(row.segment, row.offset, row.length)
        assert Result.from_bytes(run.ledger.body(place)).digest() == bytes(row.digest)
