"""The child of ``play_pool``: plays jobs of one task. Run as ``python -m p2pcast.tasks.child_processes.play_child``.

Promises: plays run beside each other on one event loop, and each begins with the job alone. Asyncio tasks that a play
leaves running end with it. A copy of this process that a play forks ends at its next step, and sends nothing. The
process prints the traceback of an error of the task once for each place that raises it.

``play_messages`` specifies the messages. A play's code could send others: the parent believes nothing but what a play
itself decides.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import mmap
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn
from weakref import WeakSet

import numpy as np

from p2pcast.ground import errors
from p2pcast.ground.errors import P2PCastError, RemoteError
from p2pcast.ground.version import Version
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import Span
from p2pcast.rollouts.rollout_fields import MAX_TOKENS
from p2pcast.tasks.child_processes.child_channel import ChildChannel, limit_memory
from p2pcast.tasks.child_processes.child_faults import SeenErrors, fault_with_place
from p2pcast.tasks.child_processes.play_messages import READERS, SLOT_BYTES, PlayEnded, SampleRequest, as_bytes
from p2pcast.tasks.task import Sample, Task

_play: contextvars.ContextVar[int] = contextvars.ContextVar("play", default=0)
"""The play whose code is running."""


def main() -> None:
    """argv: the task's name, the memory limit in bytes, the descriptor of the slot, the process id of the parent."""
    name, memory_bytes, slot, parent = sys.argv[1], *map(int, sys.argv[2:])
    channel = ChildChannel(parent)
    if (task := channel.task(name)) is None:
        return
    channel.close_in_copies()
    steps = Steps(slot, channel)
    limit_memory(memory_bytes)
    channel.send(["ready", [task.hash, None]])
    asyncio.run(Plays(task, channel, steps).run())


class Steps:
    """Counts steps where the parent sees them. ``slot``: descriptor of SLOT_BYTES, which is closed."""

    def __init__(self, slot: int, channel: ChildChannel) -> None:
        self._shared = memoryview(mmap.mmap(slot, SLOT_BYTES)).cast("Q")
        os.close(slot)
        self._channel = channel
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._shared = memoryview(bytearray(SLOT_BYTES)).cast("Q")

    def step(self, play: int) -> int:
        """A step of ``play`` begins; 0: none. The play whose step was not over."""
        before, self._shared[0] = self._shared[0], play
        self._shared[1] += 1
        return before

    def over(self, before: int) -> None:
        if self._channel.closed:
            os._exit(1)  # a copy, which would go on with the plays of the process that was started
        self._shared[0] = before
        self._shared[1] += 1


