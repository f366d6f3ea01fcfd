"""A task's hash: BLAKE3 over its code and its settings.

Two nodes whose hashes agree play the same game, so either may judge the other's results. The hash covers the settings,
the files of the task's class and its base classes, and the modules that the class lists. Files of p2pcast's protocol
are excluded. A task that depends on a package's version has this version among its settings.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import blake3
import msgpack

from p2pcast.ground.errors import UsageError

_DOMAIN = b"p2pcast task 1\0"
Settings = Mapping[str, str | int | float | bool]


def code_hash(task: type, settings: Settings, modules: Sequence[str] = ()) -> bytes:
    """Return 32 bytes. ``modules``: further modules whose code counts. Raises UsageError for a class without a source
    file.
    """
    hasher = blake3.blake3(_DOMAIN)
    sources: list[tuple[str, Any]] = [
        (cls.__qualname__, inspect.getmodule(cls) or cls)
        for cls in task.__mro__
        if cls.__module__ not in ("builtins", "typing", "abc", "p2pcast.tasks.task", "p2pcast.tasks.task_hash")
    ]
    for name, code in [*sources, *((module, importlib.import_module(module)) for module in modules)]:
        try:
            source = inspect.getsource(code).encode()
        except (OSError, TypeError):
            raise UsageError(f"the source of task {name} cannot be read: write it to a file") from None
        for part in (name.encode(), source):
            hasher.update(len(part).to_bytes(8, "little") + part)
    hasher.update(msgpack.packb(dict(sorted(settings.items()))))
    return hasher.digest()


class HashedTask:
    """Base class of tasks: computes ``hash`` from the class's file, ``modules`` and ``settings``."""

    modules: ClassVar[Sequence[str]] = ()
    """Names of further modules, besides the class's own, whose code changes plays or rewards."""
    check_cpu_s: ClassVar[float | None] = None
    """CPU time in seconds after which a check counts as hung; with None, only ``--check-time`` limits it."""
    failed_check_reward: ClassVar[float | None] = None
    """Reward of a play whose check hung or crashed; with None, such a play is rejected."""

    @property
    def settings(self) -> Settings:
        """Values, besides the code, that change prompts, plays or rewards."""
        return {}

    @cached_property
    def hash(self) -> bytes:
        return code_hash(type(self), self.settings, self.modules)
