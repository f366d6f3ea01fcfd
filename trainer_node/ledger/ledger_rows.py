"""Parts that all transitions of the ledger share: the present, the run's policy, and changes of state.

Statements that most transitions run are built once, with bound parameters: SQLAlchemy takes four times as long to build
a statement as to run it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, Update, bindparam, func, select, update

from p2pcast.ground.errors import IntegrityError, LocalError, RefusedError, UsageError
from p2pcast.ground.version import Version
from p2pcast.rollouts.routed_experts import ExpertShape
from trainer_node.ledger.acceptance import Rule
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.ledger_states import LIVE_GROUPS, sources
from trainer_node.ledger.lineage import Fork, Lineage
from trainer_node.ledger.staleness_rule import StalenessBounds

T = TypeVar("T")

MAX_FAILURES = 3
"""Callers whose results of a job are rejected, before the job is. Fewer, where no other worker is left."""
MAX_REJECTED = 9
"""Rejected results of a job, after which the job is rejected, whichever callers sent them: each group ends."""
OTHERS_FIRST_S = 30.0
"""Seconds in which a job is not leased again to the caller that failed it, or kept it too long, while other workers are
there. Not for ever: the others may be unable to play it.
"""
SEEN_S = 60.0
"""A worker that was silent for so long has no share, and no job waits for it."""
MAX_STALE_ENDINGS = 3
"""Leases of a group that may end stale, before the group is dropped."""
MAX_BLAMED = 16
"""Malformed and forged results, after which a worker gets no leases."""
MAX_UNKNOWN = 8
"""Results of versions that the hub does not list, after which each further one counts as forged."""
MAX_WAITING = 4096
"""Groups to train in the pool that are not open."""
MAX_EVALUATIONS = 4096
"""Groups for evaluation in the pool that are not open. A cap of their own: if their version is served nowhere, groups
to train are still added.
"""
MAX_WORKERS = 16384
MAX_NAMES = 16
"""Workers of one certificate: a new worker counts as the median, so each name is worth a share."""
BEARER = "bearer"
"""The caller of all workers that show a bearer token. They cannot be told apart, so none answers for another."""
MAX_LISTED = 8192
"""Ids in one list of a statement: PostgreSQL takes 65535 parameters, SQLite perhaps 32766."""


class UnknownIdError(UsageError):
    """No row has the id."""


class CapReachedError(LocalError):
    """A cap is reached; the caller may try again later."""


@dataclass(frozen=True, slots=True)
class Trust:
    """The rewards of workers count. ``share``: of the results that are replayed all the same. ``replays``: whether the
    task can be replayed at all.
    """

    share: float
    replays: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """``guess_s``: of first leases. ``task_hash``: of the run's task; groups of another task are not played.
    ``asks_hub``: the hub is asked for the versions of each result before it is judged. ``trust`` None: the ledger
    computes each reward. ``experts``: of the run's model, if stated.
    """

    bounds: StalenessBounds
    rule: Rule
    vocabulary: int
    guess_s: float = 120.0
    task_hash: bytes = field(kw_only=True)
    asks_hub: bool = False
    trust: Trust | None = None
    experts: ExpertShape | None = None


@dataclass(frozen=True, slots=True)
class Present:
    """Of the learner, with all versions that are known. ``schedules``: of the versions that carry one. ``now_s``:
    seconds that the ledger has run. ``recorded_s``: the part of them that a crash would not lose. ``happened``: counts
    of what the transition does, for events: a kind with its words.
    """

    epoch: int
    step: int
    lineage: Lineage
    manifests: Mapping[Version, bytes]
    schedules: Mapping[Version, bytes]
    now_s: float
    recorded_s: float
    happened: Counter[tuple[str, ...]] = field(default_factory=Counter)

    @property
    def branch(self) -> int:
        return self.lineage.branch

    def newest_live(self, count: int) -> list[Version]:
        """The newest versions of the live lineage, oldest first."""
        live = [version for version in self.manifests if self.lineage.is_live(version)]
        return sorted(live, key=lambda version: (version.step, version.branch))[-count:]


_META = select(db.meta)


class PresentReader:
    """Reads the present. Versions and branches are read again only after ``forget``, which a transition calls before it
    changes them, and which follows every transaction that failed: this process alone writes them.
    """

    def __init__(self) -> None:
        self._known: tuple[Mapping[int, Fork], Mapping[Version, bytes], Mapping[Version, bytes]] | None = None

    def forget(self) -> None:
        self._known = None

    def read(self, conn: Connection, now_s: float) -> Present:
        row = conn.execute(_META).one()
        if self._known is None:
            forks = {r.branch: Fork(r.parent, r.step) for r in conn.execute(select(db.forks))}
            manifests = {Version(r.branch, r.step): bytes(r.manifest) for r in conn.execute(select(db.versions))}
            schedules = {Version(r.branch, r.step): bytes(r.name) for r in conn.execute(select(db.schedules))}
            self._known = forks, manifests, schedules
        forks_known, manifests_known, schedules_known = self._known
        lineage = Lineage(row.branch, forks_known)
        return Present(row.epoch, row.step, lineage, manifests_known, schedules_known, now_s, row.ran_s)


def admissible(now: Present, policy: Policy, served: Version) -> bool:
    """Whether a result of this version would be fresh enough and belong to the live lineage."""
    return now.lineage.is_live(served) and served.step >= now.step - policy.bounds.staleness


live_batch_groups = (
    select(db.batch_members.c.group_id)
    .join(db.batches, db.batches.c.id == db.batch_members.c.batch_id)
    .where(db.batches.c.state != "reopened")
)
"""Groups in a batch that the learner was given, and may have trained."""


def finished(now: Present, bounds: StalenessBounds) -> bool:
    return bounds.last_step is not None and now.step >= bounds.last_step


_APPLIED_GROUPS = (
    select(db.batch_members.c.group_id)
    .join(db.batches, db.batches.c.id == db.batch_members.c.batch_id)
    .where(db.batches.c.state == "applied")
)
_AHEAD = (
    select(func.count())
    .select_from(db.groups)
    .where(db.groups.c.state.in_(LIVE_GROUPS), db.groups.c.purpose == "train", db.groups.c.id.not_in(_APPLIED_GROUPS))
)


def ahead(conn: Connection) -> int:
    """Return the number of opened groups that are neither dropped nor in a batch the learner has applied."""
    return int(conn.scalar(_AHEAD) or 0)


def acknowledged_step(conn: Connection, now: Present) -> int:
    """Return the step up to which acknowledged checkpoints contain all batches."""
    batches = db.batches.c
    first = conn.scalar(select(func.min(batches.step)).where(batches.state.in_(("cut", "applied"))))
    return now.step if first is None else int(first)


def caller_of(worker: Any) -> str:
    """The party that answers for a worker, from a row with its caller and id. Holders of a bearer token cannot be told
    apart, so each of their workers counts for itself.
    """
    worker_id = bytes(getattr(worker, "worker_id", None) or worker.id)
    return worker_id.hex() if worker.caller == BEARER else str(worker.caller)


def callers_seen(conn: Connection, now: Present, task_hash: bytes) -> set[str]:
    """Return the callers with a worker that may play the task and has not been silent lately."""
    rows = conn.execute(
        select(db.workers.c.id, db.workers.c.caller).where(
            db.workers.c.task_hash == task_hash,
            db.workers.c.seen_s > now.now_s - SEEN_S,
            db.workers.c.blamed < MAX_BLAMED,
        )
    )
    return {caller_of(row) for row in rows}


def move(conn: Connection, kind: str, table: Table, row_id: bytes, new: str, **values: Any) -> None:
    """Change the state of a row. Raises IntegrityError unless the kind's table has the change."""
    if _changed(conn, kind, table, [row_id], new, values) != 1:
        old = conn.scalar(select(table.c.state).where(table.c.id == row_id))
        raise IntegrityError(f"the ledger may not change a {kind} from {old} to {new}")


