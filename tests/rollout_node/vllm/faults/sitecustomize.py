"""Put on PYTHONPATH of a vLLM server by tests: makes one rank's p2pcast engine fail in the way that a file asks for.

$P2PCAST_TEST_FAULTS is a folder; a file in it named ``FAULT.RANK`` is a fault that is due, once: whoever meets it takes the
file away. ``hold.RANK`` keeps a rank that hangs, until it is removed. $P2PCAST_TEST_SOCK_RANK is the peer's socket for one
rank alone, as if it ran on another host.
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
ENGINE = "rollout_node.vllm_plugin.engine"
rank = -1


def due(fault: str) -> bool:
    try:
        (FOLDER / f"{fault}.{rank}").unlink()
    except OSError:
        return False
    return True


def hang() -> None:
    while (FOLDER / f"hold.{rank}").exists():
        time.sleep(0.02)


def rot(installation: Any, name: str) -> None:
    """A bit of every value of a parameter, beside p2pcast."""
    import torch

    with torch.inference_mode():
        next(s for s in installation.storages.table if name in s.name).words.bitwise_xor_(1)


def patch(engine: Any) -> None:
    from rollout_node.vllm_plugin import staging

    kind, installed = engine.P2PCastEngine, engine.Installation
    made, report = kind.__init__, kind._report
    look, put = kind._audit, staging._put
    prepare, commit, apply = installed.prepare, installed.commit, staging.Staged.apply

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        global rank
        worker = args[1].parallel_config.rank
        os.environ["P2PCAST_SOCK"] = os.environ.get(f"P2PCAST_TEST_SOCK_{worker}", os.environ["P2PCAST_SOCK"])
        made(self, *args, **kwargs)
        rank = self._rank

    def tell(self: Any, asked: Any, **details: Any) -> None:
        if not due(f"lost-{asked.phase}"):
            report(self, asked, **details)

    def audit(self: Any, *args: Any) -> Any:
        if due("rot-before-audit"):
            rot(self._installation, "down_proj")
        return look(self, *args)

    def stage(self: Any, *args: Any, **kwargs: Any) -> Any:
        if due("prepare-raises"):
            raise RuntimeError("this rank can't prepare")
        if due("prepare-hangs"):
            hang()
        if due("rows-rot"):
            rot(self, "embed_tokens")
        if due("columns-rot"):
            rot(self, "down_proj")
        return prepare(self, *args, **kwargs)

    def switch(self: Any, version: Any) -> Any:
        if due("commit-raises"):
            raise RuntimeError("this rank can't commit")
        if due("commit-hangs"):
            hang()
        if due("commit-lies"):
            self._next = None
            self._hold(version)
            return 0
        return commit(self, version)

    def write(self: Any, storages: Any) -> int:
        if due("commit-halfway"):
            left = len(self.chunks) // 2
            assert left

            def failing(*args: Any) -> int:
                nonlocal left
                if not left:
                    staging._put = put
                    raise RuntimeError("this rank fails in the middle of its commit")
                left -= 1
                return put(*args)

            staging._put = failing
        elif due("commit-writes-nothing"):
            staging._put = lambda words, where, values: staging.mark(where, words.index_select(0, where))
            try:
                return apply(self, storages)
            finally:
                staging._put = put
        return apply(self, storages)

    kind.__init__, kind._report, kind._audit = init, tell, audit
    installed.prepare, installed.commit, staging.Staged.apply = stage, switch, write


class _Loader(importlib.abc.Loader):
    def __init__(self, real: Any) -> None:
        self._real = real

    def create_module(self, spec: Any) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = _Loader(spec.loader)
        return spec


if FOLDER.name:
    sys.meta_path.insert(0, _Finder())
