"""Every point at which a part of a run may die, enumerated: a deterministic run of learner, workers and ledger, one
request at a time.

A *point* is a boundary of one of the ledger's transactions, or a moment of a client. A client's moments are before a
request, after its commit but before the answer, and around the optimiser's step and the checkpoint. A ledger dies by a
copy of its files, taken at the point: bytes that the process has not written are lost. An open transaction is as a
crash leaves it. A client dies by losing its memory; the ledger lives on.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from sqlalchemy import Engine, create_engine, insert, select, text

from p2pcast.ground.version import Version
from p2pcast.ledger_api.worker_api import Leased, Registration
from p2pcast.rollouts.job import Group
from p2pcast.rollouts.result import Result
from tests.trainer_node.ledger.crash_run import TASK_HASH, group, manifest, played, third
from tests.trainer_node.ledger.ledger_invariants import Rows, check_counts, check_rows, dump
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.ledger import Ledger
from trainer_node.ledger.ledger_rows import Policy
from trainer_node.ledger.prompts.prompting import PassedPrompts
from trainer_node.ledger.staleness_rule import StalenessBounds

Terms = ParamSpec("Terms")
Answer = TypeVar("Answer")

STEPS = 3
MOST_TURNS = 6000
GROUP_SIZE, BATCH_GROUPS = 3, 2
TURN_S = 2.0
SLOW_TURNS, POLL_TURNS = 12, 2
"""A client's own turns in a play that outlives its lease, and between two requests without an answer of use."""
DIGEST = b"c" * 32


class Died(BaseException):
    """``part``: learner or a worker's name."""

    def __init__(self, part: str) -> None:
        super().__init__(part)
        self.part = part


class Point(NamedTuple):
    """``number``: in the order of the run. ``kind``: the part that can die here, and where."""

    number: int
    part: str
    kind: str


@dataclass
class Learner:
    """Memory of a learner. ``lineage``: batches that made the weights, with their groups and jobs."""

    branch: int
    step: int
    lineage: list[Trained]
    phase: str = "resume"
    epoch: int = -1
    taken: Trained | None = None
    rests: int = 0


@dataclass(frozen=True)
class Trained:
    batch: bytes
    step: int
    groups: frozenset[bytes]
    jobs: frozenset[bytes]


@dataclass
class Worker:
    """Memory of a worker. ``rests``: its own turns until it goes on."""

    session: bytes | None = None
    leases: list[Leased] = field(default_factory=list)
    served: Version | None = None
    beaten: bool = False
    gave_back: bool = False
    rests: int = 0


@dataclass
class World:
    """All that is not the ledger's: clients, their checkpoint, versions, the clock. Copied at a point."""

    draw: random.Random
    ids: random.Random
    now_s: float = 1e9
    learner: Learner = field(default_factory=lambda: Learner(0, 0, []))
    saved: tuple[int, list[Trained]] = (0, [])
    """The newest checkpoint: its step, and the batches that it contains."""
    workers: dict[str, Worker] = field(default_factory=lambda: {name: Worker() for name in ("w0", "w1", "w2")})
    published: list[Version] = field(default_factory=list)
    forks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Parent and step of each branch."""
    groups: int = 0
    accepted: dict[tuple[bytes, bytes], Version] = field(default_factory=dict)
    """(job, lease) of results whose workers were told that they are accepted, with the version that made them."""

    def live(self, version: Version) -> bool:
        branch, step = self.learner.branch, self.learner.step
        while branch != version.branch and branch in self.forks:
            branch, step = self.forks[branch]
        return version.branch == branch and version.step <= step

    def restart(self, part: str) -> None:
        """The part begins again from what is on disk."""
        if part != "learner":
            self.workers[part] = Worker()
            return
        step, lineage = self.saved
        newest = max(self.published, default=Version(0, 0))
        self.learner = Learner(newest.branch, step, list(lineage))
        if newest.step > step:
            self.learner.branch = newest.branch + 1
            self.forks[newest.branch + 1] = (newest.branch, step)


class Tables:
    """A database for the ledger of one run after the other. ``url``: of PostgreSQL; None: SQLite in the folder."""

    def __init__(self, url: str | None) -> None:
        self.url = url
        self._engine: Engine | None = None
        if url is not None:
            self._engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
            db.metadata.create_all(self._engine)

    def committed(self) -> Rows:
        """As another process sees them, that is, as a crash would leave them."""
        assert self._engine is not None
        with self._engine.connect() as conn:
            return {
                t.name: [dict(row) for row in conn.execute(select(t)).mappings()] for t in db.metadata.sorted_tables
            }

    def fill(self, rows: Rows) -> None:
        """Replace all rows."""
        assert self._engine is not None
        with self._engine.begin() as conn:
            conn.execute(text(f"TRUNCATE {', '.join(db.metadata.tables)}"))
            for table in db.metadata.sorted_tables:
                if rows.get(table.name):
                    conn.execute(insert(table), rows[table.name])

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()


class Dead(NamedTuple):
    """State that a dead ledger left at a point: the memory of the others, its files, its rows on PostgreSQL."""

    world: World
    folder: Path
    rows: Rows


def as_crashed(folder: Path, mark: str) -> Path:
    """A copy of a ledger's folder, beside the folder, as the death of its process would leave the folder now."""
    copied = folder.with_name(f"{folder.name}-{mark}")
    # Readers rebuild the index of SQLite's log after a crash.
    shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("*-shm", "*.lock"))
    return copied


