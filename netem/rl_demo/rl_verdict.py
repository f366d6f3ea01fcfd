"""The RL demo's verdict: by the ledger's rows, the learner's log and plain folders, without code of the judged system.

Promise: a check passes only on what it read. A missing file, row or step is a failure.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from netem.demo.verdict import DemoCheck, tensors

MARGIN: Final = 0.034
"""Least rise of the reward from the first ten steps to the last ten (docs/notes/rl-demo.md)."""
COMPARED: Final = 10
"""Steps at either end whose rewards are compared."""
MOST_CHANGED: Final = 0.1
"""Largest share of the words that a step of the quiet phase may change."""
MOST_KL: Final = 0.05
"""Largest mean KL divergence of sampler and learner for rollouts of one version."""
SHOWN: Final = 3


@dataclass(slots=True)
class RunLines:
    """The surviving lineage by the learner's own log. ``steps``: step → event. ``epochs``: number of starts."""

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    epochs: int = 0
    started_at: int = 0
    """Step at which the learner last started."""
    superseded: int = 0
    """Steps of learners that died before they stored them."""

    @classmethod
    def read(cls, path: Path) -> RunLines:
        found = cls()
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "start":
                found.epochs += 1
                found.started_at = event["step"]
                lost = [step for step in found.steps if step > event["step"]]
                found.superseded += len(lost)
                for step in lost:
                    del found.steps[step]
            elif event["event"] == "step":
                found.steps[event["step"]] = event
        return found


