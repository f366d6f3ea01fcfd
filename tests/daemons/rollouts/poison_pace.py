"""Pace of a run of bad rows beside a clean one: ``python -m tests.daemons.rollouts.poison_pace [--steps N] [--all]``.

Prints the seconds of each run, from the first lease to the last batch, and their ratio. Real vLLM, two workers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests/rollout_node/vllm"), str(ROOT / "tests/daemons/rollouts")]

from poisoned_task import ALL, LONGEST, MARKS, SELDOM  # noqa: E402
from real_run import RealRun  # noqa: E402
from real_server import make_model  # noqa: E402

from tests.daemons.rollouts import parity_task  # noqa: E402


def paced(task: str, steps: int, step_s: float) -> float:
    """Seconds for all steps."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.environ[MARKS] = made
        (folder / "hung").touch()  # the wait for a prompt that hangs has a time limit of its own
        model = make_model(folder / "model", vocabulary=parity_task.Parity.vocabulary)
        options = {"engine_flags": ["--max-model-len", str(LONGEST)], "worker_options": ["--play-step", str(step_s)]}
        run = RealRun(folder, task, steps, model, engines=1, workers=2, **options)
        with contextlib.redirect_stdout(io.StringIO()), run:  # the run prints the ends of all logs
            began_s = time.monotonic()
            assert len(run.learn()) == steps
            return time.monotonic() - began_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--play-step", type=float, default=1.0)
    parser.add_argument("--all", action="store_true", help="ten rows of eleven are bad, instead of one of eight")
    words = parser.parse_args()
    clean_s = paced(parity_task.NAME, words.steps, words.play_step)
    bad_s = paced(ALL if words.all else SELDOM, words.steps, words.play_step)
    print(f"{words.steps} steps: clean {clean_s:.1f} s, bad rows {bad_s:.1f} s, ratio {bad_s / clean_s:.2f}")


if __name__ == "__main__":
    main()
