"""The former place of ``trainer_node.frameworks``: each of its modules can still be imported from here, and run by
``python -m``, with a DeprecationWarning. This package goes with 0.3.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Final

MOVED: Final = {"p2pcast.adapters": "trainer_node.frameworks"}
"""Former package → the package that has its modules."""


class _Moved(MetaPathFinder, InspectLoader):
    """Finds a module of a former package at its new place."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = _new_name(fullname)
        if not name or (found := importlib.util.find_spec(name)) is None:
            return None
        warnings.warn(f"{fullname} has moved to {name}", DeprecationWarning, stacklevel=2)
        package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=found.origin, is_package=package, loader_state=found)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(_new_name(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        """The module is the new one, which has run: it gets its own spec again."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname: str) -> CodeType | None:
        return self._loader(fullname).get_code(_new_name(fullname))

    def get_source(self, fullname: str) -> str | None:
        return self._loader(fullname).get_source(_new_name(fullname))

    def _loader(self, fullname: str) -> InspectLoader:
        found = importlib.util.find_spec(_new_name(fullname))
        assert found is not None
        assert isinstance(found.loader, InspectLoader)
        return found.loader


def _new_name(fullname: str) -> str:
    """Empty for a module that has not moved."""
    package = next((old for old in MOVED if fullname.startswith(f"{old}.")), None)
    return "" if package is None else MOVED[package] + fullname.removeprefix(package)


sys.meta_path.insert(0, _Moved())  # before files below a package that has moved
