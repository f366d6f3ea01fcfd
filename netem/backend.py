"""Where emulated networks with delay and loss are made: in this kernel, or in one that runs as a process. The same work runs in either."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from netem import uml
from netem.doctor import Backend, backends, probe
from p2pcast.errors import LocalError

AUTO: Final = "auto"
WITH_NETEM: Final = ("native", "uml")
"""Best first."""


def chosen(wanted: str = AUTO, every: Sequence[Backend] | None = None) -> str:
    """The backend to use; ``every``: what is known of them, else it is found out by trying. Raises LocalError that says what each lacks."""
    known = {backend.name: backend for backend in (backends(probe()) if every is None else every)}
    tried = WITH_NETEM if wanted == AUTO else (wanted,)
    for name in tried:
        if known[name].ok:
            return name
    lacks = "; ".join(f"{name} lacks {', '.join(known[name].lacks)}" for name in tried)
    if wanted == "rate":
        raise LocalError(f"networks with rates can't be made here: {lacks}. `p2pcast lab doctor` says what would help")
    raise LocalError(
        f"delay and loss can't be emulated here: {lacks}. `p2pcast lab doctor` says what would help; uml: apt-get install user-mode-linux"
    )


def results(backend: str, work: str, argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What ``work`` (``module:function``) yields there when it is called with ``argument``. From the main thread."""
    if backend == "uml":
        yield from uml.results(work, argument)
        return
    module, _, function = work.partition(":")
    yield from getattr(importlib.import_module(module), function)(argument)
