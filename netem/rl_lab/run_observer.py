"""Observes an RL run from outside: by the ledger's rows, the learner's log, the daemons' events and the trunks."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from netem.emulation.description import HUB
from netem.rl_lab.phase_figures import PhaseRecord, RunSample
from netem.rl_lab.rl_system import RlSystem, worker_of

SAMPLE_S: Final = 1.0
BUSY_S: Final = 10.0
"""Wait for a database that is being written."""


class RunObserver:
    def __init__(self, system: RlSystem) -> None:
        self._system = system
        self._samples: list[RunSample] = []
        self._over = threading.Event()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Takes a sample each second for the length of the block."""
        thread = threading.Thread(target=self._sample, name="p2pcast-rl-sampler", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _sample(self) -> None:
        net = self._system.net
        regions = sorted(set(self._system.sites.values()) - {""})
        while True:
            with contextlib.suppress(sqlite3.OperationalError):  # before the tables are made
                trunks = {region: net.passed(region) for region in regions}
                self._samples.append(RunSample(time.time(), self._tokens(), trunks))
            if self._over.wait(SAMPLE_S):
                return

    # -- rows of the ledger

    @contextmanager
    def _rows(self) -> Iterator[sqlite3.Connection]:
        path = f"file:{self._system.database}?mode=ro"
        with contextlib.closing(sqlite3.connect(path, uri=True, timeout=BUSY_S)) as rows:
            yield rows

    def _tokens(self) -> dict[str, int]:
        with self._rows() as rows:
            found = dict(rows.execute("select name, accepted_tokens from workers"))
        return {host: int(found.get(worker_of(host), 0)) for host in self._system.hosts}

    def held(self, hosts: set[str]) -> list[bytes]:
        """Jobs whose leases the workers at these hosts hold."""
        names = [worker_of(host) for host in hosts]
        query = (
            "select l.job_id from leases l join workers w on w.id = l.worker_id where l.state = 'held' and w.name in"
            f" ({', '.join('?' * len(names))})"
        )
        with self._rows() as rows:
            return [job for (job,) in rows.execute(query, names)]

    def unsettled(self, jobs: list[bytes]) -> int:
        """The number of these jobs without an end."""
        query = f"select count(*) from jobs where state in ('open', 'leased') and id in ({', '.join('?' * len(jobs))})"
        with self._rows() as rows:
            return int(rows.execute(query, jobs).fetchone()[0])

    def twice(self) -> int:
        """Groups that were trained twice."""
        query = (
            "select count(*) from (select m.group_id from batch_members m join batches b on b.id = m.batch_id where"
            " b.state <> 'reopened' group by m.group_id having count(*) > 1)"
        )
        with self._rows() as rows:
            return int(rows.execute(query).fetchone()[0])

    def endings(self) -> Counter[str]:
        """Results by verdict, those rejected by reason, and leases that expired."""
        found: Counter[str] = Counter()
        with self._rows() as rows:
            for verdict, reason, count in rows.execute("select verdict, reason, count(*) from results group by 1, 2"):
                found[reason or verdict] += count
            found["expired"] = rows.execute("select count(*) from leases where state = 'expired'").fetchone()[0]
        return found

    # -- the whole record

    def steps(self) -> list[dict[str, Any]]:
        """The learner's steps so far; none before it has a log."""
        try:
            lines = self._system.metrics.read_text().splitlines()
        except OSError:
            return []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if event["event"] == "step"]

    def record(self) -> PhaseRecord:
        system = self._system
        opened = {e.facts["version"]: e.time_s for e in system.run.events[HUB].reported if e.kind == "opened"}
        committed = {host: system.weights.installs(host) for host in system.hosts}
        return PhaseRecord(self.steps(), list(self._samples), opened, system.weights.sizes(), committed)
