"""From a task's name to the task.

A name is that of a built-in task, that of an entry point of group ``p2pcast.tasks``, or ``pkg.module:Class``. Settings
may follow it: ``math,tokenizer=/models/m,max_tokens=512`` calls the class with these arguments. Names come from the
local command line alone, never from a message: a message cannot choose code.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast, get_type_hints

from p2pcast.daemon.user_code import import_module
from p2pcast.ground.errors import P2PCastError, UsageError
from p2pcast.tasks.task import Task, check_task

GROUP: Final = "p2pcast.tasks"
BUILT_IN: Final = {
    "sums": "p2pcast.tasks.sums:Sums",
    "recite": "p2pcast.tasks.trial_tasks.recite:Recite",
    "leduc": "p2pcast.tasks.leduc:Leduc",
    "holdem": "p2pcast.tasks.holdem:Holdem",
    "math": "p2pcast.tasks.math_task:Math",
    "verifiers": "p2pcast.tasks.verifiers_bridge:Verifiers",
}
"""A plug-in cannot take these names; they work without installed metadata too."""
HASH_BYTES: Final = 32


def load_task(name: str, folder: Path | None = None) -> Task:
    """``folder``: searched for the class's module first. Raises UsageError."""
    name, given = split_settings(name)
    task = _made(_class(name, folder), name, given)
    if (fault := check_task(task, name)) is not None:
        raise UsageError(f"--task: {fault}; derive it from p2pcast.tasks.task_hash.HashedTask and add what is missing")
    try:
        digest = task.hash
    except P2PCastError as error:
        raise UsageError(f"--task: {error}") from None
    if type(digest) is not bytes or len(digest) != HASH_BYTES:
        raise UsageError(f"--task: the hash of {name} is not {HASH_BYTES} bytes")
    return cast(Task, task)


def missing_settings(name: str, folder: Path | None = None) -> list[str]:
    """Settings that the task needs and the name does not give. Raises UsageError."""
    name, given = split_settings(name)
    parameters = _parameters(_class(name, folder))
    return [key for key, parameter in parameters.items() if parameter.default is parameter.empty and key not in given]


def task_names() -> list[str]:
    """Short names of tasks: built in, or of entry points."""
    return sorted({*BUILT_IN, *importlib.metadata.entry_points(group=GROUP).names})


def _class(name: str, folder: Path | None) -> Any:
    if ":" not in name:
        if name in BUILT_IN:
            name, folder = BUILT_IN[name], None
        else:
            return _entry_point(name)
    module, _, path = name.partition(":")
    found = getattr(import_module(module, folder, "--task"), path, None)
    if not isinstance(found, type):
        raise UsageError(f"--task: {module} has no class {path!r}")
    return found


def _entry_point(name: str) -> Any:
    points = importlib.metadata.entry_points(group=GROUP)
    if name not in points.names:
        known = ", ".join(task_names())
        raise UsageError(f"--task: no task is called {name!r}: give one of {known}, or PKG.MODULE:CLASS")
    try:
        return points[name].load()
    except Exception as error:  # noqa: BLE001 - whatever a plug-in raises
        raise UsageError(f"--task: cannot load {name!r}: {type(error).__name__}: {error}") from None


def split_settings(name: str) -> tuple[str, dict[str, str]]:
    """Of ``NAME,KEY=VALUE,…``: the name and the settings. Raises UsageError."""
    name, *parts = name.split(",")
    given: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier() or key in given:
            raise UsageError(f"--task: {part!r} is no setting: write {name},KEY=VALUE, each key once, without commas")
        given[key] = value
    return name, given


def _made(cls: Any, name: str, given: Mapping[str, str]) -> Any:
    try:
        return cls(**_arguments(cls, name, given))
    except P2PCastError as error:
        raise UsageError(f"--task: {error}") from None
    except Exception as error:  # noqa: BLE001 - whatever a user's class raises
        raise UsageError(f"--task: {name} cannot be made: {type(error).__name__}: {error}") from None


def _arguments(cls: Any, name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """The settings as the class's arguments, each of the type that the class states."""
    known = _parameters(cls)
    for key in given:
        if key not in known:
            raise UsageError(f"task {name} has no setting {key!r}: {', '.join(known) or 'this task takes none'}")
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in given:
            raise UsageError(f"task {name} needs the setting {key}: write {name},{key}=VALUE")
    types = get_type_hints(cls.__init__) if given else {}
    return {key: _converted(value, types.get(key), f"{key}={value} of task {name}") for key, value in given.items()}


def _parameters(cls: Any) -> dict[str, inspect.Parameter]:
    """Of the class's constructor: those that settings may name."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {key: found for key, found in inspect.signature(cls).parameters.items() if found.kind in named}


def _converted(value: str, wanted: Any, place: str) -> Any:
    if wanted is bool:
        if value not in ("yes", "no"):
            raise UsageError(f"{place}: write yes or no")
        return value == "yes"
    if wanted in (int, float):
        try:
            return wanted(value)
        except ValueError:
            raise UsageError(f"{place} is no {'whole number' if wanted is int else 'number'}") from None
    return value
