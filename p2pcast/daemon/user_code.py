"""Other people's code in this program and in child processes: modules that a user names, and what a child inherits.

Guarantees: the current folder is searched for the one module that the local command line names, and only where no other
user could have placed or changed it. Python itself would search the folder for every import of a child, so that in
`/tmp` any user's ``numpy.py`` would run. A child inherits the variables of a list and no secret.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

from p2pcast.files.private_folders import check_above, check_shared
from p2pcast.ground.errors import LocalError, UsageError

TASK_PREFIX: Final = "P2PCAST_TASK_"
"""Variables that are meant for a user's task or hooks begin with this."""
_INHERITED: Final = re.compile(
    rf"PATH|HOME|USER|LOGNAME|SHELL|TZ|TMPDIR|LANG|LC_\w+|PYTHON\w+|VIRTUAL_ENV|LD_LIBRARY_PATH|XDG_\w+|{TASK_PREFIX}\w+"
    r"|(OMP|MKL|NUMBA|OPENBLAS)_\w+|(CUDA|NVIDIA|NCCL|HIP|ROCR|TORCH|TORCHINDUCTOR|TRITON|VLLM)_\w+|HF_\w+"
    r"|TRANSFORMERS_\w+|TOKENIZERS_\w+|SSL_CERT_\w+"
)
_SECRET: Final = re.compile(r"TOKEN|SECRET|PASSWORD|API_?KEY|CREDENTIAL", re.IGNORECASE)


def child_environment() -> dict[str, str]:
    """Return the environment for a child process that runs a user's code, or a library that does."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if _INHERITED.fullmatch(name) and (name.startswith(TASK_PREFIX) or not _SECRET.search(name))
    }
    places = [place for place in kept.pop("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(place)]
    return kept | {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": os.pathsep.join(places)} if places else {})


def import_module(module: str, folder: Path | None, option: str) -> ModuleType:
    """Import a user's module, searching ``folder`` first. Raises UsageError, whose message begins with ``option``."""
    try:
        if folder is not None and (places := _places(module, folder)):
            for place in (folder, *places):
                check_shared(place)
            check_above(places[0].absolute())
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
        return importlib.import_module(module)
    except LocalError as error:
        raise UsageError(f"{option}: {module!r} is not imported: {error}") from None
    except Exception as error:  # noqa: BLE001 - whatever a user's module raises
        raise UsageError(f"{option}: cannot import {module!r}: {type(error).__name__}: {error}") from None


def _places(module: str, folder: Path) -> list[Path]:
    """Return the module's packages and files in the folder; none if a different folder on Python's path has them."""
    found, place = [], folder
    for name in module.split("."):
        file, place = place / f"{name}.py", place / name
        found += [one for one in (place, place / "__init__.py", file) if one.exists()]
    return found
