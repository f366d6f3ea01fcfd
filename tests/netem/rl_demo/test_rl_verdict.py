"""The RL demo's verdict fails for each fault that it looks for, in rows of the ledger's own schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from safetensors.numpy import save_file

from netem.rl_demo import rl_verdict
from netem.rl_demo.rl_verdict import RunLines
from trainer_node.ledger.database import ledger_schema as db

STEPS, BOUND = 4, 2


def batch_id(step: int) -> bytes:
    return step.to_bytes(16, "big")


def lines(path: Path, **changed: Any) -> RunLines:
    events: list[dict[str, Any]] = [{"event": "start", "step": 0}]
    events += [step(number) for number in (1, 2, 3)]
    events += [{"event": "start", "step": 2}, step(3), step(4) | changed]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return RunLines.read(path)


def step(number: int) -> dict[str, Any]:
    ages = {"0": 4, "1": 4}
    return {
        "event": "step",
        "step": number,
        "batch": batch_id(number - 1).hex(),
        "reward": number / 10,
        "staleness": ages,
        "kl_same_version": 1e-3,
    }


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A ledger that has ended: a batch a step, each of one group with two jobs; one batch more was reopened."""
    path = tmp_path / "ledger.db"
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as conn:
        db.metadata.create_all(conn)
        for number in range(STEPS):
            add_batch(conn, batch_id(number), number, batch_id(number))
        add_batch(conn, b"r" * 16, 2, None, state="reopened")
    engine.dispose()
    return path


def add_batch(conn: sa.Connection, batch: bytes, step: int, group: bytes | None, state: str = "trained") -> None:
    values = {"id": batch, "epoch": 1, "branch": 1, "step": step, "oldest_step": max(0, step - BOUND), "state": state}
    insert(conn, db.batches, values)
    if group is None:
        return
    insert(conn, db.groups, {"id": group, "state": "trained"})
    insert(conn, db.batch_members, {"batch_id": batch, "ordinal": 0, "group_id": group})
    for number in range(2):
        job = group + bytes([number])
        insert(conn, db.jobs, {"id": job, "group_id": group, "position": number, "state": "accepted"})
        result = {"job_id": job, "lease_id": job, "verdict": "accepted", "oldest_step": max(0, step - 1)}
        insert(conn, db.results, result)


def insert(conn: sa.Connection, table: sa.Table, values: dict[str, Any]) -> None:
    """Other columns without a default get a value of their type."""
    filler: dict[str, Any] = {}
    for column in table.columns:
        if column.name not in values and not column.nullable:
            kind = column.type.python_type
            filler[column.name] = (values.get("id") or b"") if kind is bytes else kind()
            if column.unique:
                filler[column.name] = int.from_bytes(values["id"][-2:], "big")
    conn.execute(table.insert().values({**filler, **values}))


def change(database: Path, statement: str, *arguments: Any) -> None:
    engine = sa.create_engine(f"sqlite:///{database}")
    with engine.begin() as conn:
        conn.exec_driver_sql("drop index if exists one_live_batch")
        conn.exec_driver_sql("drop index if exists one_accepted")
        conn.exec_driver_sql(statement, tuple(arguments))
    engine.dispose()


def test_a_run_without_faults_passes(database: Path, tmp_path: Path) -> None:
    found = lines(tmp_path / "metrics.jsonl")
    assert (found.epochs, found.superseded, sorted(found.steps)) == (2, 1, [1, 2, 3, 4])
    assert found.started_at == 2
    assert rl_verdict.check_once(found, database, STEPS).ok
    assert rl_verdict.check_staleness(found.steps, database, BOUND).ok
    assert rl_verdict.check_agreement(found.steps).ok