def in_parts(ids: Collection[T]) -> Iterator[list[T]]:
    """Split the ids into lists that fit into one statement."""
    found = list(ids)
    return (found[first : first + MAX_LISTED] for first in range(0, len(found), MAX_LISTED))


def move_all(conn: Connection, kind: str, table: Table, row_ids: Collection[bytes], new: str, **values: Any) -> None:
    """Change the state of several rows at once. Raises IntegrityError unless the kind's table has every change."""
    for part in in_parts(row_ids):
        if _changed(conn, kind, table, part, new, values) != len(part):
            raise IntegrityError(f"the ledger may not change one of {len(part)} rows of kind {kind} to {new}")


def _changed(
    conn: Connection, kind: str, table: Table, row_ids: Sequence[bytes], new: str, values: Mapping[str, Any]
) -> int:
    """Change the state of rows and return how many changed."""
    bound = {"ids": row_ids} | {f"new_{name}": value for name, value in values.items()}
    return conn.execute(_change(kind, table, new, tuple(values)), bound).rowcount


@functools.cache
def _change(kind: str, table: Table, new: str, names: tuple[str, ...]) -> Update:
    rows = table.c.id.in_(bindparam("ids", expanding=True)) & table.c.state.in_(sources(kind, new))
    return update(table).where(rows).values(state=new, **{name: bindparam(f"new_{name}") for name in names})


def check_epoch(now: Present, epoch: int) -> None:
    """Raises RefusedError if another learner has replaced this one."""
    if epoch != now.epoch:
        raise RefusedError(f"epoch {epoch} is not the present epoch {now.epoch}: another learner has resumed")
