"""``p2pcast learn`` whose steps last at least a stated time, as those of a model do that is thousands of times larger.

    main: TRAIN_S CONFIG.toml

The learner itself is unchanged: it waits at its boundary "trained", after the step's computation.
"""

from __future__ import annotations

import sys
import time

from p2pcast.cli import main as command
from trainer_node.learning.learner import HOOK


class LearnerPace:
    """Called at the learner's boundaries. ``train_s``: least time from a batch to the end of its training."""

    def __init__(self, train_s: float) -> None:
        self._train_s = train_s
        self._taken_s = 0.0

    def __call__(self, boundary: str) -> None:
        if boundary == "taken":
            self._taken_s = time.monotonic()
        elif boundary == "trained":
            time.sleep(max(0.0, self._taken_s + self._train_s - time.monotonic()))


def main() -> None:
    train_s, config = sys.argv[1:]
    sys.argv[1:] = ["learn", config]
    with HOOK.by(LearnerPace(float(train_s))):
        command()
