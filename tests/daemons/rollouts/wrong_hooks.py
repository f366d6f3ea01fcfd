"""Hooks that raise."""

from __future__ import annotations

from p2pcast.rollouts.job import Group
from p2pcast.tasks.prompt_hooks import PromptHooks


class Wrong(PromptHooks):
    def filter(self, group: Group) -> bool:
        raise ValueError("a wrong turn")
