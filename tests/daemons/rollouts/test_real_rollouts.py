"""Hub, peers with real vLLM engines, ledger and workers as processes, while versions go by. Each rollout that the
ledger accepts was made by the weights that its spans name.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from parity_task import NAME as PARITY
from real_run import (
    STALENESS,
    STRONG,
    Change,
    RealRun,
    failures_of,
    folder_of,
    fresh_scores,
    k3,
    rollouts_of,
    weak,
)
from real_server import make_model

from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import Rollout
from p2pcast.tasks.task_loader import load_task

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

TEACHER = Path(__file__).with_name("taught_model.py")
REFERENCE = Path(__file__).parents[2] / "rollout_node" / "vllm" / "reference_logprobs.py"
SAMPLED = 24
"""Rollouts whose log-probabilities are computed again."""
LONG = 4
"""Tokens over which a difference says something: that of one token reaches 0.12 in bfloat16."""
SAYS = 0.1
"""Difference of log-probabilities between neighbouring versions, below which a rollout does not tell them apart."""
PROBES, PROBE_TOKENS = 24, 10
"""Fixed lists of tokens that each live engine scores."""
ALARM = 10.0
"""KL divergence as a multiple of the floor, above which weights are not the version's."""
LEAST_FLOOR = 1e-7


class Taught(NamedTuple):
    """``steps``: of the warm start. With these, about three in four groups of each version have unlike rewards.
    ``change``: of a learner's step. With it, log-probabilities of neighbouring versions differ by more than 0.1 on
    average, ten times the noise of bfloat16.
    """

    steps: int
    change: Change


TAUGHT = {
    "sums,digits=1": Taught(28, weak(0.05)),
    "sums": Taught(400, weak(0.05)),
    "leduc": Taught(100, weak(0.1)),
}


