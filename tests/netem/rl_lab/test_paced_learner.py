"""A paced learner's steps last at least the stated time, counted from the batch."""

from __future__ import annotations

import time

from netem.rl_lab.paced_learner import LearnerPace

TRAIN_S = 0.3


def test_the_end_of_training_waits_for_the_stated_time_alone() -> None:
    pace = LearnerPace(TRAIN_S)
    for work_s, least_s in ((0.0, TRAIN_S), (TRAIN_S, TRAIN_S)):
        pace("taken")
        began_s = time.monotonic()
        time.sleep(work_s)
        pace("trained")
        assert time.monotonic() - began_s >= least_s - 0.01
    for boundary in ("opened", "resumed", "applied", "published"):
        pace(boundary)
