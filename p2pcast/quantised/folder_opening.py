"""How a hub opens checkpoint folders: as they are, or through a quantiser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.quantised.quantisation_kinds import kind_named

Opening = Callable[[Path], Checkpoint]


def opening(kind: str | None) -> Opening:
    """Return the function that opens folders. Raises UsageError (unknown kind), ModuleNotFoundError (no torch)."""
    if kind is None:
        return Checkpoint.open
    from p2pcast.quantised.quantised_checkpoint import QuantisedCheckpoint

    chosen = kind_named(kind)
    return lambda folder: QuantisedCheckpoint(Checkpoint.open(folder), chosen)
