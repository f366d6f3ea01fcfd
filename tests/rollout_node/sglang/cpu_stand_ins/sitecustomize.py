"""Stand-ins for two packages that SGLang imports on a CPU and does not use: torchvision, whose build belongs to another
build of torch, and sgl_kernel, which is for CUDA. Tests put this folder on the PYTHONPATH of a SGLang server. Where
they ask for faults, this module runs the one that makes them: Python imports a single ``sitecustomize``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ABSENT = ("torchvision", "sgl_kernel")


class _Named(type):
    """A class whose attributes are there, whatever their names."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StandIn(ModuleType):
    __path__: Sequence[str] = ()
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
if "P2PCAST_TEST_FAULTS" in os.environ:
    runpy.run_path(str(Path(__file__).parents[2] / "vllm" / "faults" / "sitecustomize.py"))
