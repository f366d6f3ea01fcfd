"""Events of training runs, as a learner writes them."""

from __future__ import annotations

from random import Random
from typing import Any

from trainer_node.learning.monitoring.run_record import RunRecord

Document = dict[str, Any]


def start(step: int = 0, branch: int = 0) -> Document:
    return {
        "event": "start",
        "time": 1.75e9,
        "branch": branch,
        "epoch": branch,
        "step": step,
        "model": "sums-0.4M",
        "parameters": 412_000,
        "ranks": 1,
        "config": {"loss": {"kind": "clip"}},
    }


def step(number: int, branch: int = 0, **changed: Any) -> Document:
    draw = Random(1000 * branch + number)
    return {
        "event": "step",
        "time": 1.75e9 + 3 * number,
        "step": number,
        "branch": branch,
        "epoch": branch,
        "batch": f"{branch:02x}{number:06x}",
        "groups": 32,
        "groups_played": 40,
        "rollouts": 256,
        "reward": draw.uniform(0.2, 0.6),
        "tokens": 20_000 + draw.randrange(5_000),
        "learnt_tokens": 15_000,
        "truncated": 2,
        "loss": draw.gauss(0, 0.01),
        "grad_norm": draw.uniform(0.1, 0.9),
        "lr": 3e-4,
        "kl_sampler": draw.uniform(1e-5, 1e-3),
        "kl_same_version": draw.uniform(1e-7, 1e-6),
        "entropy": draw.uniform(0.5, 0.9),
        "ratio_mean": draw.uniform(0.99, 1.01),
        "ratio_max": draw.uniform(1, 4),
        "over_cap_share": 0.0,
        "clip_share": draw.uniform(0, 0.02),
        "effective_sample_share": 0.97,
        "staleness": {"0": 100, "1": 120, "3": 36},
        "staleness_in_flight": 0.6,
        "staleness_in_queue": 0.3,
        "wait_s": draw.uniform(0, 1),
        "train_s": draw.uniform(1, 2),
        "bubble": draw.uniform(0.1, 0.3),
    } | changed


def publish(number: int, branch: int = 0, live_s: float | None = 0.9) -> Document:
    return {
        "event": "publish",
        "time": 1.75e9 + 3 * number,
        "version": f"{branch}.{number}",
        "step": number,
        "bytes": 383_000,
        "changed": 107_120,
        "elements": 412_000,
        "density": 0.26,
        "snapshot_s": 0.01,
        "durable_s": 0.1,
        "live_s": live_s,
        "engines": 2,
    }


def evaluation(number: int, branch: int = 0) -> Document:
    return {
        "event": "evaluation",
        "time": 1.75e9 + 3 * number,
        "version": f"{branch}.{number}",
        "step": number,
        "problems": 128,
        "answered": 127,
        "reward": 0.4,
        "seconds": 3.2,
        "tags": {"digits": {"2": 64, "3": 63}},
    }


def probe(number: int, engine: str = "vllm-a", kl: float = 1e-6, branch: int = 0) -> Document:
    return {
        "event": "probe",
        "time": 1.75e9 + 3 * number,
        "version": f"{branch}.{number}",
        "engine": engine,
        "kl": kl,
        "floor": 1e-6,
        "alarm": kl > 1e-5,
    }


def checkpoint(number: int) -> Document:
    return {
        "event": "checkpoint",
        "time": 1.75e9 + 3 * number,
        "step": number,
        "digest": "ab" * 32,
        "bytes": 4_800_000,
        "seconds": 0.4,
    }


def end(number: int) -> Document:
    return {"event": "end", "time": 1.76e9, "step": number, "seconds": 480.0, "reason": "the ledger's last step"}


def stretch(first: int, last: int, branch: int = 0) -> list[Document]:
    """Steps with a version every second step, and an evaluation with a checkpoint every tenth."""
    found: list[Document] = []
    for number in range(first, last + 1):
        found.append(step(number, branch))
        if number % 2 == 0:
            found += [publish(number, branch), probe(number, "vllm-a", branch=branch), probe(number, "vllm-b")]
        if number % 10 == 0:
            found += [evaluation(number, branch), checkpoint(number)]
    return found


def resumed_run() -> list[Document]:
    """A run that was killed after step 27, resumed at step 20, and ended after step 40."""
    return [start(), *stretch(1, 27), start(20, branch=1), *stretch(21, 40, branch=1), end(40)]


def record_of(documents: list[Document]) -> RunRecord:
    record = RunRecord()
    for document in documents:
        record.add(document)
    return record
