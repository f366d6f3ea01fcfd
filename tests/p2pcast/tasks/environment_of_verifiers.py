"""A virtual environment with verifiers, apart from the project's: verifiers holds openai and mcp at older versions.

Its folder names the hash of all that it was made from, and is made once.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
INSTALL_S = 900.0
TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")


def python_with_verifiers() -> Path:
    """The environment's interpreter."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["verifiers"], *TOOLS]
    stamp = hashlib.sha256(json.dumps([wanted, sys.version]).encode()).hexdigest()[:16]
    folder = ROOT / "build" / f"verifiers-{stamp}"
    python = folder / "bin" / "python"
    if not (folder / "whole").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=INSTALL_S)
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *wanted]
        subprocess.run(command, check=True, timeout=INSTALL_S)
        (folder / "whole").touch()
    return python
