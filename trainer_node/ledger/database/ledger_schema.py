"""Tables of the ledger, in SQLAlchemy Core, alike on SQLite and PostgreSQL.

Times are seconds that the ledger has run (``LedgerClock``). Ids are 16 bytes. Bodies of results lie in segment files
(``body_segments``): a row of ``results`` points to its body. The database itself refuses a second accepted result of a
job, and a second live batch of a step.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

SCHEMA = 10
"""Version of the tables. A ledger refuses the tables of another version."""

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("schema", Integer, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("branch", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("added", BigInteger, nullable=False),
    Column("opened", BigInteger, nullable=False),
    Column("ran_s", Float, nullable=False),
    Column("task_hash", LargeBinary),
)
"""One row. ``step``: t, the steps applied on the live lineage. ``added``, ``opened``: groups counted so far. ``ran_s``:
seconds that the ledger has run, at most ``RECORD_S`` old. ``task_hash``: of the ledger's task.
"""

prompt_sources = Table(
    "prompt_sources",
    metadata,
    Column("task_hash", LargeBinary, primary_key=True),
    Column("seed", BigInteger, primary_key=True, autoincrement=False),
    Column("cursor", BigInteger, nullable=False),
    Column("ended", Boolean, nullable=False),
)
"""``cursor``: the task's prompts for the seed that were passed on, over all epochs of a data set. ``ended``: there were
no more of them at the last look.
"""

hook_state = Table(
    "hook_state",
    metadata,
    Column("task_hash", LargeBinary, primary_key=True),
    Column("seed", BigInteger, primary_key=True, autoincrement=False),
    Column("hooks", String(256), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("value", Text, nullable=False),
)
"""``hooks``: as on the command line. ``value``: JSON."""

prompt_history = Table(
    "prompt_history",
    metadata,
    Column("task_hash", LargeBinary, primary_key=True),
    Column("prompt", LargeBinary, primary_key=True),
    Column("means", Text, nullable=False),
    Column("added", BigInteger, nullable=False, index=True),
)
"""``prompt``: BLAKE3 hash. ``means``: JSON, mean rewards of the newest groups of the prompt. ``added``: number of the
newest group.
"""

forks = Table(
    "forks",
    metadata,
    Column("branch", BigInteger, primary_key=True, autoincrement=False),
    Column("parent", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
)

versions = Table(
    "versions",
    metadata,
    Column("branch", BigInteger, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("manifest", LargeBinary, nullable=False),
    Column("known_s", Float, nullable=False),
)

schedules = Table(
    "schedules",
    metadata,
    Column("branch", BigInteger, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("name", LargeBinary, nullable=False),
)
"""Of the versions that carry a schedule of sparse attention; ``name``: BLAKE3 of its file. A table of its own: a
database of version 10 of the tables may lack it, and gets it when a ledger opens it.
"""

workers = Table(
    "workers",
    metadata,
    Column("id", LargeBinary, primary_key=True),
    Column("caller", String(256), nullable=False),
    Column("name", String(128), nullable=False),
    Column("session", LargeBinary, nullable=False, unique=True),
    Column("price_usd_h", Float, nullable=False),
    Column("slots", Integer, nullable=False),
    Column("task", String(128), nullable=False),
    Column("task_hash", LargeBinary, nullable=False),
    Column("device_class", String(256), nullable=False),
    Column("served_branch", BigInteger),
    Column("served_step", BigInteger),
    Column("seen_s", Float, nullable=False),
    Column("blamed", Integer, nullable=False),
    Column("unknown_versions", Integer, nullable=False),
    Column("accepted_tokens", BigInteger, nullable=False),
    Column("audits", Integer, nullable=False),
    Column("disagreements", Integer, nullable=False),
    Column("replays", Integer, nullable=False),
    Column("false_rewards", Integer, nullable=False),
    Column("failed_replays", Integer, nullable=False),
    UniqueConstraint("caller", "name"),
)
"""``audits``, ``disagreements``: of log-probabilities. ``replays``: of trusted rewards, that agreed. ``false_rewards``:
replays that disagreed.
"""

groups = Table(
    "groups",
    metadata,
    Column("id", LargeBinary, primary_key=True),
    Column("added", BigInteger, nullable=False, unique=True),
    Column("added_step", BigInteger, nullable=False),
    Column("opened", BigInteger, unique=True),
    Column("state", String(16), nullable=False),
    Column("reason", String(32)),
    Column("purpose", String(16), nullable=False),
    Column("task_hash", LargeBinary, nullable=False),
    Column("size", Integer, nullable=False),
    Column("pinned_branch", BigInteger),
    Column("pinned_step", BigInteger),
    Column("stale_endings", Integer, nullable=False),
    Column("longest", BigInteger),
    Column("ended_epoch", BigInteger),
    Column("ended_step", BigInteger),
    Column("history_of", LargeBinary),
    Column("body", LargeBinary, nullable=False),
    Index("groups_by_state", "state", "purpose", "added"),
    Index(
        "groups_for_history",
        "added",
        sqlite_where=text("history_of IS NOT NULL"),
        postgresql_where=text("history_of IS NOT NULL"),
    ),
)
"""``body``: the record of the group. ``history_of``: hash of the prompt whose history will have the group's rewards;
null afterwards. ``added_step``: of the learner, when the group was added. ``ended_epoch``,
``ended_step``: of the learner, when the group was dropped, or ended its evaluation. ``longest``: of a group that was
dropped or shortened, the most tokens that any of its samples had.
"""

jobs = Table(
    "jobs",
    metadata,
    Column("id", LargeBinary, primary_key=True),
    Column("group_id", LargeBinary, ForeignKey("groups.id"), nullable=False),
    Column("position", Integer, nullable=False),
    Column("opened", BigInteger, nullable=False),
    Column("purpose", String(16), nullable=False),
    Column("task_hash", LargeBinary, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", String(32)),
    Column("failures", Integer, nullable=False),
    Column("failed_by", String(256)),
    Column("failed_s", Float),
    UniqueConstraint("group_id", "position"),
    Index("jobs_by_state", "state"),
    Index(
        "open_jobs",
        "opened",
        "position",
        sqlite_where=text("state = 'open'"),
        postgresql_where=text("state = 'open'"),
    ),
)
"""``opened``, ``purpose``, ``task_hash``: those of the group. The next jobs are then found in one table: before its
first statistics PostgreSQL joins two of them group by group, with all open jobs for each. ``failures``: results that
were rejected. ``failed_by``, ``failed_s``: the caller that last failed the job, or kept it too long, and when.
"""

leases = Table(
    "leases",
    metadata,
    Column("id", LargeBinary, primary_key=True),
    Column("job_id", LargeBinary, ForeignKey("jobs.id"), nullable=False),
    Column("worker_id", LargeBinary, ForeignKey("workers.id"), nullable=False),
    Column("state", String(16), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("branch", BigInteger, nullable=False),
    Column("served", BigInteger, nullable=False),
    Column("oldest", BigInteger, nullable=False),
    Column("began_s", Float, nullable=False),
    Column("lasts_s", Float, nullable=False),
    Column("expires_s", Float, nullable=False),
    Column("latest_s", Float, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Index("leases_by_state", "state", "expires_s"),
    Index("leases_by_worker", "worker_id", "state"),
    Index("leases_by_step", "epoch", "step", "worker_id"),
    Index("leases_by_job", "job_id"),
    Index(
        "one_held_lease",
        "job_id",
        unique=True,
        sqlite_where=text("state = 'held'"),
        postgresql_where=text("state = 'held'"),
    ),
)
"""``step``: of the learner, when the lease began. ``branch``, ``served``: the version that the engine served then.
``oldest``: step of the oldest version that the job's record allows.
"""

job_returns = Table(
    "job_returns",
    metadata,
    Column("job_id", LargeBinary, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("lease_id", LargeBinary, primary_key=True),
    Column("caller", String(256), nullable=False),
)
"""Leases that came back for the job's own fault. ``caller``: of the worker. A table of its own, like ``schedules``: a
database of version 10 of the tables may lack it. Its rows go with their jobs, also where an older release deletes them.
"""

group_sources = Table(
    "group_sources",
    metadata,
    Column("group_id", LargeBinary, ForeignKey("groups.id", ondelete="CASCADE"), primary_key=True),
    Column("source", String(256), nullable=False),
)
"""``source``: of a group that was made of a task's prompt, the prompt's number, seed and row, for messages. As
``job_returns``, a database may lack it.
"""

results = Table(
    "results",
    metadata,
    Column("job_id", LargeBinary, ForeignKey("jobs.id"), primary_key=True),
    Column("lease_id", LargeBinary, ForeignKey("leases.id"), primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("verdict", String(16), nullable=False),
    Column("reason", String(32)),
    Column("detail", Text),
    Column("reward", Float),
    Column("replay", String(16)),
    Column("sampled", BigInteger, nullable=False),
    Column("settled_step", BigInteger, nullable=False),
    Column("oldest_step", BigInteger),
    Column("versions", Text),
    Column("segment", BigInteger),
    Column("offset", BigInteger),
    Column("length", BigInteger),
    Index(
        "one_accepted",
        "job_id",
        unique=True,
        sqlite_where=text("verdict = 'accepted'"),
        postgresql_where=text("verdict = 'accepted'"),
    ),
    Index("results_by_segment", "segment"),
    Index("results_by_lease", "lease_id"),
    Index(
        "accepted_tokens",
        "sampled",
        sqlite_where=text("verdict = 'accepted'"),
        postgresql_where=text("verdict = 'accepted'"),
    ),
    Index(
        "rejected_reasons",
        "reason",
        sqlite_where=text("verdict = 'rejected'"),
        postgresql_where=text("verdict = 'rejected'"),
    ),
    Index(
        "replayed_rewards",
        "replay",
        sqlite_where=text("replay IS NOT NULL"),
        postgresql_where=text("replay IS NOT NULL"),
    ),
)
"""``replay``: of a trusted reward: due, agrees, disagrees, fails; null for a result that is not replayed.
Deleting a lease costs a look at all results without ``results_by_lease``. ``accepted_tokens`` and
``rejected_reasons`` are for counts; they are partial, so that no other statement begins with them. ``settled_step``: of
the learner, when the result was judged, or the step to which the learner has gone back since. ``versions``: of all
spans, as texts separated by spaces.
"""

cut_off_results = Table(
    "cut_off_results",
    metadata,
    Column("job_id", LargeBinary, primary_key=True),
    Column("lease_id", LargeBinary, primary_key=True),
    ForeignKeyConstraint(["job_id", "lease_id"], ["results.job_id", "results.lease_id"], ondelete="CASCADE"),
)
"""The accepted results that ended at their limit of tokens. As ``job_returns``, a database may lack the table: its
earlier results count as whole. Rows go with their results, also where an older release deletes these.
"""

batches = Table(
    "batches",
    metadata,
    Column("id", LargeBinary, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("branch", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("oldest_step", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("checkpoint", LargeBinary),
    Index(
        "one_live_batch",
        "step",
        unique=True,
        sqlite_where=text("state <> 'reopened'"),
        postgresql_where=text("state <> 'reopened'"),
    ),
)
"""``step``: of the learner, when the batch was cut. ``oldest_step``: results of older steps are not in the batch."""

batch_members = Table(
    "batch_members",
    metadata,
    Column("batch_id", LargeBinary, ForeignKey("batches.id"), primary_key=True),
    Column("ordinal", Integer, primary_key=True),
    Column("group_id", LargeBinary, ForeignKey("groups.id"), nullable=False),
    Index("members_by_group", "group_id"),
)
