"""Hooks that choose among prompts, and hooks that fail in every way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from p2pcast.rollouts.job import Group
from p2pcast.tasks.prompt_hooks import PromptHooks
from p2pcast.tasks.task import Prompt


class Odd(PromptHooks):
    """Keeps every second group, and counts."""

    def filter(self, group: Group) -> bool:
        self.state["seen"] = self.state.get("seen", 0) + 1
        return bool(self.state["seen"] % 2)


class Twice(PromptHooks):
    def weight(self, prompt: Prompt, history: Sequence[float]) -> float:
        return 2


class Quarter(PromptHooks):
    def weight(self, prompt: Prompt, history: Sequence[float]) -> float:
        return 0.25


class Learnt(PromptHooks):
    """Leaves out a prompt whose last group had the best reward; remembers each history."""

    def weight(self, prompt: Prompt, history: Sequence[float]) -> float:
        self.state[prompt.prompt.hex()] = list(history)
        return 0.0 if history and history[-1] == 1.0 else 1.0


class Raises(PromptHooks):
    def filter(self, group: Group) -> bool:
        self.state["seen"] = self.state.get("seen", 0) + 1
        if self.state["seen"] > 40:
            raise ValueError("a wrong turn")
        return True


class RaisesAtOnce(PromptHooks):
    def __init__(self, state: Any) -> None:
        raise SystemExit(3)


class NotANumber(PromptHooks):
    def weight(self, prompt: Prompt, history: Sequence[float]) -> float:
        return float("nan")


class TooMuch(PromptHooks):
    def weight(self, prompt: Prompt, history: Sequence[float]) -> float:
        return 17


class KeepsAll(PromptHooks):
    def filter(self, group: Group) -> bool:
        self.state["all"] = "x" * (1 << 20)
        return True


class KeepsObjects(PromptHooks):
    def filter(self, group: Group) -> bool:
        self.state["group"] = group
        return True


class KeepsNumbers(PromptHooks):
    def filter(self, group: Group) -> bool:
        self.state[7] = 1  # type: ignore[index]
        return True


class Nothing(PromptHooks):
    def filter(self, group: Group) -> bool:
        return False


class Hangs(PromptHooks):
    """Busy without end, with a child of its own, whose process id is in the file ``hung``."""

    def filter(self, group: Group) -> bool:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path("hung").write_text(str(child.pid))
        while True:
            time.sleep(0)


class Dies(PromptHooks):
    def filter(self, group: Group) -> bool:
        os._exit(3)


class TakesAllMemory(PromptHooks):
    def filter(self, group: Group) -> bool:
        return bool(bytearray(1 << 34))


class ReadsTheEnvironment(PromptHooks):
    def filter(self, group: Group) -> bool:
        self.state["names"] = sorted(os.environ)
        print("noise on stdout")
        return True
