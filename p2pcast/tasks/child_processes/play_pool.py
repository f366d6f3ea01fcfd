"""Plays in processes that can be killed: a task's play may block, crash, take all memory, or never end.

Promises:

- A play that blocks costs itself alone. The others of its process go on in another one, and so does this program.
- A play is blamed only for what it did alone in a new process. Each play has one outcome.
- Sampling stays in this program: a play gets tokens, and its result has what the engine said (``said_turns``).
- A play that begins again is told what the engine has said already: no token is sampled twice, and the play goes the
  same way.
- A process sees no secret of the environment, and has the memory that its limit allows.

Many plays share a process, since plays mostly wait for the engine. A process is blocked when its steps have not gone on
for ``step_s``, which is 30 s by default. This program counts its own waits, so that a machine may sleep meanwhile.
The process that blocks, dies, or sends nonsense is killed with all that it started. The play whose step it was is
suspected, or every play if it was none's. The others begin again together. They leave a step that takes unusually long
before it counts as blocked: see ``_Patience``.

A suspect begins again alone, in a process of its own. There it comes to the turn for which it waits, and joins the
others again; or it breaks that process too, and is blamed. So a wrong suspicion costs time and no blame. Plays of a
suspect's prompt begin alone as well, so that a prompt disturbs the others once. A play that was interrupted
``MAX_BEGUN`` times stays alone.

A play that ran out of memory is suspected too: another may have taken it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import mmap
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import blake3
import msgpack
import numpy as np

from p2pcast.ground.errors import LocalError, RemoteError
from p2pcast.process.background_tasks import spawn
from p2pcast.rollouts.job import Job
from p2pcast.tasks.child_processes.killable_child import BROKEN, PROCESS_BYTES, START_S, ChildDownError, KillableChild
from p2pcast.tasks.child_processes.play_messages import READERS, SLOT_BYTES, PlayEnded, Raised, SampleRequest
from p2pcast.tasks.child_processes.said_turns import SaidTurns
from p2pcast.tasks.task import ForgedPlayError, Sample, Sampler, Trajectory

logger = logging.getLogger("p2pcast.tasks")

STEP_S: Final = 30.0
"""Default time in seconds for one step of a play. A task that searches a game's tree may take long for one."""
LOOKS: Final = 10
"""Number of checks of a process during the time limit of one step."""
LEAVING_LOOKS: Final = 3
"""Looks at the same step after which the other plays leave it, in a task whose steps are short."""
KEPT_PER_LOOK: Final = 0.95
"""Decay per check, so that a long step is forgotten within a few minutes."""
MAX_BEGUN: Final = 8
"""A play that has been started this often stays alone."""
MOST_ALONE: Final = 4
"""Most plays of one pool that are alone at the same time."""
MAX_DOUBTED: Final = 256
"""Most suspected prompts that a pool remembers."""
MAX_ASKS: Final = 1 << 14
"""Most turns that one play requests, including those that it does not keep."""
MAX_AT_ONCE: Final = 256
"""Most turns that one play waits for at the same time."""


BLOCKED: Final = "made no step in time"


class PlayFailedError(LocalError):
    """The play itself is at fault: its code raised an exception, or its process crashed."""


class PlayBlockedError(PlayFailedError):
    """The play blocked its process."""


class Played(NamedTuple):
    """``loss_mask``: the task's, or None if it has none."""

    trajectory: Trajectory
    loss_mask: np.ndarray | None


class _Interrupted(NamedTuple):
    """The play has to begin again, alone if it is suspected. ``why``: of its process; empty for a play that is no
    suspect any more. ``kind``: of the failure, if the play is to blame.
    """

    why: str
    suspected: bool
    kind: type[PlayFailedError] = PlayFailedError


