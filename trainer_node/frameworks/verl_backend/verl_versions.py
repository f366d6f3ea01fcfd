"""The versions of verl that this adapter was tried with."""

from __future__ import annotations

import importlib.metadata
import warnings

from p2pcast.ground.errors import LocalError
from trainer_node.frameworks.tried_versions import untried

TRIED = ("0.9.1",)
OLDEST = (0, 9)
"""Earlier versions have another interface of checkpoint engines."""


def check() -> None:
    """Warns of a version of verl that was not tried. Raises LocalError if verl is missing or too old."""
    try:
        installed = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        raise LocalError(
            "trainer_node.frameworks.verl needs the package verl, which is not installed:"
            f" pip install verl=={TRIED[-1]}"
        ) from None
    if _numbers(installed) < OLDEST:
        raise LocalError(
            f"verl {installed} is too old for trainer_node.frameworks.verl: install verl {TRIED[-1]}, which was tried"
        )
    if (why := untried("verl", installed, TRIED)) is not None:
        warnings.warn(why, stacklevel=3)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)