class _Stepped(Coroutine[Any, Any, Any]):
    """Wraps a play's coroutine to count its steps."""

    def __init__(self, inner: Coroutine[Any, Any, Any], play: int, steps: Steps) -> None:
        self._inner, self._play, self._steps = inner, play, steps

    def send(self, value: Any) -> Any:
        return self._stepped(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._stepped(self._inner.throw, *error)

    def _stepped(self, go_on: Callable[..., Any], *given: Any) -> Any:
        before = self._steps.step(self._play)
        try:
            return go_on(*given)
        except (SystemExit, KeyboardInterrupt) as error:
            # Asyncio would end the loop, and with it all plays.
            raise RuntimeError(f"the play raised {error!r}") from error
        finally:
            self._steps.over(before)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> NoReturn:
        raise TypeError("a task awaits this coroutine")


class Plays:
    def __init__(self, task: Task, channel: ChildChannel, steps: Steps) -> None:
        self._task, self._channel, self._steps = task, channel, steps
        self._plays: dict[int, asyncio.Task[None]] = {}
        self._tasks: dict[int, WeakSet[asyncio.Task[Any]]] = {}
        """The asyncio tasks of each play, including its own."""
        self._asks: dict[int, asyncio.Future[Sample]] = {}
        self._numbers = itertools.count(1)
        self._seen = SeenErrors()

    async def run(self) -> None:
        """Run plays until the parent exits."""
        asyncio.get_running_loop().set_task_factory(self._made)  # type: ignore[arg-type]
        async for what, said in self._channel.messages():
            before = self._steps.step(0)
            self._take(what, said)
            self._steps.over(before)
        os._exit(0)  # plays could delay an orderly end without end

    def _made(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        play = _play.get()
        if not play:
            return asyncio.Task(work, loop=loop, **options)
        made = asyncio.Task(_Stepped(work, play, self._steps), loop=loop, **options)
        self._tasks.setdefault(play, WeakSet()).add(made)
        return made

    def _take(self, what: str, said: Any) -> None:
        if what == "play":
            number, job = said
            context = contextvars.copy_context()
            context.run(_play.set, number)
            self._plays[number] = context.run(asyncio.create_task, self._played(number, job))
        elif what == "end":
            if (play := self._plays.get(said)) is not None:
                play.cancel()
        elif what in ("said", "no answer"):
            waiting = self._asks.pop(said[0], None)
            if waiting is not None and not waiting.done():
                if what == "said":
                    waiting.set_result(_sample(*said[1:]))
                else:
                    waiting.set_exception(_error(*said[1:]))

    async def _played(self, number: int, packed: bytes) -> None:
        try:
            self._channel.send(["played", as_bytes(await self._end(number, Job.from_bytes(packed)))])
        except BaseException as error:  # noqa: BLE001 - whatever a user's task raises
            ours = isinstance(error, P2PCastError | asyncio.CancelledError | MemoryError)
            if not ours and self._seen.is_new(error):
                traceback.print_exception(error)
            self._channel.send(["raised", [number, fault_with_place(error), isinstance(error, MemoryError)]])
        finally:
            self._plays.pop(number, None)
            for left in self._tasks.pop(number, ()):
                if left is not asyncio.current_task():
                    left.cancel()

    async def _end(self, number: int, job: Job) -> PlayEnded:
        """Raises what the play raises, and ValueError for a trajectory that no result can have."""
        played = await self._task.play(_Sampler(self, number), job)
        loss_mask = getattr(self._task, "loss_mask", None)
        ended = PlayEnded(
            number,
            np.asarray(played.token_ids, "<u4"),
            np.asarray(played.mask, "u1"),
            np.asarray(played.turns, "<u4"),
            str(played.stop),
            tuple((str(key), str(value)) for key, value in played.tags),
            None if loss_mask is None else np.asarray(loss_mask(job, played.token_ids, played.mask), "u1"),
        )
        try:
            READERS["played"](tuple(as_bytes(ended)))
        except ValueError:
            raise ValueError(
                f"no result has such a trajectory: {len(ended.token_ids)} tokens, {len(ended.turns)} turns, stop"
                f" {ended.stop!r}, {len(ended.tags)} tags"
            ) from None
        return ended

    async def ask(self, play: int, prompt_ids: Sequence[int], *rest: Any) -> Sample:
        """Raises P2PCastError as the parent's sampler does, and ValueError for what is no question."""
        ask = next(self._numbers)
        if len(prompt_ids) > MAX_TOKENS:
            raise RemoteError(f"a prompt of {len(prompt_ids)} tokens: at most {MAX_TOKENS} are possible")
        asked = as_bytes(SampleRequest(play, ask, np.array(prompt_ids, "<u4"), *rest))
        try:
            READERS["ask"](tuple(asked))
        except ValueError:
            raise ValueError(f"no engine can answer seed, temperature, max_tokens, stop_token_ids = {rest}") from None
        answer: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self._asks[ask] = answer
        try:
            self._channel.send(["ask", asked])
            return await answer
        finally:
            self._asks.pop(ask, None)


class _Sampler:
    """The sampler of a single play."""

    def __init__(self, plays: Plays, number: int) -> None:
        self._plays, self._number = plays, number

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        """See ``Sampler``. Experts and most probable tokens stay with the parent."""
        stops = tuple(map(int, stop_token_ids))
        return await self._plays.ask(self._number, prompt_ids, int(seed), float(temperature), int(max_tokens), stops)


def _sample(token_ids: bytes, logprobs: bytes, spans: Sequence[Any], stop: Any) -> Sample:
    named = [Span(Version(*version), *rest) for version, *rest in spans]
    return Sample(np.frombuffer(token_ids, "<u4").tolist(), np.frombuffer(logprobs, "<f8").tolist(), named, stop)


def _error(kind: str, text: str) -> P2PCastError:
    made = getattr(errors, kind, None)
    return (made if isinstance(made, type) and issubclass(made, P2PCastError) else RemoteError)(text)


if __name__ == "__main__":
    main()