class PlayPool:
    """``processes``: of plays together, beside at most MOST_ALONE for plays alone. ``memory_bytes``: of one process."""

    def __init__(
        self,
        task: str,
        task_hash: bytes,
        *,
        processes: int = 1,
        step_s: float = STEP_S,
        start_s: float = START_S,
        memory_bytes: int = PROCESS_BYTES,
    ) -> None:
        """``task``: its name. ``task_hash``: a process that finds another hash is refused."""
        self._task, self._hash = task, task_hash
        self._step_s, self._start_s, self._memory_bytes = step_s, start_s, memory_bytes
        self._shared = [_Place() for _ in range(processes)]
        self._alone = asyncio.Semaphore(MOST_ALONE)
        self._doubted = _Doubted()
        self._patience = _Patience()
        self._processes: set[_PlayProcess] = set()
        self._closed = False

    async def play(self, sampler: Sampler, job: Job) -> Played:
        """Raises PlayFailedError, ForgedPlayError, ChildDownError, and what the sampler raised."""
        run, alone = _Run(sampler, job), job.prompt in self._doubted
        try:
            for begun in itertools.count(1):
                async with self._process(alone=alone) as process:
                    blamed = self._doubted.is_blamed(job.prompt)
                    outcome = await process.play(run, suspected=alone and begun <= MAX_BEGUN and not blamed)
                if isinstance(outcome, Raised) and outcome.memory and not alone:
                    outcome = _Interrupted("ran out of memory", suspected=True)
                if not isinstance(outcome, _Interrupted):
                    return run.played(outcome)
                if outcome.why and alone:
                    self._doubted.add(job.prompt, blamed=True)
                    raise outcome.kind(f"the play's process {outcome.why}")
                if alone:
                    self._doubted.went_on(job.prompt)
                alone = outcome.suspected or begun >= MAX_BEGUN or job.prompt in self._doubted
            raise AssertionError
        finally:
            await run.close()

    async def close(self) -> None:
        self._closed = True
        for process in list(self._processes):
            await process.close()

    @asynccontextmanager
    async def _process(self, *, alone: bool) -> AsyncIterator[_PlayProcess]:
        """Raises ChildDownError."""
        if not alone:
            place = min(self._shared, key=lambda one: one.plays)
            place.plays += 1
            try:
                async with place.starting:
                    if place.process is None or not place.process.shared:
                        place.process = await self._started()
                process = place.process
                try:
                    yield process
                finally:
                    await process.leave()
            finally:
                place.plays -= 1
            return
        async with self._alone:
            process = await self._started()
            try:
                yield process
            finally:
                await process.close()

    async def _started(self) -> _PlayProcess:
        if self._closed:
            raise ChildDownError("plays have ended")
        memory = os.memfd_create("p2pcast-plays")
        try:
            os.ftruncate(memory, SLOT_BYTES)
            slot = mmap.mmap(memory, SLOT_BYTES)
            words = (self._task, self._hash, str(self._memory_bytes), str(memory))
            module = "p2pcast.tasks.child_processes.play_child"
            child, _ = await KillableChild.of_task("plays", module, *words, start_s=self._start_s, pass_fds=(memory,))
        finally:
            os.close(memory)
        process = _PlayProcess(child, slot, self._step_s, self._doubted, self._patience, self._processes.discard)
        self._processes.add(process)
        return process


@dataclass(slots=True)
class _Place:
    """Of a process that several plays share. ``plays``: that are there, or wait for its start."""

    plays: int = 0
    process: _PlayProcess | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Doubted:
    """Prompts whose plays begin alone, the oldest first: a play of theirs blocked or broke its process. They stay alone
    once a play of the prompt was blamed.
    """

    def __init__(self) -> None:
        self._blamed: dict[bytes, bool] = {}

    def __contains__(self, prompt: bytes) -> bool:
        return prompt in self._blamed

    def is_blamed(self, prompt: bytes) -> bool:
        return self._blamed.get(prompt, False)

    def add(self, prompt: bytes, *, blamed: bool = False) -> None:
        self._blamed[prompt] = blamed or self.is_blamed(prompt)
        if len(self._blamed) > MAX_DOUBTED:
            del self._blamed[next(iter(self._blamed))]

    def went_on(self, prompt: bytes) -> None:
        """A play of the prompt, alone."""
        if not self.is_blamed(prompt):
            self._blamed.pop(prompt, None)


class _Patience:
    """How long plays stay with a step of another one: twice as long as the task's longest step of late, and at least
    LEAVING_LOOKS.
    """

    def __init__(self) -> None:
        self._longest = 0.0
        """In looks."""

    @property
    def looks(self) -> int:
        return max(LEAVING_LOOKS, round(2 * self._longest))

    def went_on(self, looks: int) -> None:
        """``looks``: during which a step was not over."""
        self._longest = max(KEPT_PER_LOOK * self._longest, looks)


