"""A user's hooks, which choose a task's prompts: each is skipped, drawn or repeated before it becomes groups.

The class is named only on the local command line: no message names one. The ledger runs it in a separate process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from p2pcast.daemon.user_code import import_module
from p2pcast.ground import limits
from p2pcast.ground.errors import UsageError
from p2pcast.rollouts.job import Group
from p2pcast.tasks.task import Prompt

MAX_WEIGHT = 16.0
"""Most groups of one prompt at a time."""
MAX_NAME = 256
MAX_STATE_VALUES = 1024
MAX_STATE_NAME = 128
"""Most characters of a name."""
MAX_STATE_BYTES = limits.MIB
"""Most bytes of all values together, as JSON."""


class PromptHooks:
    """Base of hooks, which keep every prompt once. ``state``: values that JSON can hold, by name. The values that
    a call leaves there are kept in the ledger's database, together with the prompts that the call chose.
    """

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self.state = state

    def filter(self, group: Group) -> bool:
        """Whether the group is to be played."""
        return True

    def weight(self, prompt: Prompt, history: Sequence[float]) -> float:
        """Expected number of groups of this prompt, 0 to MAX_WEIGHT: 0.5 draws every second prompt, 2 plays a prompt
        twice. ``history``: mean rewards of the prompt's newest groups, oldest first, those that were dropped included.
        """
        return 1.0


def load_hooks(name: str, folder: Path | None = None) -> type[PromptHooks]:
    """``name``: PKG.MODULE:CLASS. ``folder``: searched for the module first. Raises UsageError."""
    module, colon, path = name.partition(":")
    if not colon or not module or len(name) > MAX_NAME:
        raise UsageError(f"--hooks: write PKG.MODULE:CLASS, with at most {MAX_NAME} characters, not {name[:80]!r}")
    found = getattr(import_module(module, folder, "--hooks"), path, None)
    if not isinstance(found, type):
        raise UsageError(f"--hooks: {module} has no class {path!r}")
    if not issubclass(found, PromptHooks):
        raise UsageError(f"--hooks: {path} does not derive from p2pcast.tasks.prompt_hooks.PromptHooks")
    return found


def state_texts(state: Mapping[str, Any]) -> dict[str, str]:
    """The values of hooks as JSON, by name. Raises UsageError, and what JSON raises for other values."""
    for name in state:
        if type(name) is not str or not 1 <= len(name) <= MAX_STATE_NAME or not name.isprintable():
            raise UsageError(f"a value's name has 1 to {MAX_STATE_NAME} printable characters, not {name!r:.80}")
    texts = {name: json.dumps(value, allow_nan=False) for name, value in state.items()}
    if len(texts) > MAX_STATE_VALUES or sum(map(len, texts.values())) > MAX_STATE_BYTES:
        raise UsageError(f"the state has more than {MAX_STATE_VALUES} values or {MAX_STATE_BYTES} bytes")
    return texts
