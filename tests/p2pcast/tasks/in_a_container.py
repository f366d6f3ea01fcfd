"""A taskset of verifiers that the bridge refuses."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class BoxTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    NEEDS_CONTAINER = True


class BoxTaskset(vf.Taskset[BoxTask, vf.TasksetConfig]):
    def load(self) -> Iterator[BoxTask]:
        yield BoxTask(vf.TaskData(prompt="Go."), self.config.task)


__all__ = ["BoxTaskset"]
