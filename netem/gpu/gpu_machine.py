"""The machine on which the steps run: its device, memory and packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from netem.bench.measuring import device_name, torch_device

NAMED = ("torch", "vllm", "numba", "numpy", "transformers", "safetensors", "zstandard", "blake3", "uvloop")
"""Packages whose versions the record names."""
USUAL_BYTES = {"cuda": 15 << 30, "cpu": 256 << 20}
"""Size of the state by kind of device: a model of 8 billion parameters; on a CPU enough that every step runs."""
COPIES_ON_DEVICE = 6
"""States that ``bench publish`` has on the device with fp32 masters: masters 2, bf16 copies 2, the publisher's 2."""
COPIES_IN_MEMORY = 2.5
"""States in the host's memory: the hub's shadow in tmpfs, and buffers of coding and writing."""
COPIES_ON_DISK = 3
"""States on the disk: the hub's anchors."""
USED_SHARE = 0.85
"""Share of a memory that the states may take."""


def describe(device: str | None) -> dict[str, Any]:
    """The machine, for the record."""
    where = torch_device(device)
    return {
        "device": device_name(where),
        "kind": where.type,
        "device_bytes": torch.cuda.get_device_properties(where).total_memory if where.type == "cuda" else None,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "packages": versions(NAMED),
    }


def versions(modules: Iterable[str]) -> dict[str, str]:
    """Versions of the installed packages by module; vLLM's builds for CPUs have another package name."""
    packages = importlib.metadata.packages_distributions()
    return {name: importlib.metadata.version(packages[name][0]) for name in modules if name in packages}


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def state_bytes(machine: dict[str, Any], wanted_bytes: int | None, folder: Path) -> int:
    """The size of the state: the wanted one (None: the usual), or less where memories or the disk of ``folder`` are too
    small.
    """
    device_bytes = machine["memory_bytes"] if machine["device_bytes"] is None else machine["device_bytes"]
    most_bytes = min(
        device_bytes / COPIES_ON_DEVICE,
        machine["memory_bytes"] / COPIES_IN_MEMORY,
        shutil.disk_usage("/dev/shm").free / COPIES_IN_MEMORY,
        shutil.disk_usage(folder).free / COPIES_ON_DISK,
    )
    return min(wanted_bytes or USUAL_BYTES[machine["kind"]], int(USED_SHARE * most_bytes))
