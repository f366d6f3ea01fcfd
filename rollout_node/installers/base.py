"""What the peer asks of everything that installs weights.

The order is ``start``, then for each version ``stage`` and ``commit``, then ``close``. A version may be staged and never
committed: the next ``stage`` supersedes it. Errors are p2pcast's own kinds; after one ``ready`` is False until a later
``commit`` succeeds, and ``committed`` is never a version that isn't wholly in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from p2pcast.version import Version


@dataclass(frozen=True, slots=True)
class CommitReport:
    """``pause_s``: how long nothing was generated. ``recomputed_tokens``: tokens whose keys and values are computed anew
    because of the switch, at most; None when unknown. ``detail``: the installer's own figures, fit for JSON."""

    pause_s: float
    recomputed_tokens: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


class Installer(Protocol):
    """``committed``: the version in use, None when there is none or it isn't known. ``ready``: fit for traffic."""

    name: str

    @property
    def committed(self) -> Version | None: ...

    @property
    def ready(self) -> bool: ...

    async def start(self) -> None:
        """Get in touch with the target. Raises RetryableError when it isn't there (yet)."""
        ...

    async def stage(self, version: Version, shadow: Path) -> None:
        """Make ``version`` ready. ``shadow``, a safetensors file, holds exactly that version and is held still until
        this returns, no longer. A target without a good version may be switched at once."""
        ...

    async def commit(self, version: Version) -> CommitReport:
        """Switch to the staged version. After an error the old version is in use, or ``ready`` is False."""
        ...

    async def close(self) -> None: ...
