"""The child of ``prompt_reader``: reads the prompts of one task, as ``python -m
p2pcast.tasks.child_processes.prompt_child``.

    first     ["ready", [hash, null]] or ["failed", text]
    request   [seed, held_out, first, count]: prompts from number ``first`` on
    answers   ["at", number], at least once a second, while earlier prompts are passed over
              then ["rows", [row, …]], ["ended", [row, …]] of a task without further prompts, or ["failed" | "refused",
              text]
    row       [true, prompt, max_tokens, row] or [false, name, why]

Messages are those of ``child_channel``. Fewer rows than asked for come after ``PART_S`` or ``PART_BYTES``; at least one
does. A request that begins at the number behind the last one goes on with the same iterator.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from p2pcast.ground import limits
from p2pcast.ground.errors import UsageError
from p2pcast.ground.plain_text import shown_text
from p2pcast.tasks.child_processes.child_channel import ChildChannel
from p2pcast.tasks.child_processes.child_faults import fault_with_place
from p2pcast.tasks.task import MAX_ROW, Task, evaluation_jobs_of, prompt_fault, prompt_name

PART_S = 0.5
PART_BYTES = 2 * limits.MIB
"""Time in seconds and bytes after which an answer has no further rows."""


def main() -> None:
    """argv: the task's name, the process id of the parent."""
    name, parent = sys.argv[1], int(sys.argv[2])
    channel = ChildChannel(parent)
    if (task := channel.task(name)) is None:
        return
    channel.send(["ready", [task.hash, None]])
    prompts: SeededPrompts | None = None
    for seed, held_out, first, count in channel.requests():
        if prompts is None or not prompts.goes_on(seed, held_out, first):
            prompts = SeededPrompts(task, seed, held_out=held_out)
        for answer in prompts.answers(first, count):
            channel.send(answer)


class SeededPrompts:
    """The prompts of one seed, read once and in order."""

    def __init__(self, task: Task, seed: int, *, held_out: bool) -> None:
        self._task, self._seed, self._held_out = task, seed, held_out
        self._iterator: Iterator[Any] | None = None
        self._number = 0
        """Of the next prompt."""

    def goes_on(self, seed: int, held_out: bool, first: int) -> bool:
        return (seed, held_out) == (self._seed, self._held_out) and self._number <= first

    def answers(self, first: int, count: int) -> Iterator[list[Any]]:
        rows: list[list[Any]] = []
        try:
            if self._iterator is None:
                self._iterator = self._begun()
            told_s = time.monotonic()
            while self._number < first:
                next(self._iterator)
                self._number += 1
                if time.monotonic() - told_s > PART_S:
                    yield ["at", self._number]
                    told_s = time.monotonic()
            size, until_s = 0, time.monotonic() + PART_S
            while len(rows) < count and size < PART_BYTES and (not rows or time.monotonic() < until_s):
                rows.append(_row(self._number, next(self._iterator)))
                size += len(rows[-1][1])
                self._number += 1
        except StopIteration:
            yield ["ended", rows]
            return
        except UsageError as error:
            yield ["refused", fault_with_place(error)]
            return
        except BaseException as error:  # noqa: BLE001 - whatever a user's task raises
            yield ["failed", f"prompt {self._number}: {fault_with_place(error)}"]
            return
        yield ["rows", rows]

    def _begun(self) -> Iterator[Any]:
        given: Any = evaluation_jobs_of(self._task, self._seed) if self._held_out else self._task.jobs(self._seed)
        try:
            return iter(given)
        except TypeError:
            method = "evaluation_jobs" if self._held_out else "jobs"
            raise TypeError(
                f"{method}({self._seed}) gave an object of type {type(given).__name__}, no iterator"
            ) from None


def _row(number: int, found: Any) -> list[Any]:
    if (fault := prompt_fault(found)) is not None:
        return [False, prompt_name(number, found), fault]
    return [True, found.prompt, found.max_tokens, shown_text(found.row)[:MAX_ROW]]


if __name__ == "__main__":
    main()
