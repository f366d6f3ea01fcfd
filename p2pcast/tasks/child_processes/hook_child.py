"""The child of the ledger's choice of prompts: runs hooks, as ``python -m p2pcast.tasks.child_processes.hook_child``.

    first     ["ready", null] or ["failed", text]
    request   ["begin", texts of the state's values by name], once and first
              ["weight", [prompt, max_tokens, history]] | ["filter", group] | ["state", null]
    answer    ["begun", null] | ["weight", number] | ["kept", boolean] | ["state", texts by name]
              or ["failed", text]

Messages are those of ``child_channel``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from p2pcast.ground.errors import P2PCastError
from p2pcast.rollouts.job import Group
from p2pcast.tasks.child_processes.child_channel import ChildChannel, limit_memory
from p2pcast.tasks.child_processes.child_faults import fault_with_place
from p2pcast.tasks.prompt_hooks import PromptHooks, load_hooks, state_texts
from p2pcast.tasks.task import Prompt


def main() -> None:
    """argv: the hooks' name, the memory limit in bytes, the process id of the parent."""
    name, memory_bytes, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    channel = ChildChannel(parent)
    try:
        made = load_hooks(name, Path.cwd())
    except P2PCastError as error:
        channel.send(["failed", fault_with_place(error)])
        return
    limit_memory(memory_bytes)
    hooks: _Hooks | None = None
    channel.send(["ready", None])
    for what, words in channel.requests():
        try:
            if hooks is None:
                hooks = _Hooks(made, words)
                channel.send(["begun", None])
            else:
                channel.send(hooks.answer(what, words))
        except BaseException as error:  # noqa: BLE001 - whatever a user's hooks raise
            channel.send(["failed", fault_with_place(error)])


class _Hooks:
    def __init__(self, made: type[PromptHooks], texts: dict[str, str]) -> None:
        self._state = {name: json.loads(text) for name, text in texts.items()}
        self._hooks = made(self._state)

    def answer(self, what: str, words: Any) -> list[Any]:
        if what == "weight":
            prompt, max_tokens, history = words
            return ["weight", float(self._hooks.weight(Prompt(prompt, max_tokens), history))]
        if what == "filter":
            return ["kept", bool(self._hooks.filter(Group.from_bytes(words)))]
        return ["state", state_texts(self._state)]


if __name__ == "__main__":
    main()
