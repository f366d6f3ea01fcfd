"""``init`` of user-mode Linux: mounts file systems, loads the network modules, does the work given to
``netem.emulation.uml``, and powers off.

It writes lines of JSON to the first serial line: ``{"result": …}`` for each result, and last ``{"error": null}`` or an
error. An unexpected error is a traceback on the console and the end of ``init``, which stops the kernel.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
import subprocess
import sys
import tty
from collections.abc import Iterator
from pathlib import Path

from netem.emulation.doctor import UML_MODULES, UML_NEEDED
from p2pcast.ground.errors import P2PCastError, UsageError

SERIAL = "/dev/ttyS0"
FINIT_MODULE = 313
"""The system call on x86, the only architecture of user-mode Linux."""
POWER_OFF = 0x4321FEDC
IO_URING = Path("/proc/sys/kernel/io_uring_disabled")
"""User-mode Linux 7.2 ends with "Bad page map" when a program that uses io_uring forks. libuv uses it where it can."""
MOUNTS = {"/proc": "proc", "/sys": "sysfs", "/run": "tmpfs", "/dev/shm": "tmpfs"}

_libc = ctypes.CDLL(None, use_errno=True)


def order(dependencies: str, wanted: tuple[str, ...]) -> list[str]:
    """Module paths from a ``modules.dep``, each after its dependencies. Raises KeyError for an unknown module."""
    needs = {path: rest.split() for path, _, rest in (line.partition(":") for line in dependencies.splitlines())}
    places = {Path(path).name.partition(".")[0].replace("-", "_"): path for path in needs}
    ordered: dict[str, None] = {}

    def add(path: str) -> None:
        for need in reversed(needs[path]):
            add(need)
        ordered.setdefault(path)

    for name in wanted:
        add(places[name])
    return list(ordered)


def _load() -> None:
    folder = UML_MODULES / platform.release()
    for path in order((folder / "modules.dep").read_text(), UML_NEEDED):
        with (folder / path).open("rb") as file:
            if _libc.syscall(FINIT_MODULE, file.fileno(), b"", 0):
                raise UsageError(f"user-mode Linux refuses {path}: {os.strerror(ctypes.get_errno())}")


def _said(work: str, argument: object) -> Iterator[dict[str, object]]:
    try:
        _load()
        module, _, function = work.partition(":")
        for result in getattr(importlib.import_module(module), function)(argument):
            yield {"result": result}
        yield {"error": None}
    except P2PCastError as error:
        yield {"error": str(error), "usage": isinstance(error, UsageError)}


def main() -> None:
    given = json.loads((Path(sys.argv[1]) / "work.json").read_text())
    for place, kind in MOUNTS.items():
        Path(place).mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", kind, kind, place], check=True)
    if IO_URING.exists():  # since Linux 6.6
        IO_URING.write_text("2")
    with open(SERIAL, "r+b", buffering=0) as serial:
        tty.setraw(serial.fileno())
        for said in _said(given["work"], given["argument"]):
            serial.write(json.dumps(said).encode() + b"\n")
    sys.stdout.flush()
    _libc.reboot(POWER_OFF)


if __name__ == "__main__":
    main()