def said_by(folders: Iterable[Path], rollouts: list[Rollout]) -> list[list[np.ndarray]]:
    """For each folder and rollout, the log-probability of every token; the first token's is 0."""
    asked = json.dumps([[r.result.token_ids.tolist(), r.result.temperature] for r in rollouts])
    command = [sys.executable, str(REFERENCE), *map(str, folders)]
    done = subprocess.run(command, input=asked, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [[np.array([0.0, *row]) for row in rows] for rows in json.loads(done.stdout.strip().splitlines()[-1])]


def model_of(task: str, folder: Path, vocabulary: int) -> Path:
    if task not in TAUGHT:
        return make_model(folder, vocabulary=vocabulary)
    command = [sys.executable, str(TEACHER), str(folder), task, str(TAUGHT[task].steps)]
    subprocess.run(command, check=True, timeout=900)
    return folder


@pytest.mark.parametrize(
    ("task", "steps", "engines", "workers"),
    [
        ("sums,digits=1", 4, 1, 2),
        pytest.param("sums", 20, 2, 3, marks=pytest.mark.prove),
        pytest.param("leduc", 20, 2, 3, marks=pytest.mark.prove),
        pytest.param(PARITY, 20, 2, 3, marks=pytest.mark.prove),
    ],
)
def test_accepted_rollouts_were_made_by_the_named_weights(
    tmp_path: Path, task: str, steps: int, engines: int, workers: int
) -> None:
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    loaded = load_task(task)
    model = model_of(task, tmp_path / "model", loaded.vocabulary)
    drawn = random.Random(2)
    probes = [[drawn.randrange(3, loaded.vocabulary) for _ in range(PROBE_TOKENS)] for _ in range(PROBES)]
    scored: dict[Version, list[list[np.ndarray]]] = {}
    with RealRun(tmp_path, task, steps, model, engines=engines, workers=workers) as run:

        def published(step: int) -> None:
            if step in (1, steps // 2, steps - 1):
                run.until_live(Version(0, step))
                scored[Version(0, step)] = [run.scores(engine, probes) for engine in range(engines)]

        batches = run.learn(change=TAUGHT[task].change if task in TAUGHT else STRONG, published=published)
        codes = run.workers_end()
        status = run.status("ledger")
    assert set(codes.values()) == {0}
    assert failures_of(run) == []
    assert [batch.step for batch in batches] == list(range(steps))
    assert status["finished"]
    assert not {"malformed", "forged", "unknown version", "unknown lease"} & set(status["rejections"]), status
    rollouts = rollouts_of(batches)
    assert len({rollout.result.job for rollout in rollouts}) == len(rollouts)
    for batch in batches:
        assert all(r.result.oldest_step >= batch.step - STALENESS for group in batch.groups for r in group.rollouts)
    versions = {span.version for rollout in rollouts for span in rollout.result.spans}
    assert len(versions) >= steps // 2  # rollouts followed the learner
    spans_hold(run, random.Random(1).sample(rollouts, min(SAMPLED, len(rollouts))))
    fresh_engines_agree(run, scored, probes, rollouts)


def fresh_engines_agree(
    run: RealRun,
    scored: dict[Version, list[list[np.ndarray]]],
    probes: list[list[int]],
    rollouts: list[Rollout],
) -> None:
    """The probes' log-probabilities by each live engine are those of a fresh engine, up to the difference of two fresh
    engines. So are the spans of all rollouts that one of the versions made alone.
    """
    versions = sorted(scored)
    by_version = {
        version: [r for r in rollouts if {span.version for span in r.result.spans} == {version}][:SAMPLED]
        for version in versions
    }
    played = [rollout for version in versions for rollout in by_version[version]]
    lists = [*probes, *(rollout.result.token_ids.tolist() for rollout in played)]
    folders = [folder for version in versions for folder in [folder_of(run, version)] * 2]
    found = fresh_scores(folders, lists)
    floors = [k3(one[:PROBES], other[:PROBES]) for one, other in zip(found[::2], found[1::2], strict=True)]
    floor = max(LEAST_FLOOR, *floors)
    print("version engine  KL to a fresh engine  to another version's | fresh to fresh")
    for number, version in enumerate(versions):
        true, other = found[2 * number][:PROBES], found[2 * number - 2][:PROBES]
        for engine, told in enumerate(scored[version]):
            print(f"{version}     e{engine}      {k3(told, true):.3e}   {k3(told, other):.3e} | {floors[number]:.3e}")
            assert k3(told, true) <= ALARM * floor
            assert k3(told, other) > ALARM * floor
    for number, version in enumerate(versions):
        after = PROBES + sum(len(by_version[earlier]) for earlier in versions[:number])
        gaps = [
            np.abs(rollout.result.logprobs - said)[rollout.result.mask.astype(bool)]
            for rollout, said in zip(by_version[version], found[2 * number][after:], strict=False)
        ]
        if gaps:
            off = np.concatenate(gaps)
            print(f"{version}: {len(off)} tokens of {len(gaps)} rollouts differ by {off.mean():.5f} on average")
            assert off.mean() < 0.05


def spans_hold(run: RealRun, rollouts: list[Rollout]) -> None:
    """The reported log-probabilities are those of the named version, and of no neighbouring version: over all tokens,
    and for each rollout by itself.
    """
    named = {span.version for rollout in rollouts for span in rollout.result.spans}
    versions = sorted(named | {Version(v.branch, v.step + 1) for v in named if v.step < run.steps})
    found = dict(zip(versions, said_by([folder_of(run, v) for v in versions], rollouts), strict=True))
    all_off: list[float] = []
    all_others: list[float] = []
    for number, rollout in enumerate(rollouts):
        result, off, others = rollout.result, [], []
        for span in result.spans:
            tokens = np.flatnonzero(result.mask[span.start : span.end]) + span.start
            said = result.logprobs[tokens]
            off += np.abs(said - found[span.version][number][tokens]).tolist()
            for other in versions:
                if abs(other.step - span.version.step) == 1:
                    others += np.abs(said - found[other][number][tokens]).tolist()
        assert np.mean(others) < SAYS or np.mean(off) < 0.5 * np.mean(others), result.spans
        assert len(off) < LONG or np.mean(off) < 0.1, result.spans
        all_off += off
        all_others += others
    print(f"difference of log-probabilities: {np.mean(all_off):.5f}, of neighbours {np.mean(all_others):.5f}")
    assert np.mean(all_off) < 0.05
    assert np.mean(all_off) < 0.1 * np.mean(all_others)
