"""Task ``verifiers``: an environment of the package verifiers, played with a sampler. Needs the extra ``verifiers``.

The environment's own program runs here. It opens an exchange with its agent, and this module answers for the agent
with the policy's turns. Messages become tokens by the model's chat template; the policy's tokens are never encoded
again. The reward is the sum of the environment's weighted rewards. The ledger runs the same program again on the
finished tokens, so an environment has to depend on its task and on the answers alone.

Refused are environments that need more than an exchange of text: several agents, tools, containers, judges.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, Final, Literal, Protocol

import numpy as np

from p2pcast.ground.errors import LocalError, RemoteError
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.rollout_fields import MAX_TOKENS
from p2pcast.tasks.chat_tokens import ChatTokens
from p2pcast.tasks.play import Play, Replay
from p2pcast.tasks.seeded_draws import draw_below
from p2pcast.tasks.task import ForgedPlayError, Prompt, Sampler, Trajectory
from p2pcast.tasks.task_hash import Settings
from p2pcast.tasks.text_task import TextTask

THOUGHT_ENDS: Final = "</think>"
SKIPPED: Final = 4096
"""Of an endless taskset: most tasks that a seed leaves out at the start."""


class Voice(Protocol):
    """The policy's side of an exchange. ``left``: tokens that the policy may still sample."""

    left: int

    async def turn(self, heard: Sequence[int]) -> Sequence[int]:
        """The policy's turn after the environment's tokens."""


class Verifiers(TextTask):
    """``taskset``: a taskset's name, as for ``verifiers eval``. ``environment``: the name of an environment that plays
    it; the taskset's own by default. ``turn_tokens``: most tokens of a turn. ``max_turns``: most turns of a play.
    """

    name = "verifiers"
    failed_check_reward = 0.0

    def __init__(
        self, tokenizer: str, taskset: str, environment: str = "", turn_tokens: int = 1024, max_turns: int = 8
    ) -> None:
        super().__init__(tokenizer)
        if min(turn_tokens, max_turns) < 1 or turn_tokens * max_turns > MAX_TOKENS:
            raise LocalError(f"turn_tokens and max_turns of task verifiers: at most {MAX_TOKENS} tokens in all")
        self._env = _environment(taskset, environment)
        self._task_class = type(self._env.taskset).task_type()
        self._seat = _seat(self._env)
        _check_plain(self._env, self._task_class)
        self.turn_tokens, self.max_turns = turn_tokens, max_turns
        classes = (type(self._env), type(self._env.taskset), self._task_class)
        self.modules = (*TextTask.modules, *sorted({found.__module__ for found in classes}))  # type: ignore[misc]

    @property
    def settings(self) -> Settings:
        config = self._env.config.model_dump_json(exclude_defaults=True)
        return {
            **super().settings,
            "verifiers": importlib.metadata.version("verifiers"),
            "environment": config,
            "turn_tokens": self.turn_tokens,
            "max_turns": self.max_turns,
        }

    def jobs(self, seed: int) -> Iterator[Prompt]:
        """Each pass over a finite taskset has an order of its own."""
        if not self._env.taskset.bounded:
            for found in islice(self._env.taskset, draw_below(SKIPPED, "verifiers", seed), None):
                yield self._prompt(found)
            return
        known, passes = [self._prompt(found) for found in self._env.taskset], 0
        if not known:
            raise LocalError("the taskset of task verifiers has no task")
        while True:
            drawn = [draw_below(1 << 64, "verifiers", seed, passes, number) for number in range(len(known))]
            yield from (known[number] for number in sorted(range(len(known)), key=drawn.__getitem__))
            passes += 1

    def _prompt(self, task: Any) -> Prompt:
        return Prompt(task.data.model_dump_json().encode(), self.turn_tokens * self.max_turns)

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        voice = _Sampled(self, sampler, job)
        await self._played(job, voice)
        if voice.play is None:
            raise LocalError("the environment of task verifiers asked the policy nothing")
        return voice.play.end(voice.stop)

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        voice = _Replayed(self, job, Replay(token_ids, mask))
        found = _run(self._played(job, voice))
        if voice.forged is not None:
            raise voice.forged
        voice.replay.end()
        return found

    async def _played(self, job: Job, voice: Voice) -> float:
        """Runs the environment's program. The reward of its trace."""
        from verifiers.v1 import EnvInfo, Episode, TraceTask

        task = self._task_of(job)
        row = TraceTask(type=type(task).__name__, data=task.data)
        episode = Episode(env=EnvInfo(id=self._env.config.env_id), task=row)
        agents = _Agents()
        setattr(agents, self._seat, _Agent(self, voice, self._seat, episode))
        await self._env.setup(agents)
        await self._env.run(task, agents)
        await self._env.finalize(task, episode)
        if len(episode.traces) != 1:
            raise LocalError(f"the environment of task verifiers played {len(episode.traces)} exchanges instead of one")
        return float(episode.traces[0].reward)

    def _task_of(self, job: Job) -> Any:
        try:
            data = self._task_class.data_type().model_validate_json(job.prompt)
        except ValueError:
            raise RemoteError("the job's prompt is no task of this taskset") from None
        return self._task_class(data, self._env.taskset.config.task)


