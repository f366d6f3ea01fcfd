"""Scratch arrays, kept per thread.

Newly allocated memory would cost a page fault every 4 KiB, and cells are coded on all cores at once.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt


class ScratchBuffers(threading.local):
    """Arrays by name. An array still contains the values from its last use."""

    def __init__(self) -> None:
        self._kept: dict[str, npt.NDArray[Any]] = {}

    def array(self, name: str, size: int, dtype: Any, *, zeros: bool = False) -> npt.NDArray[Any]:
        """Return ``size`` elements. ``zeros``: filled with zeros when allocated; every user must leave them zero."""
        kept = self._kept.get(name)
        if kept is None or kept.size < size or kept.dtype != dtype:
            kept = self._kept[name] = (np.zeros if zeros else np.empty)(size, dtype)
        return kept[:size]