def exported_steps(folder: Path) -> dict[int, Path]:
    """Step → the folder EPOCH-STEP of the last epoch that trained it."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("*-*")):
        epoch, _, step = path.name.partition("-")
        if epoch.isdigit() and step.isdigit():
            found[int(step)] = path  # sorted: later epochs come last
    return found


def check_reward(steps: Mapping[int, Mapping[str, Any]], last: int, margin: float = MARGIN) -> DemoCheck:
    """``last``: of the phase with the ordinary learning rate. Rewards count over all groups played."""
    name = f"reward of the last {COMPARED} batches is at least {margin:g} above the first {COMPARED}"
    wanted = [*range(1, COMPARED + 1), *range(last - COMPARED + 1, last + 1)]
    if missing := [step for step in wanted if step not in steps]:
        return DemoCheck(name, False, f"steps {missing} are not in the log")
    first, end = (np.mean([steps[step]["reward"] for step in part]) for part in (wanted[:COMPARED], wanted[COMPARED:]))
    return DemoCheck(name, bool(end - first >= margin), f"{first:.3f} → {end:.3f}")


def check_agreement(steps: Mapping[int, Mapping[str, Any]]) -> DemoCheck:
    """Sampler and learner score the same tokens alike."""
    values = [step["kl_same_version"] for step in steps.values() if step.get("kl_same_version") is not None]
    mean = float(np.mean(values)) if values else float("inf")
    detail = f"mean KL divergence {mean:.1e} over {len(values)} batches, at most {MOST_KL:g}"
    return DemoCheck("engine and learner agree on rollouts of one version", mean <= MOST_KL, detail)


def check_staleness(steps: Mapping[int, Mapping[str, Any]], database: Path, bound: int) -> DemoCheck:
    """By the learner's log and by the ledger's rows."""
    ages = [int(age) for step in steps.values() for age in step["staleness"]]
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as rows:
        found = rows.execute(
            "select max(b.step - r.oldest_step) from batches b join batch_members m on m.batch_id = b.id"
            " join jobs j on j.group_id = m.group_id join results r on r.job_id = j.id"
            " where b.state <> 'reopened' and r.verdict = 'accepted' and r.oldest_step >= b.oldest_step"
        ).fetchone()[0]
    ok = bool(ages) and max(ages) <= bound and found is not None and found <= bound
    detail = f"oldest rollout {max(ages, default='none')} steps old by the log, {found} by the rows; bound {bound}"
    return DemoCheck("no batch holds a rollout older than the bound", ok, detail)


def check_once(lines: RunLines, database: Path, last: int) -> DemoCheck:
    """Each step of the lineage trained one batch, no group or job was trained twice, and no job was lost."""
    faults = []
    if missing := [step for step in range(1, last + 1) if step not in lines.steps]:
        faults.append(f"steps {missing} are not in the log")
    logged = [lines.steps[step]["batch"] for step in sorted(lines.steps)]
    if len(set(logged)) < len(logged):
        faults.append("one batch was trained by two steps")
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as rows:
        batches = rows.execute("select hex(id), step, state from batches where state <> 'reopened'").fetchall()
        reopened = rows.execute("select count(*) from batches where state = 'reopened'").fetchone()[0]
        twice = rows.execute(
            "select count(*) from (select m.group_id from batch_members m join batches b on b.id = m.batch_id"
            " where b.state <> 'reopened' group by m.group_id having count(*) > 1)"
        ).fetchone()[0]
        counted = rows.execute(
            "select count(*) from (select job_id from results where verdict = 'accepted' group by job_id"
            " having count(*) > 1)"
        ).fetchone()[0]
        lost = rows.execute("select count(*) from jobs where state in ('open', 'leased')").fetchone()[0]
        held = rows.execute("select count(*) from leases where state = 'held'").fetchone()[0]
    for batch, step, state in batches:
        if lines.steps.get(step + 1, {}).get("batch") != batch.lower():
            faults.append(f"the ledger's batch of step {step} is not the learner's")
        if state != "trained":
            faults.append(f"the batch of step {step} is {state}")
    if not batches or max(step for _, step, _ in batches) != last - 1:
        faults.append("the last batch is not in the ledger")
    faults += [f"{count} {what}" for count, what in (
        (twice, "groups in two batches"), (counted, "jobs with two accepted results"), (lost, "jobs without an end"),
        (held, "leases that are still held"),
    ) if count]  # fmt: skip
    detail = f"{len(logged)} steps, {len(batches)} batches in the ledger, {reopened} reopened after the kill"
    return DemoCheck("no job is lost, and none is trained twice", not faults, "; ".join([detail, *faults[:SHOWN]]))


def check_sparse(exported: Mapping[int, Path], first: int, last: int) -> DemoCheck:
    """Words that differ from one step to the next, in the steps after ``first``."""
    name = f"at a tiny learning rate a step changes at most {MOST_CHANGED:.0%} of the words"
    if missing := [step for step in range(first, last + 1) if step not in exported]:
        return DemoCheck(name, False, f"steps {missing} were not exported")
    if first >= last:
        return DemoCheck(name, False, f"no step was trained after step {first}")
    shares = [changed_share(exported[step - 1], exported[step]) for step in range(first + 1, last + 1)]
    return DemoCheck(name, max(shares) <= MOST_CHANGED, f"{min(shares):.2%} to {max(shares):.2%}")


def changed_share(before: Path, after: Path) -> float:
    """Share of 16-bit words that differ between two folders."""
    old, new = tensors(before), tensors(after)
    words = differ = 0
    for name, (_, _, data) in new.items():
        a, b = (np.frombuffer(one, "<u2") for one in (old[name][2], data))
        words, differ = words + len(b), differ + int(np.count_nonzero(a != b))
    return differ / max(1, words)


def check_requests(engine_log: Path, worker_logs: Sequence[Path]) -> DemoCheck:
    """By the engine's log of requests, and the workers' logs. Workers that were killed leave no failed request."""
    answers = re.findall(r'"POST (/inference/\S+) HTTP/1.1" ([1-9]\d\d)', engine_log.read_text(errors="replace"))
    good = sum(code == "200" for _, code in answers)
    # At its start, a worker asks for a temperature that no engine takes, to learn whether the route is open.
    failed = [f"{path} {code}" for path, code in answers if code not in ("200", "400")]
    for log in worker_logs:
        failed += [line for line in log.read_text(errors="replace").splitlines() if re.search(r"play .* failed", line)]
    detail = f"{good} answered, {len(failed)} failed" + "".join(f"; {one}" for one in failed[:SHOWN])
    return DemoCheck("no request failed", good > 0 and not failed, detail)
