"""vLLM's second model runner on a CPU: Triton's own interpreter runs the runner's kernels.

vLLM returns routed experts from that runner alone, and its CPU build takes a Triton with a backend named ``cpu``. PyPI
has no such Triton. This one is the ordinary Triton of ``environments.py`` with a backend of that name that compiles
nothing: with ``TRITON_INTERPRET=1`` Triton computes each kernel in Python, on the CPU's tensors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.environments import python_of

ENVIRONMENT: Final = "triton"
"""Name in ``environments.py``."""
# The interpreter calls no method of the backend: the classes only have to count as complete.
_FILES: Final = {
    "interpreted_backend-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: interpreted-backend\nVersion: 1\n",
    "interpreted_backend-1.dist-info/entry_points.txt": "[triton.backends]\ncpu = interpreted_backend\n",
    "interpreted_backend/__init__.py": "",
    "interpreted_backend/compiler.py": """
from triton.backends.compiler import BaseBackend
class Interpreted(BaseBackend):
    pass
Interpreted.__abstractmethods__ = frozenset()
""",
    "interpreted_backend/driver.py": """
from triton.backends.driver import DriverBase
class Interpreted(DriverBase):
    @classmethod
    def is_active(cls):
        return True
Interpreted.__abstractmethods__ = frozenset()
""",
}


FLAGS: Final = ["--enable-return-routed-experts", "--skip-tokenizer-init"]


def options(folder: Path) -> dict[str, Any]:
    """Keyword arguments of a ``Server`` that can return routed experts."""
    return {"environment": variables(folder), "python": python_of(ENVIRONMENT)}


def variables(folder: Path) -> Mapping[str, str]:
    """Environment variables of a server. The backend is written to ``folder``."""
    for name, text in _FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    before = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": str(folder) if not before else f"{folder}{os.pathsep}{before}",
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
