"""Selects where networks with delay and loss are emulated: in this kernel, or in a kernel that runs as a process. The
same work runs in either.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from netem.emulation import uml
from netem.emulation.doctor import Backend, backends, probe
from p2pcast.ground.errors import LocalError

AUTO: Final = "auto"
WITH_NETEM: Final = ("native", "uml")
"""In order of preference."""


def chosen(wanted: str = AUTO, every: Sequence[Backend] | None = None) -> str:
    """The backend to use. ``every``: known backends; None probes the machine. Raises LocalError that names what each
    backend lacks.
    """
    known = {backend.name: backend for backend in (backends(probe()) if every is None else every)}
    tried = WITH_NETEM if wanted == AUTO else (wanted,)
    for name in tried:
        if known[name].ok:
            return name
    lacks = "; ".join(f"{name} lacks {', '.join(known[name].lacks)}" for name in tried)
    if wanted == "rate":
        raise LocalError(f"networks with rates cannot be made here: {lacks}. `p2pcast lab doctor` names the remedies")
    raise LocalError(
        f"delay and loss cannot be emulated here: {lacks}. `p2pcast lab doctor` names the remedies; uml: apt-get "
        "install user-mode-linux"
    )


def results(backend: str, work: str, argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The results of ``work`` (``module:function``), called with ``argument`` in that backend. From the main thread."""
    if backend == "uml":
        yield from uml.results(work, argument)
        return
    module, _, function = work.partition(":")
    yield from getattr(importlib.import_module(module), function)(argument)