class PointRun:
    """A run that dies at most once. ``dies_at``: number of the point at which a client dies. ``ledger_dies_at``: points
    at which a copy is put down in ``dead``.
    """

    def __init__(
        self,
        folder: Path,
        policy: Policy,
        tables: Tables,
        world: World,
        *,
        dies_at: int | None = None,
        ledger_dies_at: Iterable[int] = (),
    ) -> None:
        self.folder, self.policy, self.tables, self.world = folder, policy, tables, world
        self.points: list[Point] = []
        self.dead: dict[int, Dead] = {}
        self._dies_at, self._ledger_dies_at = dies_at, frozenset(ledger_dies_at)
        self._calling = ""
        self.store = LedgerStore(folder, tables.url, segment_bytes=2048)
        self.ledger = Ledger(
            self.store,
            policy,
            now=lambda: self.world.now_s,
            new_id=lambda: self.world.ids.randbytes(16),
        )
        self.store.boundary = self._boundary

    # -- points

    def _boundary(self, name: str) -> None:
        number = self._point("ledger", f"{name} of {self._calling}")
        if number in self._ledger_dies_at:
            folder = as_crashed(self.folder, str(number))
            rows = {} if self.tables.url is None else self.tables.committed()
            self.dead[number] = Dead(copy.deepcopy(self.world), folder, rows)

    def _point(self, part: str, kind: str) -> int:
        self.points.append(Point(len(self.points), part, f"{part}: {kind}"))
        return len(self.points) - 1

    def _may_die(self, part: str, kind: str) -> None:
        if self._point(part, kind) == self._dies_at:
            raise Died(part)

    def _ask(
        self, part: str, method: Callable[Concatenate[Ledger, Terms], Answer], *terms: Terms.args, **named: Terms.kwargs
    ) -> Answer:
        """Clients change their memory after the answer alone: a request that was not answered is repeated."""
        if part != "ledger":
            self._may_die(part, f"before {method.__name__}")
        self._calling = method.__name__
        answer = method(self.ledger, *terms, **named)
        if part != "ledger":
            self._may_die(part, f"no answer to {method.__name__}")
        return answer

    # -- the run

    def run(self) -> None:
        """Until the run has ended, and its rows agree with what the clients know."""
        for _ in range(MOST_TURNS):
            self.world.now_s += TURN_S
            part = self.world.draw.choice(["learner", "learner", "w0", "w0", "w1", "w1", "w2", "w2", "ledger"])
            try:
                if part == "learner":
                    self._learn()
                elif part == "ledger":
                    self._tend()
                else:
                    self._work(part, self.world.workers[part])
            except Died as died:
                self.world.restart(died.part)
            if self.world.learner.phase == "end":
                return self._check()
        raise AssertionError(f"no end after {MOST_TURNS} turns: {self.ledger.status()}")

    def close(self) -> None:
        self.ledger.close()

    def _tend(self) -> None:
        """The own work of the ledger's daemon."""
        self._ask("ledger", Ledger.expire)
        self._calling = "prompts"
        if self.ledger.prompts(0).waiting < BATCH_GROUPS:
            groups = [group(self.world.groups + n, GROUP_SIZE) for n in range(2)]
            self._ask("ledger", Ledger.add_prompts, 0, PassedPrompts(self.world.groups, self.world.groups + 2, groups))
            self.world.groups += 2

    def _learn(self) -> None:
        one = self.world.learner
        ids = [trained.batch for trained in one.lineage]
        if one.phase == "resume":
            one.epoch = self._ask("learner", Ledger.resume, one.branch, one.step, DIGEST, ids)
            one.phase = "publish"
        elif one.phase == "publish":
            self._publish(one)
            one.phase = "take"
        elif one.rests > 0:
            one.rests -= 1
        elif one.phase == "take":
            taken = self._ask("learner", Ledger.take, one.epoch, one.branch, one.step)
            if taken.finished:
                one.phase = "end"
            elif taken.batch is not None:
                one.taken = self._fresh(one, taken.batch)
                one.phase = "optimise"
            else:
                one.rests = POLL_TURNS
        elif one.phase == "optimise":
            assert one.taken is not None
            self._may_die("learner", "before the optimiser's step")
            one.lineage.append(one.taken)
            one.taken, one.phase = None, "applied"
            self._may_die("learner", "after the optimiser's step")
        elif one.phase == "applied":
            self._ask("learner", Ledger.applied, one.epoch, ids[-1], len(ids))
            one.step, one.phase = len(ids), "publish after a step"
        elif one.phase == "publish after a step":
            self._publish(one)
            one.phase = "checkpoint" if one.step in (2, STEPS) else "take"
        elif one.phase == "checkpoint":
            self._may_die("learner", "before the checkpoint")
            self.world.saved = (one.step, list(one.lineage))
            one.phase = "ack"
            self._may_die("learner", "after the checkpoint")
        else:
            self._ask("learner", Ledger.ack, one.epoch, one.step, ids, DIGEST)
            self._ask("ledger", Ledger.prune)
            one.phase = "end" if one.step == STEPS else "take"

    def _publish(self, one: Learner) -> None:
        version = Version(one.branch, one.step)
        if version not in self.world.published:
            self.world.published.append(version)
        self._ask("learner", Ledger.publish, version, manifest(version))

    def _fresh(self, one: Learner, batch: Any) -> Trained:
        """The batch, once it is found to be new in the lineage, fresh, and as the scorer rates it."""
        assert batch.step == one.step
        groups, jobs = set(), set()
        for member in batch.members:
            groups.add(Group.from_bytes(member.group).id)
            assert len(member.results) >= 2
            assert len({result.reward for result in member.results}) > 1
            for result in member.results:
                found = Result.from_bytes(self.ledger.body(result.place))
                assert found.job not in jobs, "counted twice in a batch"
                jobs.add(found.job)
                assert result.reward == third(None, found)  # type: ignore[arg-type]
                for span in found.spans:
                    assert self.world.live(span.version), f"{span.version} on branch {one.branch}"
                    assert one.step - span.version.step <= self.policy.bounds.staleness
        for earlier in one.lineage:
            assert not groups & earlier.groups, "a group is trained twice in a lineage"
            assert not jobs & earlier.jobs, "a result is counted twice in a lineage"
        return Trained(batch.id, batch.step, frozenset(groups), frozenset(jobs))

    def _work(self, name: str, one: Worker) -> None:
        live = [version for version in self.world.published if version.branch == self.world.learner.branch]
        if one.session is None:
            terms = Registration(name, 4, "sums", TASK_HASH)
            one.session = self._ask(name, Ledger.register, f"c{name}", terms).session
        elif one.rests > 0:
            one.rests -= 1
        elif not one.leases:
            if live:
                served = self.world.draw.choice(live[-2:])
                leases = self._ask(name, Ledger.grant, one.session, 3, served, manifest(served)).leases
                one.leases, one.served = leases, served
                one.beaten = one.gave_back = False
                one.rests = 0 if leases else POLL_TURNS
        elif not one.beaten:
            held = self._ask(name, Ledger.heartbeat, one.session, {each.lease: 1 for each in one.leases})
            gone = {each.lease for each in held if each.state != "held"}
            one.leases, one.beaten = [each for each in one.leases if each.lease not in gone], True
            one.rests = SLOW_TURNS if name == "w2" else 0
        elif not one.gave_back and len(one.leases) > 2 and name == "w1":
            self._ask(name, Ledger.give_back, one.session, [one.leases[0].lease])
            one.leases, one.gave_back = one.leases[1:], True
        else:
            self._hand_in(name, one)

    def _hand_in(self, name: str, one: Worker) -> None:
        assert one.served is not None
        # One lease in sixteen brings a token that the vocabulary does not have.
        done = [played(each, one.served, vocabulary=10 if each.lease[1] % 16 else 99) for each in one.leases]
        for settled in self._ask(name, Ledger.results, one.session, done, third):
            if settled.verdict == "accepted":
                self.world.accepted[settled.job, settled.lease] = one.served
        one.leases = []

    # -- the end

    def _check(self) -> None:
        rows = dump(self.store)
        check_rows(rows)
        check_counts(rows, self.ledger)
        lineage = self.world.learner.lineage
        assert [trained.step for trained in lineage] == list(range(STEPS))
        trained = {bytes(row.id): row.step for row in rows["batches"] if row.state == "trained"}
        assert trained == {one.batch: one.step for one in lineage}, "the ledger and the checkpoint differ"
        assert {row.state for row in rows["batches"]} <= {"trained", "reopened"}
        verdicts = {(bytes(row.job_id), bytes(row.lease_id)): row for row in rows["results"]}
        for key, version in self.world.accepted.items():
            row = verdicts[key]
            assert row.verdict == "accepted" or (row.reason == "dead version" and not self.world.live(version))
        counted = [row for row in rows["results"] if row.verdict == "accepted" or row.detail == LEFT]
        tokens = sum(row.sampled for row in counted)
        assert tokens == sum(row.accepted_tokens for row in rows["workers"]), "a result was counted twice"
        jobs = {bytes(row.id): row for row in rows["jobs"]}
        for one in lineage:
            assert all(jobs[job].state == "accepted" for job in one.jobs)
            assert {bytes(jobs[job].group_id) for job in one.jobs} == one.groups
        self._no_job_is_lost(rows)

    def _no_job_is_lost(self, rows: Rows) -> None:
        """Each job of a group that was opened has ended, unless the end of the run overtook its group."""
        assert self.ledger.status()["ahead"] == 0 or self.policy.bounds.last_step is None
        groups = {bytes(row.id): row.state for row in rows["groups"]}
        for row in rows["jobs"]:
            if row.state in ("open", "leased"):
                assert groups[bytes(row.group_id)] == "open"
        assert sum(row.state in ("open", "leased") for row in rows["jobs"]) == 0