class _PlayProcess:
    """``ended``: called at its end."""

    def __init__(
        self,
        child: KillableChild,
        slot: mmap.mmap,
        step_s: float,
        doubted: _Doubted,
        patience: _Patience,
        ended: Callable[[_PlayProcess], object],
    ) -> None:
        self._child, self._slot, self._step_s, self._ended = child, memoryview(slot).cast("Q"), step_s, ended
        self._doubted, self._patience = doubted, patience
        self._plays: dict[int, tuple[_Run, asyncio.Future[PlayEnded | Raised | _Interrupted]]] = {}
        self._begun = 0
        """Plays, which are numbered from 1 on."""
        self._suspect = False
        self.open = self.shared = True
        """``shared``: further plays may come."""
        self._serving = spawn(self._serve(), "plays")

    async def play(self, run: _Run, *, suspected: bool) -> PlayEnded | Raised | _Interrupted:
        """``suspected``: until the play waits for a turn."""
        if not self.open:
            return _Interrupted("ended", suspected=False)
        run.begin()
        self._suspect = suspected
        self._begun += 1
        number = self._begun
        outcome: asyncio.Future[PlayEnded | Raised | _Interrupted] = asyncio.get_running_loop().create_future()
        self._plays[number] = run, outcome
        self._send("play", [number, run.job.to_bytes()])
        try:
            return await outcome
        except asyncio.CancelledError:
            self._send("end", number)
            raise
        finally:
            del self._plays[number]

    async def leave(self) -> None:
        """Close the process once its last play has left."""
        if not self.shared and not self._plays:
            await self.close()

    async def close(self) -> None:
        if self.open:  # else it ends already, and is not to be interrupted in that
            self._serving.cancel()
        await asyncio.wait([self._serving])
        if self._child.alive:  # cancelled before its first step
            await self._child.kill()

    async def _serve(self) -> None:
        """Serve plays until the process fails or is closed."""
        why, broke = "", False
        parts = [asyncio.create_task(part) for part in (self._read(), self._watch(), self._child.wait())]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            broke = True
            why = next(filter(None, [part.result() for part in done]), "")
        finally:
            for part in parts:
                part.cancel()
            self.open = self.shared = False
            self._ended(self)
            stepped = self._slot[0]
            unknown = not 0 < stepped <= self._begun
            if broke:
                self._doubt(stepped)
            try:
                await self._child.kill()
            finally:
                why, kind = why or self._child.end, PlayBlockedError if why == BLOCKED else PlayFailedError
                ended = {number: outcome for number, (_, outcome) in self._plays.items() if not outcome.done()}
                for number, outcome in ended.items():
                    outcome.set_result(_Interrupted(why, unknown or stepped == number, kind))
                if ended:
                    logger.warning("a process of plays %s; plays that begin again: %d", why, len(ended))

    async def _read(self) -> str:
        """Read until the process sends an invalid message, or exits; then return an empty text."""
        try:
            while True:
                what, said = await self._child.answer()
                if (read := READERS.get(what)) is None:
                    raise ValueError("a message of no kind")
                self._take(read(said))
        except asyncio.IncompleteReadError:
            return ""
        except (*BROKEN, TypeError) as error:
            return f"sent nonsense ({type(error).__name__})"

    def _take(self, message: SampleRequest | PlayEnded | Raised) -> None:
        run, outcome = self._plays.get(message.play, (None, None))
        if run is None or outcome is None or outcome.done():  # a play that was cancelled
            return
        if not isinstance(message, SampleRequest):
            outcome.set_result(message)
            return
        try:
            turn = run.ask(message)
            turn.add_done_callback(partial(self._answer, message.ask))
            if self._suspect and not turn.done():
                outcome.set_result(_Interrupted("", suspected=False))
        except ForgedPlayError as error:
            outcome.set_result(Raised(message.play, str(error), memory=False))
            self._send("end", message.play)

    def _answer(self, ask: int, turn: asyncio.Task[Sample]) -> None:
        if turn.cancelled() or (error := turn.exception()) is not None:
            what = ("RetryableError", "cancelled") if turn.cancelled() else (type(error).__name__, str(error))
            self._send("no answer", [ask, *what])
            return
        sample = turn.result()
        token_ids, logprobs = np.array(sample.token_ids, "<u4"), np.array(sample.logprobs, "<f8")
        self._send("said", [ask, token_ids.tobytes(), logprobs.tobytes(), list(sample.spans), sample.stop])

    async def _watch(self) -> str:
        """Wait until the process stops making steps."""
        steps, looks = -1, 0
        while looks < LOOKS:
            await asyncio.sleep(self._step_s / LOOKS)
            if self._slot[1] == steps and self._plays:
                looks += 1
                if looks == self._patience.looks and self.shared:
                    self._clear_for(self._slot[0])
                continue
            self._patience.went_on(looks)
            steps, looks = self._slot[1], 0
            self._send("alive", None)
        return BLOCKED

    def _clear_for(self, stepped: int) -> None:
        """Let the other plays leave the process if this one's step takes long."""
        if stepped not in self._plays:
            return
        self.shared = False
        self._doubt(stepped)
        for number, (_, outcome) in self._plays.items():
            if number != stepped and not outcome.done():
                outcome.set_result(_Interrupted("", suspected=False))
                self._send("end", number)

    def _doubt(self, stepped: int) -> None:
        if stepped in self._plays:
            self._doubted.add(self._plays[stepped][0].job.prompt)

    def _send(self, what: str, said: Any) -> None:
        if self.open:
            self._child.send(msgpack.packb([what, said]))


