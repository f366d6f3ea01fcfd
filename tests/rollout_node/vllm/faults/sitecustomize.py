"""Makes one rank's installer fail as a file requests; tests put this module on the PYTHONPATH of an engine's server.

$P2PCAST_TEST_FAULTS is a folder. A file ``FAULT.RANK`` in it requests that fault once: the affected rank removes the
file. ``hold.RANK`` keeps a hanging rank until it is removed. $P2PCAST_TEST_SOCK_RANK is the peer's socket for one rank
alone, as if that rank ran on another host.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(os.environ.get("P2PCAST_TEST_FAULTS", ""))
INSTALLER = "rollout_node.in_engine.rank_installer"
rank = -1


def requested(fault: str) -> bool:
    try:
        (FOLDER / f"{fault}.{rank}").unlink()
    except OSError:
        return False
    return True


def hang() -> None:
    while (FOLDER / f"hold.{rank}").exists():
        time.sleep(0.02)


def corrupt(installation: Any, name: str) -> None:
    """Flip a bit of every value of a parameter, without p2pcast's knowledge."""
    import torch

    with torch.inference_mode():
        next(s for s in installation.storages.table if name in s.name).words.bitwise_xor_(1)


def patch(module: Any) -> None:
    from rollout_node.in_engine import staged_version

    kind, installed = module.RankInstaller, module.Installation
    made, report = kind.__init__, kind._report
    real_audit, put = kind._audit, staged_version._write
    digests = installed.audit
    prepare, commit, apply = installed.prepare, installed.commit, staged_version.Staged.apply

    def init(self: Any, model: Any, socket: Path, log: Any) -> None:
        global rank
        rank = model.rank
        made(self, model, Path(os.environ.get(f"P2PCAST_TEST_SOCK_{rank}", socket)), log)

    def send_report(self: Any, command: Any, **details: Any) -> None:
        if not requested(f"lost-{command.phase}"):
            report(self, command, **details)

    def audit(self: Any, *args: Any) -> Any:
        if requested("rot-before-audit"):
            corrupt(self._installation, "down_proj")
        return real_audit(self, *args)

    def digest(self: Any, *args: Any, **kwargs: Any) -> Any:
        if requested("audit-hangs"):
            hang()
        return digests(self, *args, **kwargs)

    def stage(self: Any, *args: Any, **kwargs: Any) -> Any:
        if requested("prepare-raises"):
            raise RuntimeError("this rank can't prepare")
        if requested("prepare-hangs"):
            hang()
        if requested("rows-rot"):
            corrupt(self, "embed_tokens")
        if requested("columns-rot"):
            corrupt(self, "down_proj")
        return prepare(self, *args, **kwargs)

    def switch(self: Any, version: Any) -> Any:
        if requested("commit-raises"):
            raise RuntimeError("this rank can't commit")
        if requested("commit-hangs"):
            hang()
        if requested("commit-lies"):
            self._prepared = None
            self._hold(version)
            return 0
        return commit(self, version)

    def write(self: Any, storages: Any) -> int:
        if requested("commit-halfway"):
            left = len(self.chunks) // 2
            assert left

            def failing(*args: Any) -> int:
                nonlocal left
                if not left:
                    staged_version._write = put
                    raise RuntimeError("this rank fails in the middle of its commit")
                left -= 1
                return put(*args)

            staged_version._write = failing
        elif requested("commit-writes-nothing"):
            staged_version._write = lambda words, where, values: staged_version.mark(
                where, words.index_select(0, where)
            )
            try:
                return apply(self, storages)
            finally:
                staged_version._write = put
        return apply(self, storages)

    kind.__init__, kind._report, kind._audit = init, send_report, audit
    installed.prepare, installed.commit, staged_version.Staged.apply = stage, switch, write
    installed.audit = digest


def patch_commands(module: Any) -> None:
    """SGLang's alone."""
    stop = module.Scheduler._stop

    def busy(self: Any, order: Any) -> bool:
        return bool(stop(self, order)) and not requested("busy")

    module.Scheduler._stop = busy


PATCHES = {INSTALLER: patch, "rollout_node.sglang_plugin.scheduler_commands": patch_commands}


class _Loader(importlib.abc.Loader):
    def __init__(self, real: Any, name: str) -> None:
        self._real, self._name = real, name

    def create_module(self, spec: Any) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        PATCHES[self._name](module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._found: set[str] = set()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in PATCHES or name in self._found:
            return None
        self._found.add(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = _Loader(spec.loader, name)
        return spec


if FOLDER.name:
    sys.meta_path.insert(0, _Finder())
