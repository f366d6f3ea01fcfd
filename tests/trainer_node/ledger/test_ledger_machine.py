"""The ledger under any order of calls: a state machine of workers and learner, against a model that is kept by hand."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pcast.ground.errors import RefusedError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.worker_api import Leased, Registration
from p2pcast.rollouts.job import Group, Job
from p2pcast.rollouts.overlong import TREATMENTS, Overlong, paid
from p2pcast.rollouts.result import Result, Span
from tests.trainer_node.ledger.crash_run import TASK_HASH, group, manifest
from tests.trainer_node.ledger.ledger_invariants import Rows, check_counts, check_rows, dump
from trainer_node.ledger.batch_cut import OVERSAMPLE
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.lease_time import RECORD_S
from trainer_node.ledger.ledger import Ledger
from trainer_node.ledger.ledger_rows import MAX_BLAMED, Policy
from trainer_node.ledger.staleness_rule import StalenessBounds

LAST_STEP = 5
SLOTS = 16
FAULTS = {"good": None, "task": "forged", "manifest": "forged", "nan": "malformed", "vocabulary": "malformed"}
KINDS = st.sampled_from([*FAULTS, *["good"] * 8])
INDEX = st.integers(0, 1 << 16)


def last_token(job: Job, result: Result) -> float:
    return float(result.token_ids[-1])


def made(leased: Leased, version: Version, reward: int, kind: str) -> Result:
    result = Result(
        job=leased.job.job,
        lease=leased.lease,
        task_hash=bytes(32) if kind == "task" else leased.job.task_hash,
        token_ids=np.array([1, 99 if kind == "vocabulary" else 2, reward], "<u4"),
        mask=np.array([0, 1, 1], "u1"),
        logprobs=np.array([0, -1, np.nan if kind == "nan" else -1], "<f4"),
        spans=[Span(version, 1, 3, bytes(32) if kind == "manifest" else manifest(version), "keep")],
        temperature=leased.job.temperature,
        reward=0.0,
        stop="end" if leased.lease[0] % 4 else "length",
    )
    return Result.from_bytes(result.to_bytes())


class LedgerMachine(RuleBasedStateMachine):
    """``live``: published versions that the learner's weights descend from. ``history``: the batches that made these
    weights, one a step. ``checkpoints``: (step, history), oldest first.
    """

    @initialize(staleness=st.sampled_from([0, 1, 3]), strict=st.booleans(), overlong=st.sampled_from(TREATMENTS))
    def begin(self, staleness: int, strict: bool, overlong: Overlong) -> None:
        self.overlong = overlong
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="p2pcast-ledger-", dir=memory))
        rule = "strict" if strict else "bounded"
        self.task_hash = TASK_HASH
        self.policy = Policy(StalenessBounds(staleness, 2, LAST_STEP), rule, 10, guess_s=30.0, task_hash=TASK_HASH)  # type: ignore[arg-type]
        self.source_s, self.draw = 1e6, random.Random(0)
        self.epoch, self.branch, self.step = -1, 0, 0
        self.versions: list[Version] = []
        self.live: set[Version] = set()
        self.history: list[bytes] = []
        self.checkpoints: list[tuple[int, list[bytes]]] = [(0, [])]
        self.batch: bytes | None = None
        self.members: dict[bytes, set[bytes]] = {}
        self.sessions: list[bytes] = []
        self.leases: dict[bytes, tuple[bytes, Leased, Version]] = {}
        """Session, lease and the version that was served, by the lease's id."""
        self.sent: dict[bytes, tuple[Result, str, str | None]] = {}
        """Result, verdict and reason, by the lease's id."""
        self.tokens: dict[bytes, int] = {}
        self.added = 0
        self.open()
        self.resume(0, fork=False)
        self.publish()
        for _ in range(4):
            self.add_groups()
        for _ in range(2):
            self.register()

    def open(self) -> None:
        self.store = LedgerStore(self.folder, segment_bytes=2048)
        ids = lambda: self.draw.randbytes(16)  # noqa: E731
        self.ledger = Ledger(self.store, self.policy, now=lambda: self.source_s, new_id=ids)

    # -- time and processes

    @rule(seconds=st.sampled_from([1, 10, 40, 400, -3600, -86400, 7200]))
    def pass_time(self, seconds: int) -> None:
        before = dump(self.store)
        self.source_s += seconds
        ended = self.ledger.expire()
        after = dump(self.store)
        ran_s = before["meta"][0].ran_s + max(0, seconds)
        assert before["meta"][0].ran_s <= after["meta"][0].ran_s <= ran_s + RECORD_S
        held = {row.id for row in after["leases"] if row.state == "held"}
        over = [row for row in before["leases"] if row.state == "held" and row.id not in held]
        assert len(over) == ended
        assert all(row.expires_s < ran_s + RECORD_S for row in over), "a clock that jumps back ends no lease"
        assert all(row.expires_s >= after["meta"][0].ran_s for row in after["leases"] if row.id in held)

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.source_s = self.draw.uniform(0, 1e9)
        self.open()
        assert self.ledger.expire() == 0, "the time between two processes counts for no lease"

    @rule(again=st.booleans())
    def change_task(self, again: bool) -> None:
        """The ledger starts with another task: groups that no batch has are dropped, and give their credit back."""
        in_batch = {bytes(row.group_id) for row in self._live_members(dump(self.store))}
        self.task_hash = TASK_HASH if again else bytes([65 + self.draw.randrange(26)]) * 32
        self.policy = dataclasses.replace(self.policy, task_hash=self.task_hash)
        self.restart()
        for row in dump(self.store)["groups"]:
            if bytes(row.task_hash) != self.task_hash and bytes(row.id) not in in_batch:
                assert row.state in ("dropped", "trained")
        foreign = dataclasses.replace(group(1 << 40), task_hash=b"?" * 32)
        with pytest.raises(RefusedError, match="of task"):
            self.ledger.add_groups([foreign])
        assert self.ledger.prompts(0).waiting == sum(
            row.state == "waiting" and row.purpose == "train" and bytes(row.task_hash) == self.task_hash
            for row in dump(self.store)["groups"]
        )
        self.sessions.clear()
        for _ in range(2):
            self.register()

    @staticmethod
    def _live_members(rows: Rows) -> list[Any]:
        live = {row.id for row in rows["batches"] if row.state != "reopened"}
        return [row for row in rows["batch_members"] if row.batch_id in live]

    @rule()
    def prune(self) -> None:
        before = {bytes(row.session): row.seen_s for row in dump(self.store)["workers"]}
        self.ledger.prune()
        rows = dump(self.store)
        kept = {bytes(row.session) for row in rows["workers"]}
        for session in before.keys() - kept:
            assert before[session] < rows["meta"][0].ran_s - 3600
        self.sessions = [session for session in self.sessions if session in kept]

    # -- workers

    @precondition(lambda self: len(self.sessions) < 4)
    @rule()
    def register(self) -> None:
        one = Registration(f"w{self.draw.random()}", SLOTS, "sums", self.task_hash)
        self.sessions.append(self.ledger.register(one.name, one).session)

    @precondition(lambda self: self.sessions)
    @rule(who=INDEX, slots=st.integers(1, 6), newest=st.booleans(), which=INDEX, staged=st.booleans())
    def lease(self, who: int, slots: int, newest: bool, which: int, staged: bool) -> None:
        served = max(self.live) if newest else self.versions[which % len(self.versions)]
        self._lease(self.sessions[who % len(self.sessions)], slots, served, max(self.live) if staged else None)

    def _lease(self, session: bytes, slots: int, served: Version, staged: Version | None) -> None:
        before = self.ledger.status()["ahead"]
        try:
            leases = self.ledger.grant(session, slots, served, manifest(served), staged).leases
        except RefusedError:
            assert self._blamed(session) >= MAX_BLAMED
            self.sessions.remove(session)
            return
        assert len(leases) <= slots
        opened = self.ledger.status()["ahead"]
        if opened > before:
            assert served in self.live
            bounds = self.policy.bounds
            assert opened <= (served.step + bounds.staleness + 1 - self.step) * bounds.batch_groups
            assert opened <= (LAST_STEP - self.step) * bounds.batch_groups
        for one in leases:
            if one.job.purpose == "train":
                assert served in self.live
                assert self.step - served.step <= self.policy.bounds.staleness
                assert self.step < LAST_STEP
            else:
                assert one.job.pinned == served
            self.leases[one.lease] = session, one, served

    def _blamed(self, session: bytes) -> int:
        return next(row.blamed for row in dump(self.store)["workers"] if bytes(row.session) == session)

    @precondition(lambda self: self.leases and self.sessions)
    @rule(who=INDEX, grown=st.lists(INDEX, max_size=4))
    def heartbeat(self, who: int, grown: list[int]) -> None:
        session = self.sessions[who % len(self.sessions)]
        names = sorted(self.leases)[-32:]
        for index in grown:
            self.tokens[names[index % len(names)]] = self.tokens.get(names[index % len(names)], 0) + 1
        states = self.ledger.heartbeat(session, {name: self.tokens.get(name, 0) for name in names})
        held = {bytes(row.id): row for row in dump(self.store)["leases"] if row.state == "held"}
        for one in states:
            mine = one.lease in held and self.leases[one.lease][0] == session
            assert (one.state == "held") == mine
            if mine:
                assert 0 <= one.expires_in_s <= held[one.lease].latest_s - held[one.lease].began_s
                version, purpose = self.leases[one.lease][2], self.leases[one.lease][1].job.purpose
                fresh = version in self.live and self.step - version.step <= self.policy.bounds.staleness
                assert purpose == "evaluate" or (fresh and self.step < LAST_STEP)

    @precondition(lambda self: self.leases and self.sessions)
    @rule(who=INDEX, which=st.lists(INDEX, min_size=1, max_size=4))
    def give_back(self, who: int, which: list[int]) -> None:
        names = sorted(self.leases)
        self.ledger.give_back(self.sessions[who % len(self.sessions)], [names[i % len(names)] for i in which])

    @precondition(lambda self: self.leases.keys() - self.sent.keys())
    @rule(
        which=st.lists(st.tuples(INDEX, KINDS, st.booleans()), min_size=1, max_size=9),
        reward=st.sampled_from([(0, 1), (0, 1), (1, 1)]),
        other=INDEX,
    )
    def hand_in(self, which: list[tuple[int, str, bool]], reward: tuple[int, int], other: int) -> None:
        """Results of the newest leases of one worker; some are faulty, some of another version than was leased."""
        names = [name for name in self.leases if name not in self.sent][-12:]
        session = self.leases[names[which[0][0] % len(names)]][0]
        chosen: dict[bytes, tuple[Result, str]] = {}
        for number, (index, kind, same) in enumerate(which):
            owner, leased, served = self.leases[names[index % len(names)]]
            version = served if same else self.versions[other % len(self.versions)]
            if owner == session:
                chosen[leased.lease] = made(leased, version, reward[number % 2], kind), kind
        self._send(session, chosen)

    def _send(self, session: bytes, chosen: dict[bytes, tuple[Result, str]]) -> None:
        if not chosen or session not in self.sessions:
            return
        rows = dump(self.store)
        wanted = {name: self._expected(rows, result, kind) for name, (result, kind) in chosen.items()}
        done: set[bytes] = set()
        for settled in self.ledger.results(session, [result for result, _ in chosen.values()], last_token):
            reason = wanted[settled.lease]
            if reason is None and settled.job in done:
                reason = "duplicate"
            assert settled.reason == reason
            assert settled.verdict == ("rejected" if reason else "accepted")
            done |= {settled.job} if reason is None else set()
            if reason != "unknown lease":
                self.sent[settled.lease] = chosen[settled.lease][0], settled.verdict, settled.reason

    def _expected(self, rows: Rows, result: Result, kind: str) -> str | None:
        """Why the result has to be rejected, by the rules of rl.md, section 3; None if it has to be accepted."""
        lease = next((row for row in rows["leases"] if bytes(row.id) == result.lease), None)
        if lease is None:
            return "unknown lease"
        served = self.leases[result.lease][2]
        version = result.spans[0].version
        back = version.branch == served.branch and version.step < served.step
        if FAULTS[kind] is not None:
            return FAULTS[kind]
        job = next(row for row in rows["jobs"] if bytes(row.id) == result.job)
        its_group = next(row for row in rows["groups"] if row.id == job.group_id)
        if job.state not in ("open", "leased") or its_group.state != "open":
            return "duplicate"
        if version not in {Version(row.branch, row.step) for row in rows["versions"]}:
            return "unknown version"
        evaluation = its_group.purpose == "evaluate"
        if (evaluation or self.policy.rule == "strict") and version != served:
            return "stale"
        if self.policy.rule == "strict" and lease.state != "held":
            return "late"
        if evaluation:
            return None
        if version not in self.live:
            return "dead version"
        return "stale" if back or self.step - version.step > self.policy.bounds.staleness else None

    @precondition(lambda self: self.sessions)
    @rule(who=INDEX, keep=st.integers(0, 2), equal=st.sampled_from([False, False, False, True]))
    def play(self, who: int, keep: int, equal: bool) -> None:
        """Lease with the newest version, and hand in all but some."""
        known = set(self.leases)
        self._lease(self.sessions[who % len(self.sessions)], 8, max(self.live), None)
        chosen: dict[bytes, tuple[Result, str]] = {}
        for name in sorted(self.leases.keys() - known)[keep:]:
            _, leased, served = self.leases[name]
            chosen[name] = made(leased, served, 1 if equal else leased.job.index % 2, "good"), "good"
        for name in chosen:
            self._send(self.leases[name][0], {name: chosen[name]})

    @precondition(lambda self: self.sessions)
    @rule(who=INDEX, keep=st.integers(0, 2), publish=st.sampled_from([True, True, False]))
    def learn(self, who: int, keep: int, publish: bool) -> None:
        """Play until there is a batch, and apply it."""
        for _ in range(4):
            self.add_groups()
            if self.sessions:
                self.play(who, keep, False)
            self.take()
            if self.batch is not None:
                self.apply(repeated=False)
                break
        if publish:
            self.publish()

    @precondition(lambda self: self.sessions)
    @rule(who=INDEX, checkpoint=st.booleans())
    def learn_two_steps(self, who: int, checkpoint: bool) -> None:
        self.learn(who, 1, True)
        if checkpoint:
            self.checkpoint(True)
        if self.sessions:
            self.learn(who, 0, True)

    @precondition(lambda self: self.sent)
    @rule(which=INDEX, changed=st.booleans())
    def resend(self, which: int, changed: bool) -> None:
        result, verdict, reason = self.sent[sorted(self.sent)[which % len(self.sent)]]
        session = self.leases[result.lease][0]
        known = any(bytes(row.lease_id) == result.lease for row in dump(self.store)["results"])
        if session not in self.sessions or not known:
            return
        if changed:
            with pytest.raises(RefusedError):
                self.ledger.results(session, [dataclasses.replace(result, reward=0.5)], last_token)
            return
        settled = self.ledger.results(session, [result], last_token)[0]
        if verdict == "accepted" and settled.reason == "dead version":
            assert result.spans[0].version not in self.live
        else:
            assert (settled.verdict, settled.reason) == (verdict, reason)

    # -- trainer

    @rule()
    def add_groups(self) -> None:
        self.added += 3
        groups = [self._group(self.added - n) for n in range(3)]
        assert self.ledger.add_groups(groups) == 3
        assert self.ledger.add_groups(groups) == 0

    @rule(which=INDEX, count=st.integers(1, 2))
    def evaluate(self, which: int, count: int) -> None:
        self.added += 1
        pinned = self.versions[which % len(self.versions)]
        one = dataclasses.replace(
            self._group(self.added), purpose="evaluate", pinned=pinned, size=count, temperature=0.0
        )
        assert self.ledger.add_groups([one]) == 1

    def _group(self, number: int) -> Group:
        return dataclasses.replace(group(number), task_hash=self.task_hash)

    @rule()
    def publish(self) -> None:
        version = Version(self.branch, self.step)
        self.ledger.publish(version, manifest(version))
        if version not in self.versions:
            self.versions.append(version)
        self.live.add(version)

    @rule()
    def take(self) -> None:
        with pytest.raises(RefusedError):
            self.ledger.take(self.epoch - 1, self.branch, self.step)
        try:
            taken = self.ledger.take(self.epoch, self.branch, self.step, self.overlong)
        except RefusedError as error:
            if "can be trained" not in str(error):
                raise
            most = OVERSAMPLE * self.policy.bounds.batch_groups
            now = (self.epoch, self.step)
            assert sum((r.ended_epoch, r.ended_step) == now for r in dump(self.store)["groups"]) >= most
            assert self.batch is None
            return
        assert taken.finished == (self.step >= LAST_STEP)
        if taken.batch is None:
            assert self.batch is None
            return
        assert self.batch in (None, taken.batch.id), "a batch that was taken stays the same"
        self.batch = taken.batch.id
        self.members[self.batch] = {Group.from_bytes(member.group).id for member in taken.batch.members}
        assert 1 <= len(taken.batch.members) <= self.policy.bounds.batch_groups
        for earlier in self.history:
            assert not self.members[self.batch] & self.members[earlier], "trained twice in a lineage"
        for member in taken.batch.members:
            assert len(member.results) >= 2
            results = [Result.from_bytes(self.ledger.body(one.place)) for one in member.results]
            rewards, cut_off = [one.reward for one in member.results], [one.stop == "length" for one in results]
            assert len(set(paid(rewards, cut_off, self.overlong))) > 1
            for one, reward in zip(results, rewards, strict=True):
                self._check_trained(one, reward)

    def _check_trained(self, result: Result, reward: float) -> None:
        assert reward == float(result.token_ids[-1])
        for span in result.spans:
            assert span.version in self.live
            assert self.step - span.version.step <= self.policy.bounds.staleness

    @precondition(lambda self: self.batch is not None)
    @rule(repeated=st.booleans())
    def apply(self, repeated: bool) -> None:
        assert self.batch is not None
        for _ in range(1 + repeated):
            self.ledger.applied(self.epoch, self.batch, self.step + 1)
        self.history.append(self.batch)
        self.step, self.batch = self.step + 1, None

    @rule(acked=st.booleans())
    def checkpoint(self, acked: bool) -> None:
        self.checkpoints.append((self.step, list(self.history)))
        if acked:
            self.ledger.ack(self.epoch, self.step, self.history, b"c" * 32)

    @rule(back=st.integers(0, 2))
    def crash_of_the_learner(self, back: int) -> None:
        self.resume(back, fork=True)

    def resume(self, back: int, *, fork: bool) -> None:
        del self.checkpoints[max(1, len(self.checkpoints) - back) :]
        self.step, history = self.checkpoints[-1]
        self.history, self.batch = list(history), None
        if any(version.branch == self.branch and version.step > self.step for version in self.versions):
            self.branch = 1 + max(version.branch for version in self.versions)
        elif fork and self.draw.random() < 0.3:
            self.branch = 1 + max(self.branch, *(version.branch for version in self.versions))
        self.live = {version for version in self.live if version.step <= self.step}
        epoch = self.ledger.resume(self.branch, self.step, b"c" * 32, self.history)
        assert epoch > self.epoch
        self.epoch = epoch
        if fork:
            self.publish()
        rows = dump(self.store)
        held = {bytes(row.id) for row in rows["leases"] if row.state == "held"}
        for name in held & self.leases.keys():
            _, leased, served = self.leases[name]
            assert leased.job.purpose == "evaluate" or served in self.live, "a lease of a dead version is held"

    # -- checks

    @invariant()
    def rows_hold(self) -> None:
        if hasattr(self, "store"):
            rows = dump(self.store)
            check_rows(rows)
            check_counts(rows, self.ledger)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            self._finish()
        finally:
            self.ledger.close()
            shutil.rmtree(self.folder)

    def _finish(self) -> None:
        """No credit has leaked: with fresh workers and results the run ends."""
        fresh = self.ledger.register("fresh", Registration("fresh", 64, "sums", self.task_hash)).session
        for turn in range(200):
            self.publish()
            self.take()
            if self.step >= LAST_STEP:
                break
            if self.batch is not None:
                self.apply(repeated=False)
                continue
            self.add_groups()
            served = Version(self.branch, self.step)
            leases = self.ledger.grant(fresh, 32, served, manifest(served)).leases
            done = [made(one, served, one.job.index % 2, "good") for one in leases]
            if done:
                self.ledger.results(fresh, done, last_token)
            # Results that came hours late have made the leases of lost workers long.
            self.source_s += 50_000
            assert turn < 199, f"the run stands still: {self.ledger.status()}"
        assert self.ledger.status()["finished"]
        assert self.ledger.take(self.epoch, self.branch, self.step).finished
        self.rows_hold()


def _machine(**changes: Any) -> Any:
    case: Any = type("Case", (LedgerMachine.TestCase,), {})
    case.settings = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True, **changes)
    return case


TestLedgerMachine = _machine(max_examples=8, stateful_step_count=40)
TestLedgerMachineAtLength = pytest.mark.prove(_machine(max_examples=100, stateful_step_count=60))
