"""Evaluations of published versions, with a ledger in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import GroupReport
from p2pcast.rollouts.job import Group
from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task import Prompt
from trainer_node.learning.evaluation import CHECK_S, RECORD_S, Evaluator

VERSION = Version(1, 4)
PROBLEMS = 40


@dataclass
class Answers:
    """Answers the first ``answered`` groups, each with reward 1, and leaves the others waiting."""

    answered: int
    groups: list[Group] = field(default_factory=list)
    stays_s: list[float] = field(default_factory=list)

    def add_groups(self, groups: Sequence[Group]) -> int:
        self.groups += groups
        return len(groups)

    def stay(self, for_s: float) -> None:
        self.stays_s.append(for_s)

    def read_groups(self, groups: Sequence[bytes]) -> list[GroupReport]:
        return [
            GroupReport(one, "complete", None, (1.0,)) if at < self.answered else GroupReport(one, "waiting", None, ())
            for at, one in enumerate(groups)
        ]


def prompts_of(task: Sums) -> list[Prompt]:
    return list(islice(task.evaluation_jobs(0), PROBLEMS))


def evaluated(client: Answers, hold_s: float) -> list[Mapping[str, object]]:
    """The records of an evaluation, once ``join`` has returned."""
    lines: list[Mapping[str, object]] = []
    task = Sums(held_out=10)
    evaluation = Evaluator(client, task, prompts_of(task), lines.append, every=2, hold_s=hold_s)
    evaluation.published(VERSION, VERSION.step)
    evaluation.join()
    assert not evaluation.busy
    evaluation.published(Version(1, 5), 5)  # not due
    evaluation.join()
    return list(lines)


def test_evaluation_plays_held_out_problems_of_one_version_greedily() -> None:
    client, task = Answers(PROBLEMS), Sums(held_out=10)
    (line,) = evaluated(client, 600.0)
    assert (line["step"], line["version"], line["answered"], line["reward"]) == (4, "1.4", PROBLEMS, 1.0)
    assert len({group.id for group in client.groups}) == PROBLEMS
    for group in client.groups:
        assert (group.pinned, group.temperature, group.purpose) == (VERSION, 0.0, "evaluate")
        assert task.held_out(group.prompt)


def test_evaluation_that_no_engine_plays_is_recorded_before_the_learner_ends() -> None:
    """The time for answers ends between two looks."""
    (line,) = evaluated(Answers(3), 1.5 * CHECK_S)
    assert (line["problems"], line["answered"], line["reward"]) == (PROBLEMS, 3, 1.0)
    (line,) = evaluated(Answers(0), 1.5 * CHECK_S)
    assert (line["answered"], line["reward"]) == (0, None)


def test_workers_stay_for_the_evaluation_of_the_last_step() -> None:
    client = Answers(PROBLEMS)
    evaluation = Evaluator(client, Sums(held_out=10), [], [].append, every=2, hold_s=5.0)
    evaluation.keep_workers(30.0)
    evaluation.join()
    assert client.stays_s == [30.0 + 5.0 + RECORD_S, 0.0]
