"""The machine and the package versions of a run."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

PACKAGES: Final = (
    "p2pcast",
    "numpy",
    "numba",
    "uvloop",
    "aiohttp",
    "cryptography",
    "zstandard",
    "torch",
    "libtorrent",
    "shardcast",
)


def machine() -> dict[str, Any]:
    """``load``: mean number of processes that wanted a core in the last minute; a high load affects the figures."""
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "load": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
