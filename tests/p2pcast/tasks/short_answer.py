"""A taskset of verifiers with one turn, played by verifiers' own environment. Its list of tasks does not end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf


class AnswerData(vf.TaskData):
    answer: str


class AnswerTask(vf.Task[AnswerData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task: AnswerData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)


class AnswerTaskset(vf.Taskset[AnswerTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[AnswerTask]:
        for number in itertools.count():
            yield AnswerTask(AnswerData(prompt=f"{number}+1?", answer=str(number + 1)), self.config.task)


__all__ = ["AnswerTaskset"]
