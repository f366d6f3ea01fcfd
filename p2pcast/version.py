"""Deprecated alias of ``p2pcast.ground.version``, kept until 0.3."""

from __future__ import annotations

import warnings

from p2pcast.ground.version import Version

__all__ = ["Version"]

warnings.warn(f"{__name__} has moved to {Version.__module__}", DeprecationWarning, stacklevel=2)