LEFT = "the learner left its branch"


def policy_of(staleness: int) -> Policy:
    return Policy(StalenessBounds(staleness, BATCH_GROUPS, STEPS), "bounded", 10, guess_s=30.0, task_hash=TASK_HASH)


@contextmanager
def memory_folder() -> Iterator[Path]:
    """In memory where there is some: a copy's bytes alone say what a crash leaves."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="p2pcast-points-", dir=memory) as folder:
        yield Path(folder)


class Points:
    """All points of one deterministic run, and the runs that die there. ``seed`` and ``staleness`` make the run."""

    def __init__(self, folder: Path, url: str | None, seed: int, staleness: int) -> None:
        self._folder, self._tables = folder, Tables(url)
        self._seed, self._policy = seed, policy_of(staleness)
        self._runs = 0
        self.all = self._ended(self._new()).points

    def _new(self, **dies: Any) -> PointRun:
        self._runs += 1
        if self._tables.url is not None:
            self._tables.fill({})
        world = World(random.Random(self._seed), random.Random(f"ids {self._seed}"))
        return PointRun(self._folder / f"run{self._runs}", self._policy, self._tables, world, **dies)

    def _ended(self, run: PointRun, check: Callable[[PointRun], None] = PointRun.run) -> PointRun:
        try:
            check(run)
        finally:
            run.close()
            shutil.rmtree(run.folder)
        return run

    def die(self, points: Iterable[Point]) -> int:
        """Die at each point, and go on to the run's end. Returns the number of deaths."""
        chosen = list(points)
        ledgers = [point.number for point in chosen if point.part == "ledger"]
        found = self._ended(self._new(ledger_dies_at=ledgers)) if ledgers else None
        for point in chosen:
            try:
                self._die_at(point, found)
            except BaseException as error:
                error.add_note(f"{point} of seed {self._seed}")
                raise
        return len(chosen)

    def _die_at(self, point: Point, found: PointRun | None) -> None:
        if point.part != "ledger":
            run = self._ended(self._new(dies_at=point.number))
            assert run.points[: point.number + 1] == self.all[: point.number + 1], "the run is not deterministic"
            return
        assert found is not None
        assert found.points == self.all, "the run is not deterministic"
        world, folder, rows = found.dead.pop(point.number)
        if self._tables.url is not None:
            self._tables.fill(rows)
        self._ended(PointRun(folder, self._policy, self._tables, world))

    def close(self) -> None:
        self._tables.close()
