"""The probe set at the ledger: each worker is asked once for a version, and memory is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from p2pcast.ground.version import Version
from p2pcast.ledger_api.trainer_api import ProbeVerdict
from p2pcast.rollouts.probe_set import ProbeSet
from trainer_node.ledger_server.probes import probe_desk
from trainer_node.ledger_server.probes.probe_desk import (
    MAX_WAITING_OF_ONE,
    MISSED,
    REPEAT_S,
    ProbeDesk,
    Scored,
)

SETS = [ProbeSet.checked([[1, 2, number]]) for number in range(2)]
V = Version(0, 3)


def scored(number: int, worker: str = "w", version: Version = V) -> Scored:
    return Scored(number.to_bytes(16, "big"), worker, "vllm:e", version, bytes(8))


def asked(desk: ProbeDesk, version: Version = V, worker: bytes = b"w", now_s: float = 0.0) -> bool:
    return desk.take(worker, worker.decode(), version, now_s) is not None


def test_worker_is_asked_once_for_a_version() -> None:
    desk = ProbeDesk()
    assert not asked(desk)
    desk.put(SETS[0])
    assert asked(desk)
    assert not asked(desk)
    assert desk.answer(b"w", SETS[0].id, scored(1))
    assert not asked(desk, now_s=10 * REPEAT_S)
    assert asked(desk, Version(0, 4))


def test_worker_that_does_not_answer_is_asked_again() -> None:
    desk = ProbeDesk()
    desk.put(SETS[0])
    assert asked(desk)
    assert not asked(desk, now_s=REPEAT_S - 1)
    assert asked(desk, now_s=REPEAT_S)


def test_scores_that_were_not_asked_for_do_not_wait() -> None:
    desk = ProbeDesk()
    assert not desk.answer(b"w", SETS[0].id, scored(1))
    desk.put(SETS[0])
    assert not desk.answer(b"w", SETS[0].id, scored(1))
    assert asked(desk)
    assert not desk.answer(b"w", SETS[1].id, scored(1))
    assert not desk.answer(b"other", SETS[0].id, scored(1))
    assert not desk.answer(b"w", SETS[0].id, scored(1, version=Version(0, 2)))
    assert desk.answer(b"w", SETS[0].id, scored(1))
    assert not desk.answer(b"w", SETS[0].id, scored(2))
    assert desk.read(SETS[0].id) == [scored(1)]


def test_another_probe_set_makes_all_scores_void() -> None:
    desk = ProbeDesk()
    desk.put(SETS[0])
    assert asked(desk)
    desk.answer(b"w", SETS[0].id, scored(1))
    desk.put(SETS[0])
    assert desk.read(SETS[0].id) == [scored(1)]
    desk.put(SETS[1])
    assert desk.read(SETS[0].id) is None
    assert desk.read(SETS[1].id) == []
    assert asked(desk)


def test_begin_and_end_of_an_alarm_are_told_once() -> None:
    desk = ProbeDesk()
    desk.put(SETS[0])
    told = []
    for step, (kl, alarm) in enumerate([(1e-6, False), (0.1, True), (0.2, True), (1e-6, False), (0.1, True)]):
        version = Version(0, step)
        assert asked(desk, version)
        desk.answer(b"w", SETS[0].id, scored(step, version=version))
        found = desk.judge(ProbeVerdict(scored(step).id, alarm, kl, 1e-6))
        assert found is not None
        told.append((found.began, found.ended))
        assert desk.judge(ProbeVerdict(scored(step).id, alarm, kl, 1e-6)) is None, "a repeated verdict tells nothing"
    assert told == [(False, False), (True, False), (False, False), (False, True), (True, False)]
    assert desk.alarms == 2
    assert desk.document()["alarm"] == 1
    assert desk.most() == {"w": 0.1}
    desk.retain(set())
    assert desk.document()["alarm"] == 0


def test_scores_that_cannot_be_compared_tell_nothing() -> None:
    desk = ProbeDesk()
    desk.put(SETS[0])
    assert asked(desk)
    desk.answer(b"w", SETS[0].id, scored(1))
    assert desk.judge(ProbeVerdict(scored(1).id, alarm=False)) is None
    assert desk.read(SETS[0].id) == []
    assert desk.newest() == []


def test_probes_that_fail_again_and_again_are_missing() -> None:
    desk = ProbeDesk()
    desk.put(SETS[0])
    for step in range(MISSED):
        assert asked(desk, Version(0, step))
        assert desk.missing() == []
    assert asked(desk, Version(0, MISSED - 1), now_s=REPEAT_S)
    assert desk.missing() == desk.document()["missing"] == ["w"]
    assert desk.misses(b"w")
    assert not desk.misses(b"x")
    assert desk.answer(b"w", SETS[0].id, scored(1, version=Version(0, MISSED - 1)))
    assert desk.missing() == []


def test_worker_that_was_started_again_is_not_missing() -> None:
    desk = ProbeDesk()
    desk.put(SETS[0])
    for step in range(MISSED + 1):
        assert asked(desk, Version(0, step))
    assert desk.missing() == ["w"]
    assert desk.take(b"other", "w", V, 1.0) is not None
    assert desk.missing() == []
    desk.retain(set())
    assert not desk.misses(b"w")


@given(st.integers(MAX_WAITING_OF_ONE + 1, 3 * MAX_WAITING_OF_ONE))
def test_scores_of_one_worker_take_few_places(count: int) -> None:
    desk = ProbeDesk()
    desk.put(SETS[0])
    assert asked(desk, worker=b"x")
    desk.answer(b"x", SETS[0].id, scored(10**6, "x"))
    for step in range(count):
        assert asked(desk, Version(0, step))
        assert desk.answer(b"w", SETS[0].id, scored(step, version=Version(0, step)))
    found = desk.read(SETS[0].id) or []
    kept = [scored(step, version=Version(0, step)) for step in range(count - MAX_WAITING_OF_ONE, count)]
    assert found == [scored(10**6, "x"), *kept]


class Crowd(RuleBasedStateMachine):
    """Many workers, and limits small enough to be reached."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = probe_desk.MAX_WAITING, probe_desk.MAX_WORKERS_PROBED
        probe_desk.MAX_WAITING, probe_desk.MAX_WORKERS_PROBED = 6, 4  # type: ignore[misc]
        self.desk, self.number = ProbeDesk(), 0

    def teardown(self) -> None:
        probe_desk.MAX_WAITING, probe_desk.MAX_WORKERS_PROBED = self.limits  # type: ignore[misc]

    @rule(number=st.integers(0, 1))
    def put(self, number: int) -> None:
        self.desk.put(SETS[number])

    @rule(worker=st.sampled_from("abcdefgh"), step=st.integers(0, 3), answers=st.booleans())
    def take(self, worker: str, step: int, answers: bool) -> None:
        version = Version(0, step)
        found = self.desk.take(worker.encode(), worker, version, float(self.number))
        if found is not None and answers:
            self.number += 1
            assert self.desk.answer(worker.encode(), found.id, scored(self.number, worker, version))

    @rule(alarm=st.booleans())
    def judge(self, alarm: bool) -> None:
        waiting = [] if self.desk.probe_set is None else self.desk.read(self.desk.probe_set.id) or []
        for one in waiting:
            found = self.desk.judge(ProbeVerdict(one.id, alarm, 1.0, 1.0))
            assert found is not None
            assert found.worker == one.worker

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.desk._waiting) <= 6
        assert len(self.desk._workers) <= 4
        assert self.desk.document()["alarm"] == len([one for one in self.desk.newest() if one.alarm])


TestCrowd = Crowd.TestCase