@pytest.mark.parametrize(
    ("statement", "arguments", "says"),
    [
        ("update jobs set state = 'open' where position = 1 and group_id = ?", [batch_id(1)], "1 jobs without an end"),
        ("update batches set state = 'applied' where id = ?", [batch_id(1)], "the batch of step 1 is applied"),
        ("update batches set state = 'cut' where state = 'reopened'", [], "not the learner's"),
        ("delete from batches where id = ?", [batch_id(3)], "the last batch is not in the ledger"),
        ("update batch_members set group_id = ? where batch_id = ?", [batch_id(0), batch_id(1)], "1 groups in two"),
        (
            "insert into results (job_id, lease_id, digest, verdict, sampled, settled_step, replay)"
            " select job_id, ?, digest, verdict, sampled, settled_step, replay from results where job_id = ?",
            [b"other", batch_id(0) + b"\0"],
            "1 jobs with two accepted results",
        ),
    ],
)
def test_a_fault_in_the_rows_is_named(
    database: Path, tmp_path: Path, statement: str, arguments: list[Any], says: str
) -> None:
    change(database, statement, *arguments)
    found = rl_verdict.check_once(lines(tmp_path / "metrics.jsonl"), database, STEPS)
    assert not found.ok
    assert says in found.detail


def test_a_batch_that_two_steps_trained_is_named(database: Path, tmp_path: Path) -> None:
    found = rl_verdict.check_once(lines(tmp_path / "metrics.jsonl", batch=batch_id(0).hex()), database, STEPS)
    assert not found.ok
    assert "two steps" in found.detail


def test_rollouts_that_are_too_old_are_named(database: Path, tmp_path: Path) -> None:
    by_log = lines(tmp_path / "metrics.jsonl", staleness={"3": 1})
    assert not rl_verdict.check_staleness(by_log.steps, database, BOUND).ok
    change(database, "update batches set oldest_step = 0")
    change(database, "update results set oldest_step = 0 where job_id = ?", batch_id(3) + b"\0")
    assert not rl_verdict.check_staleness(lines(tmp_path / "metrics.jsonl").steps, database, BOUND).ok


def test_rewards_have_to_rise_by_the_margin() -> None:
    steps = {number: {"reward": 0.3 + (0.05 if number > 10 else 0.0)} for number in range(1, 21)}
    assert rl_verdict.check_reward(steps, 20, margin=0.04).ok
    assert not rl_verdict.check_reward(steps, 20, margin=0.06).ok
    del steps[3]
    assert "[3]" in rl_verdict.check_reward(steps, 20).detail


def test_engine_and_learner_have_to_agree() -> None:
    assert not rl_verdict.check_agreement({1: {"kl_same_version": 1.0}}).ok
    assert not rl_verdict.check_agreement({1: {}}).ok


def test_share_of_changed_words(tmp_path: Path) -> None:
    def folder(name: str, words: np.ndarray) -> Path:
        (tmp_path / name).mkdir()
        save_file({"w": words}, tmp_path / name / "model.safetensors")
        return tmp_path / name

    words = np.zeros(100, "<u2")
    other = words.copy()
    other[:5] = 7
    exported = {4: folder("000001-000000004", words), 5: folder("000001-000000005", other)}
    assert rl_verdict.changed_share(exported[4], exported[5]) == 0.05
    assert rl_verdict.check_sparse(exported, 4, 5).ok
    assert not rl_verdict.check_sparse(exported, 4, 6).ok
    assert not rl_verdict.check_sparse(exported, 5, 5).ok
    later = folder("000002-000000005", np.ones(100, "<u2"))
    assert rl_verdict.exported_steps(tmp_path) == {4: exported[4], 5: later}
    assert not rl_verdict.check_sparse(rl_verdict.exported_steps(tmp_path), 4, 5).ok


@pytest.mark.parametrize(
    ("engine", "worker", "ok"),
    [
        ('"POST /inference/v1/generate HTTP/1.1" 200', "", True),
        ('"POST /inference/v1/generate HTTP/1.1" 200\n"POST /inference/v1/generate HTTP/1.1" 500', "", False),
        ('"POST /inference/v1/generate HTTP/1.1" 200', "play 7 failed: no answer", False),
        ("", "", False),
    ],
)
def test_failed_requests_are_counted(tmp_path: Path, engine: str, worker: str, ok: bool) -> None:
    write: Callable[[str, str], Path] = lambda name, text: (tmp_path / name, (tmp_path / name).write_text(text))[0]  # noqa: E731
    assert rl_verdict.check_requests(write("vllm.log", engine), [write("w1.log", worker)]).ok is ok
