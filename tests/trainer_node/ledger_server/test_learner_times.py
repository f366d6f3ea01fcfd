"""Times of learner and broadcasts, as the ledger measures them."""

from __future__ import annotations

from p2pcast.ground.version import Version
from trainer_node.ledger_server.learner_times import KEPT, LearnerTimes


def test_nothing_is_measured_at_first() -> None:
    document = LearnerTimes().document()
    assert document.pop("steps") == 0
    assert set(document.values()) == {None}


def test_waiting_begins_with_the_first_request_for_a_step() -> None:
    times, now_s = LearnerTimes(), 100.0
    for step in range(3):
        for _ in range(4):  # the learner polls
            times.asked(step, now_s)
            now_s += 0.5
        times.taken(step, 32, now_s)
        times.taken(step, 32, now_s + 1)  # the answer was lost, and the request repeated
        now_s += 8
        times.applied(step, now_s)
        times.applied(step, now_s + 5)
    assert times.document() == {
        "steps": 3, "train_s": 8.0, "wait_s": 2.0, "rollouts": 32, "bubble": 0.2, "broadcast_s": None,
    }  # fmt: skip


def test_a_resume_forgets_the_step_in_progress_alone() -> None:
    times = LearnerTimes()
    for step, now_s in ((0, 0.0), (1, 10.0)):
        times.asked(step, now_s)
        times.taken(step, 8, now_s)
        if step == 1:
            times.resumed()
        times.applied(step, now_s + 1)
    assert times.document()["steps"] == 1


def test_a_broadcast_ends_with_nine_engines_in_ten() -> None:
    times, old, new = LearnerTimes(), Version(0, 1), Version(0, 2)
    times.known(new, 50.0)
    times.serve([], 51.0)
    times.serve([new] * 8 + [old] * 2, 52.0)
    assert times.document()["broadcast_s"] is None
    times.serve([new] * 8 + [Version(0, 3), old], 53.5)
    times.serve([new] * 10, 60.0)
    assert times.document()["broadcast_s"] == 3.5


def test_versions_that_no_engine_serves_are_forgotten() -> None:
    times = LearnerTimes()
    for step in range(1000):
        times.known(Version(0, step), float(step))
    assert len(times._on_the_way) == KEPT
