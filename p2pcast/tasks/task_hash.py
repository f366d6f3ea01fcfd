"""A task's hash: BLAKE3 over its code and its settings.

Two nodes whose hashes agree play the same game, so either may judge the other's results. The hash covers the settings,
the files of the task's class and its base classes, and the modules that the class lists. Files of p2pcast's protocol
are excluded. Of p2pcast's own modules, which never read their docstrings, docstrings and comments do not count; other
tasks may make prompts of theirs. A task that depends on a package's version has this version among its settings.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import tokenize
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
            source = inspect.getsource(code)
        except (OSError, TypeError):
            raise UsageError(f"the source of task {name} cannot be read: write it to a file") from None
        if code.__name__.startswith("p2pcast."):
            source = _without_texts(source)
        for part in (name.encode(), source.encode()):
            hasher.update(len(part).to_bytes(8, "little") + part)
    hasher.update(msgpack.packb(dict(sorted(settings.items()))))
    return hasher.digest()


def _without_texts(source: str) -> str:
    """Return a module's source without docstrings and comments, and without the lines that held nothing else."""
    lines = source.split("\n")
    cuts = [
        (token.start, token.end)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            ends = ((text.lineno, text.col_offset), (text.end_lineno or 0, text.end_col_offset or 0))
            first, last = ((line, len(lines[line - 1].encode()[:at].decode())) for line, at in ends)
            cuts.append((first, last))
    for (first_line, begin), (last_line, end) in sorted(cuts, reverse=True):
        left = (lines[first_line - 1][:begin] + lines[last_line - 1][end:]).rstrip()
        lines[first_line - 1 : last_line] = [left] if left else []
    return "\n".join(lines)


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