_Key = tuple[bytes, int, float, int, tuple[int, ...]]


class _Run:
    """One play, in whichever processes, with its questions and the answers of the engine."""

    def __init__(self, sampler: Sampler, job: Job) -> None:
        self._sampler, self.job = sampler, job
        self._turns = SaidTurns(job)
        self._asked: dict[_Key, list[asyncio.Task[Sample]]] = {}
        self._again: Counter[_Key] = Counter()
        self._asks = 0
        self._failed: Exception | None = None

    def begin(self) -> None:
        self._again.clear()
        self._failed = None
        for key, turns in self._asked.items():
            self._asked[key] = [one for one in turns if not (one.done() and (one.cancelled() or one.exception()))]

    def ask(self, ask: SampleRequest) -> asyncio.Task[Sample]:
        """The engine's answer; the same one to a question that was asked before the play began again. Raises
        ForgedPlayError for more questions than a play may have.
        """
        key = (
            blake3.blake3(ask.prompt_ids.tobytes()).digest(),
            ask.seed,
            ask.temperature,
            ask.max_tokens,
            tuple(ask.stop_token_ids),
        )
        said = self._asked.setdefault(key, [])
        self._again[key] += 1
        if len(said) < self._again[key]:
            self._asks += 1
            waiting = sum(not one.done() for tasks in self._asked.values() for one in tasks)
            if self._asks > MAX_ASKS or waiting >= MAX_AT_ONCE:
                raise ForgedPlayError(f"a play asks for at most {MAX_ASKS} turns, {MAX_AT_ONCE} of them at once")
            said.append(asyncio.create_task(self._sample(ask), name="turn"))
        return said[self._again[key] - 1]

    async def _sample(self, ask: SampleRequest) -> Sample:
        self._failed = None
        try:
            sample = await self._sampler.sample(
                tuple(ask.prompt_ids.tolist()),
                seed=ask.seed,
                temperature=ask.temperature,
                max_tokens=ask.max_tokens,
                stop_token_ids=ask.stop_token_ids,
            )
            if not 0 < len(sample.token_ids) == len(sample.logprobs):
                raise RemoteError(f"the engine answered with {len(sample.token_ids)} tokens")
        except Exception as error:
            self._failed = error
            raise
        self._turns.add(ask.prompt_ids, ask.temperature, sample)
        return sample

    def played(self, outcome: PlayEnded | Raised) -> Played:
        """Raises PlayFailedError, ForgedPlayError, and what the sampler raised if the play ended so."""
        if isinstance(outcome, Raised):
            raise PlayFailedError(f"the play raised {outcome.text}") if self._failed is None else self._failed
        return Played(self._turns.trajectory(outcome), outcome.loss_mask)

    async def close(self) -> None:
        """The engine is asked for no more turns."""
        waiting = [one for turns in self._asked.values() for one in turns if not one.done()]
        for one in waiting:
            one.cancel()
        if waiting:
            await asyncio.wait(waiting)