class _Sampled:
    """The policy's turns come from a sampler."""

    def __init__(self, task: Verifiers, sampler: Sampler, job: Job) -> None:
        self._task, self._sampler, self._job = task, sampler, job
        self.play: Play | None = None
        self.left = job.max_tokens
        self.stop: Literal["length", "task"] = "task"

    async def turn(self, heard: Sequence[int]) -> Sequence[int]:
        if self.play is None:
            self.play = Play(heard)
        else:
            self.play.add_environment(heard)
        stops = self._task.stop_token_ids
        sample = await self.play.turn(self._sampler, self._job, self._task.turn_tokens, stops)
        self.left = self._job.max_tokens - self.play.sampled
        self.stop = "length" if sample.stop == "length" else "task"
        return sample.token_ids


class _Replayed:
    """The policy's turns are read from a finished play."""

    def __init__(self, task: Verifiers, job: Job, replay: Replay) -> None:
        self._task, self.replay = task, replay
        self.left = job.max_tokens
        self.forged: ForgedPlayError | None = None
        """Kept here too: an environment's program may catch errors."""

    async def turn(self, heard: Sequence[int]) -> Sequence[int]:
        try:
            self.replay.environment(heard)
            said = self.replay.turn(min(self._task.turn_tokens, self.left), self._task.stop_token_ids)
        except ForgedPlayError as error:
            self.forged = error
            raise
        self.left -= len(said)
        return said


class _Agents:
    """One attribute: the agent, by the name that the environment gives it."""


class _Agent:
    """The parts of verifiers' agent that programs of environments use."""

    def __init__(self, bridge: Verifiers, voice: Voice, name: str, episode: Any) -> None:
        self._bridge, self._voice, self.name, self._episode = bridge, voice, name, episode
        self.trainable = True

    async def run(self, task: Any) -> Any:
        async with self.interaction(task) as exchange:
            await exchange.turn()
        return exchange.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[_Exchange]:
        exchange = _Exchange(self._bridge.chat, self._bridge.max_turns, self._voice, self.name, task)
        yield exchange
        exchange.trace.is_completed = exchange.trace.ok = True
        await task.score(exchange.trace)
        self._episode.traces.append(exchange.trace)


