"""When workers are told that the run has ended."""

from __future__ import annotations

from trainer_node.ledger_server.run_end import RunEnd


class Run:
    def __init__(self) -> None:
        self.finished, self.now_s = False, 0.0
        self.end = RunEnd(lambda: self.finished, lambda: self.now_s)

    def over(self, now_s: float) -> bool:
        self.now_s = now_s
        return self.end.over()


def test_workers_end_with_the_last_step() -> None:
    run = Run()
    assert not run.over(1.0)
    run.finished = True
    assert run.over(2.0)


def test_workers_stay_for_the_stated_time_after_the_last_step() -> None:
    run = Run()
    run.end.stay(10.0)
    assert not run.over(1.0)
    run.finished = True
    assert not run.over(20.0)
    assert not run.over(29.9)
    assert run.over(30.0)


def test_workers_end_when_evaluations_have_ended() -> None:
    run = Run()
    run.end.stay(10.0)
    run.finished = True
    assert not run.over(20.0)
    run.end.stay(0.0)
    assert run.over(20.0)


def test_a_learner_that_goes_back_a_step_begins_the_time_again() -> None:
    run = Run()
    run.end.stay(10.0)
    run.finished = True
    assert not run.over(0.0)
    run.finished = False
    assert not run.over(9.0)
    run.finished = True
    assert not run.over(15.0)
    assert run.over(25.0)
