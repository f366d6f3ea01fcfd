"""Environments of verifiers: a guessing game of several turns, and tasksets that the bridge refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 3)

    @vf.stop
    async def resigned(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "stop"


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        secret = task.data.secret
        async with agents.player.interaction(task) as exchange:
            segment = await exchange.turn()
            while not segment.terminated and segment.last_reply != str(secret):
                low = segment.last_reply.isdigit() and int(segment.last_reply) < secret
                segment = await exchange.turn("More." if low else "Less.")
        exchange.trace.record_reward("found", float(exchange.trace.last_reply == str(secret)))


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> Iterator[GuessTask]:
        for secret in range(5):
            yield GuessTask(GuessData(secret=secret, prompt="Guess.", system_prompt="Play."), self.config.task)


__all__ = ["GuessEnv", "GuessTaskset"]