class _Exchange:
    """An exchange of text, recorded as verifiers' trace. It is over after a turn that did not end by itself, when
    turns or tokens are used up, or when one of the task's stop conditions holds.
    """

    def __init__(self, chat: ChatTokens, turns: int, voice: Voice, name: str, task: Any) -> None:
        from verifiers.v1 import AgentConfig, AgentInfo, Trace, TraceTask

        self._chat, self._voice, self._task = chat, voice, task
        self._messages = _opening(task.data)
        self._said: Sequence[int] = ()
        self._left = turns
        self._over = False
        row = TraceTask(type=type(task).__name__, data=task.data)
        self.trace = Trace(task=row, agent=AgentInfo(config=AgentConfig(), name=name))

    async def turn(self, message: Any = None) -> Any:
        from verifiers.v1 import Segment

        if self._over:
            return Segment(messages=[], terminated=True)
        new = [] if message is None else _messages(message)
        self._messages += new
        if self._said:
            heard = self._chat.reply(self._said, "\n\n".join(str(found.content) for found in new))
        else:
            heard = self._chat.encode(self._chat.render([_plain(found) for found in self._messages]))
        self._said = await self._voice.turn(heard)
        answer = self._record()
        self._left -= 1
        spent = self._left < 1 or self._voice.left < 1
        self._over = spent or not self._chat.ended(self._said) or await self._stopped()
        return Segment(messages=[answer])

    def _record(self) -> Any:
        from verifiers.v1 import AssistantMessage, Response
        from verifiers.v1.graph import prepare_turn

        thought, closed, rest = self._chat.spoken(self._said).rpartition(THOUGHT_ENDS)
        reasoning = thought.removeprefix("<think>").strip() if closed else None
        answer = AssistantMessage(content=rest.strip(), reasoning_content=reasoning)
        finished = "stop" if self._chat.ended(self._said) else "length"
        response = Response(id="", created=0, model=self.trace.agent.name, message=answer, finish_reason=finished)
        prepare_turn(self.trace, list(self._messages)).commit(response)
        self._messages.append(answer)
        return answer

    async def _stopped(self) -> bool:
        from verifiers.v1 import Trace
        from verifiers.v1.session import call_hook

        return any([await call_hook(hook, {Trace: self.trace}) for hook in self._task.hooks("stop")])


def _opening(data: Any) -> list[Any]:
    from verifiers.v1 import SystemMessage

    system = [] if data.system_prompt is None else [SystemMessage(content=data.system_prompt)]
    return system + ([] if data.prompt is None else _messages(data.prompt))


def _messages(given: Any) -> list[Any]:
    from verifiers.v1 import UserMessage

    return [UserMessage(content=given)] if isinstance(given, str) else list(given)


def _plain(message: Any) -> dict[str, str]:
    if not isinstance(message.content, str) or message.role not in ("system", "user", "assistant"):
        raise LocalError("task verifiers plays environments that speak text alone")
    return {"role": message.role, "content": message.content}


def _environment(taskset: str, environment: str) -> Any:
    try:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError:
        raise LocalError("task verifiers needs the package verifiers: pip install 'p2pcast[verifiers]'") from None
    named: dict[str, Any] = {"taskset": {"id": taskset}}
    if environment:
        named["id"] = environment
    try:
        return load_environment(resolve_env_config(named))
    except Exception as error:  # noqa: BLE001 - whatever an environment's code raises
        why = f"{type(error).__name__}: {error}"
        raise LocalError(f"taskset={taskset} of task verifiers cannot be loaded: {why}") from None


def _seat(env: Any) -> str:
    """The name of the environment's only agent."""
    from verifiers.v1 import AgentConfig

    names = [name for name, value in env.config if isinstance(value, AgentConfig)]
    if len(names) != 1:
        raise LocalError(f"task verifiers plays environments with one agent; this one has {len(names)}")
    return str(names[0])


def _check_plain(env: Any, task_class: Any) -> None:
    """Raises LocalError for a task that needs more than an exchange of text."""
    from verifiers.v1 import Task
    from verifiers.v1.utils.decorators import discover_decorated

    config = env.taskset.config
    sample = task_class(task_class.data_type().model_construct(), config.task)
    hooks = [*sample.hooks("reward"), *sample.hooks("metric")]
    empty = inspect.Parameter.empty
    runtimes = [inspect.signature(hook).parameters.get("runtime") for hook in hooks]
    lacks = {
        "a container": task_class.NEEDS_CONTAINER,
        "tools": env.taskset.toolsets(config) or task_class.toolsets(config.task),
        "judges": config.task.judges,
        "steps in a runtime": any(
            getattr(task_class, name) is not getattr(Task, name) for name in ("setup", "finalize")
        )
        or any(found is not None and found.default is empty for found in runtimes),
        "interceptors": discover_decorated(sample, "intercept"),
    }
    for what, needed in lacks.items():
        if needed:
            raise LocalError(f"the taskset needs {what}, which task verifiers does not have")


def _run(played: Coroutine[Any, Any, float]) -> float:
    """Runs a coroutine to its end, beside an event loop that may run in this thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, played).result()
