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

import numpy as np
import pytest
from real_run import RealRun, folder_of, rollouts_of

from p2pcast.tasks.task_loader import load_task
from p2pcast.version import Version
from trainer_node.sdk.batch_client import Rollout

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

REFERENCE = Path(__file__).parents[2] / "rollout_node" / "vllm" / "reference_logprobs.py"
SAMPLED = 24
"""Rollouts whose log-probabilities are computed again."""
LONG = 4
"""Tokens over which a difference says something: that of one token reaches 0.12 in bfloat16."""


def said_by(folders: Iterable[Path], rollouts: list[Rollout]) -> list[list[np.ndarray]]:
    """For each folder and rollout, the log-probability of every token; the first token's is 0."""
    asked = json.dumps([[r.result.token_ids.tolist(), r.result.temperature] for r in rollouts])
    command = [sys.executable, str(REFERENCE), *map(str, folders)]
    done = subprocess.run(command, input=asked, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [[np.array([0.0, *row]) for row in rows] for rows in json.loads(done.stdout.strip().splitlines()[-1])]


@pytest.mark.parametrize(
    ("task", "steps", "engines", "workers"),
    [
        ("tests.daemons.rollouts.parity_task:Parity", 4, 1, 2),
        pytest.param("leduc", 20, 2, 3, marks=pytest.mark.prove),
        pytest.param("tests.daemons.rollouts.parity_task:Parity", 20, 2, 3, marks=pytest.mark.prove),
    ],
)
def test_accepted_rollouts_were_made_by_the_named_weights(
    tmp_path: Path, task: str, steps: int, engines: int, workers: int
) -> None:
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    loaded = load_task(task)
    with RealRun(tmp_path, task, steps, engines=engines, workers=workers, vocabulary=loaded.vocabulary) as run:
        batches = run.learn()
        codes = run.workers_end()
        status = run.status("ledger")
    assert set(codes.values()) == {0}
    assert [batch.step for batch in batches] == list(range(steps))
    assert status["finished"]
    assert not {"malformed", "forged", "unknown version", "unknown lease"} & set(status["rejections"]), status
    rollouts = rollouts_of(batches)
    assert len({rollout.result.job for rollout in rollouts}) == len(rollouts)
    for batch in batches:
        assert all(r.result.oldest_step >= batch.step - 2 for group in batch.groups for r in group.rollouts)
    versions = {span.version for rollout in rollouts for span in rollout.result.spans}
    assert len(versions) >= steps // 2  # rollouts followed the learner
    spans_hold(run, random.Random(1).sample(rollouts, min(SAMPLED, len(rollouts))))


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
        assert np.mean(off) < 0.5 * np.mean(others), result.spans
        assert len(off) < LONG or np.mean(off) < 0.1, result.spans
        all_off += off
        all_others += others
    print(f"difference of log-probabilities: {np.mean(all_off):.5f}, of neighbours {np.mean(all_others):.5f}")
    assert np.mean(all_off) < 0.05
    assert np.mean(all_off) < 0.1 * np.mean(all_others)
